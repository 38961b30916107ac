"""The page about runs: what it claims, whatever state the folder is in."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.report.runs import BAD, make_run
from tptopk.cli import app
from tptopk.privacy.accounting import round_up
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.refusal import Refusal
from tptopk.report.claim import best_guess, standing
from tptopk.report.drawings import WIDTH, chart, density, density_map, error_bars, thinned
from tptopk.report.drawings import Curve as Line
from tptopk.report.markup import escaped, from_markdown, table, tag
from tptopk.report.page import MOST_BYTES, compared, page, write_page
from tptopk.report.sheet import POINTS, read_sheet
from tptopk.supports.support import Support
from tptopk.training.verify import verify


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def folder(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


class Outline(HTMLParser):
    """The elements, their attributes and the text of a page; every element must be closed."""

    VOID = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not self._open or self._open[-1] not in ("style", "script"):
            self.text += data


def page_of(*folders) -> Outline:
    return Outline(page([read_sheet(folder) for folder in folders]))


def test_the_first_claim_is_the_ledgers_epsilon(folder):
    found = page_of(folder)
    verdict = verify(folder)
    claim = f"(ε, δ) = ({round_up(verdict.epsilon)}, 0.0001)"
    assert verdict.holds and claim in found.text
    assert found.text.index("Every check of this run holds") < found.text.index(claim) < found.text.index("The plan")
    for words in (
        "Over the steps",
        "warm-up",
        "sparse begins",
        "Signal kept",
        "Would training fewer coordinates help?",
    ):
        assert words in found.text
    for words in ("Where the trained coordinates are", "This run was not audited", "What is not covered", "0.weight"):
        assert words in found.text


def test_the_page_needs_nothing_from_outside(folder):
    text = page([read_sheet(folder)])
    found = Outline(text)
    outside = [value for name, value in found.attributes if name in ("src", "href") and value != "data:,"]
    assert outside == [] and "http://" not in text and "https://" not in text and "@import" not in text
    assert len(text.encode()) < MOST_BYTES and "default-src 'none'" in text


def test_epsilon_over_the_steps_grows_to_what_was_spent(folder):
    sheet = read_sheet(folder)
    steps, values = zip(*sheet.spent, strict=True)
    assert steps[0] == 0 and steps[-1] == 60 and 24 in steps and len(steps) <= POINTS
    assert values[0] == 0 and list(values) == sorted(values) and values[-1] == pytest.approx(sheet.verdict.epsilon)


def test_the_chosen_support_is_on_the_energy_curve(folder):
    sheet = read_sheet(folder)
    assert sheet.support is not None and sheet.chosen is not None and sheet.chosen.active == sheet.support.size
    assert [c.active for c in sheet.kept] == sorted({c.active for c in sheet.kept})


def test_what_comes_from_files_is_escaped(folder):
    summary = json.loads((folder / "run.json").read_text())
    summary["config"] = {"data": BAD, BAD: 1, "score": BAD}
    summary["engine"] = BAD
    summary["test"] = {"accuracy": 0.5, BAD: 1.0, "loss": BAD}
    (folder / "run.json").write_text(json.dumps(summary))
    (folder / "audit.json").write_text(
        json.dumps({"verdict": BAD, "at_least": {BAD: 1.0}, "claimed": 3, "error_rate": BAD})
    )
    masks = {BAD.replace("\x00", ""): torch.ones(3, 2, dtype=torch.bool)}
    Support(masks).save(folder / "support.safetensors")
    named = folder.rename(folder.parent / "<script>alert(1)<")
    found = page_of(named)
    assert found.names.count("script") == 1 and "img" not in found.names
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "<script>document.title='owned'</script>" in found.text and "\x00" not in found.text


def test_a_changed_ledger_is_said_in_red_at_the_top(folder):
    text = (folder / "ledger.jsonl").read_text()
    (folder / "ledger.jsonl").write_text(text.replace('"support_size":', '"support_size": ', 1))
    found = page_of(folder)
    assert standing(read_sheet(folder)) == ("bad", "The checks of this run FAIL: it supports no privacy claim")
    assert ("class", "claim bad") in found.attributes and "supports a claim of" not in found.text
    assert "They are right at most" not in found.text


def test_another_model_fails_the_page(folder):
    (folder / "model.safetensors").write_bytes((folder / "support.safetensors").read_bytes())
    found = page_of(folder)
    assert ("class", "claim bad") in found.attributes and "by its log alone: the checks fail" in found.text


def test_a_seeded_run_is_an_experiment(tmp_path):
    found = page_of(make_run(tmp_path / "seeded", "dp-sgd", seed=1))
    assert "An experiment, not for release" in found.text and ("class", "claim care") in found.attributes
    assert "has no warm-up" in found.text
    assert "supports a claim of" not in found.text and "They are right at most" not in found.text


def test_a_run_without_privacy_says_so_first(tmp_path):
    with pytest.warns(PrivacyWarning, match="NOT private"):
        found = page_of(make_run(tmp_path / "open", "non-private"))
    assert "This model is NOT private" in found.text and ("class", "claim bad") in found.attributes
    assert "supports a claim of" not in found.text


def test_an_unfinished_run_is_charged_in_full(folder):
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(lines[: len(lines) // 2]) + lines[len(lines) // 2][:20])
    metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(
        "".join(metrics[: len(lines) // 2 - 2])
    )  # of the charges, after plan and attempt
    for name in ("model.safetensors", "support.safetensors", "statement.md"):
        (folder / name).unlink()
    (folder / "run.json").write_text('{"format": 1, "status": "running", "method": "tp-topk", "config": {}}')
    sheet = read_sheet(folder)
    found = Outline(page([sheet]))
    assert sheet.verdict.epsilon == pytest.approx(sheet.record.plan.epsilon())
    assert "This run is not finished" in found.text and "the whole plan counts as spent" in found.text
    assert f"go on with: tptopk.fit(…, out='{folder}', resume=True)" in found.text
    outcomes = {what: ok for what, ok, _ in sheet.verdict.checks}
    assert outcomes["end"] is None and outcomes["files"] is None and found.text.count("○ open") == 2
    assert "5 of 7 checks hold; 2 are open until the run is closed" in found.text and "36 (" in found.text


def test_the_page_begins_with_what_an_officer_files(folder):
    found = page_of(folder)
    place = [
        found.text.index(words) for words in ("Runfinished", "Begun20", "Datanot named; declared size: 200 records")
    ]
    assert place == sorted(place) and place[-1] < found.text.index("Every check of this run holds")
    assert "ModelSequential" in found.text and "Protected unitone record" in found.text


def test_a_delta_of_one_in_n_is_no_green_page(tmp_path):
    with pytest.warns(PrivacyWarning, match="delta = 0.01"):
        path = make_run(tmp_path / "loose", delta=0.01)
        sheet = read_sheet(path)
        several = page_of(path, make_run(tmp_path / "tight"))
    assert standing(sheet)[0] == "care" and "δ is too large" in standing(sheet)[1]
    assert "train with a δ well below 0.005" in Outline(page([sheet])).text
    assert ("class", "claim care") in several.attributes and ("class", "claim good") in several.attributes
    assert "too large for a promise: loose." in several.text
    done = CliRunner().invoke(app, ["report", str(path), "-o", str(tmp_path / "a.html")])
    assert done.stderr.count("δ is too large") == 1 and "delta = " not in done.stderr


def test_rows_of_a_comparison_say_what_differs_and_which_folders(finished, tmp_path):
    runs = [make_run(tmp_path / "clinic", data="clinic.csv"), make_run(tmp_path / "scans", data="scans.npz")]
    rows = compared([read_sheet(path) for path in runs])
    assert [row["label"] for row in rows] == ["tp-topk (clinic.csv)", "tp-topk (scans.npz)"]
    assert "trained on different data" in page_of(*runs).text
    twins = compared([read_sheet(finished), read_sheet(runs[0])])
    assert [row["label"] for row in twins] == ["tp-topk (data not named)", "tp-topk (clinic.csv)"]
    (same,) = compared([read_sheet(finished), read_sheet(finished)])
    assert same["label"] == "tp-topk" and same["runs"] == 2 and same["names"] == ["finished", "finished"]
    assert "finished, finished" in page_of(finished, finished).text


def test_no_axis_of_percentages_goes_beyond_100():
    drawn = error_bars([("a", [100.0, 92.0], 96.0, 5.66)], "test accuracy, %")
    assert ">100<" in drawn and not re.search(r">1(0[1-9]|[1-9]\d)<", drawn)
    x = [float(value) for value in re.findall(r'x2="([\d.]+)"', drawn)]
    assert max(x) <= WIDTH


def test_on_a_phone_a_cell_says_its_column():
    assert 'data-label="clip norm C"' in table(["phase", "clip norm C"], [["warm-up", 1]])


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "plan.json",
        "ledger.jsonl",
        "metrics.jsonl",
        "support.safetensors",
        "warmup.safetensors",
        "statement.md",
        "model.safetensors",
        "audit.json",
    ],
)
@pytest.mark.parametrize("damage", ["gone", "noise", "cut", "list"])
def test_a_damaged_file_never_stops_the_page(folder, name, damage):
    path = folder / name
    path.touch()
    content = {
        "noise": bytes(range(256)) * 4,
        "cut": path.read_bytes()[: path.stat().st_size // 2],
        "list": b"[[[1]]]\n",
    }
    path.unlink() if damage == "gone" else path.write_bytes(content[damage])
    sheet = read_sheet(folder)
    Outline(page([sheet]))
    if name in ("ledger.jsonl", "plan.json", "support.safetensors", "model.safetensors", "statement.md") and not (
        name == "ledger.jsonl" and damage == "cut"
    ):
        assert standing(sheet)[0] == "bad"


def test_values_of_the_wrong_kind_are_left_out(folder):
    (folder / "run.json").write_text('{"test": [1], "config": 3, "seconds": "x", "engine": 5, "facts": []}')
    (folder / "metrics.jsonl").write_text(
        '{"step": "a", "support_size": 1, "gradient_norm": NaN}\n3\n' + "[" * 5000 + "\n"
    )
    (folder / "audit.json").write_text('{"at_least": 3, "claimed": "x", "observations": null, "verdict": 5}')
    sheet = read_sheet(folder)
    assert sheet.test == {} and sheet.steps.damaged == 3
    assert "3 lines of metrics.jsonl are damaged" in Outline(page([sheet])).text


def test_a_very_long_run_is_thinned(folder):
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, 200_001):
            norm = 50.0 if step == 77_777 else 1.0
            file.write(f'{{"step":{step},"phase":1,"support_size":10,"learning_rate":0.1,"gradient_norm":{norm}}}\n')
    text = page([read_sheet(folder)])
    assert len(text.encode()) < 500_000 and "to 50)" in Outline(text).text + text  # the one peak is still there


def test_many_runs_and_layers_stay_below_the_weight(folder):
    masks = {f"block.{i}.weight": torch.rand(64, 64) < 0.4 for i in range(150)}
    Support(masks).save(folder / "support.safetensors")
    sheet = read_sheet(folder)
    text = page([sheet] * 40)
    assert len(text.encode()) < MOST_BYTES and "90 smaller layers together" in text


def test_several_runs_are_compared_with_error_bars(finished, tmp_path):
    dense = [make_run(tmp_path / f"dense-{seed}", "dp-sgd", seed=seed) for seed in (1, 2)]
    sheets = [read_sheet(path) for path in (finished, *dense)]
    rows = {row["method"]: row for row in compared(sheets)}
    accuracies = [100 * sheet.test["accuracy"] for sheet in sheets[1:]]
    assert rows["dp-sgd"]["mean"] == pytest.approx(np.mean(accuracies))
    assert rows["dp-sgd"]["std"] == pytest.approx(np.std(accuracies, ddof=1)) and rows["tp-topk"]["std"] is None
    found = Outline(page(sheets))
    assert f"{np.mean(accuracies):.2f} ± {np.std(accuracies, ddof=1):.2f}" in found.text
    assert "2 of 3 runs used a fixed seed" in found.text and found.names.count("h1") == 1


def test_the_ceiling_on_guesses_is_that_of_randomised_response():
    """Randomised response tells the truth with e^ε/(1 + e^ε) and meets (ε, 0) exactly."""
    for epsilon in (0.0, 0.1, 1.0, 3.0, 20.0):
        assert best_guess(epsilon, 0.0) == pytest.approx(math.exp(epsilon) / (1 + math.exp(epsilon)))
    assert best_guess(0.0, 0.2) == pytest.approx(0.6) and best_guess(1e6, 1e-5) == 1.0


def test_thinning_keeps_every_peak():
    ys = np.sin(np.arange(10_000.0))
    ys[1234] = 9.0
    xs, mean, low, high = thinned(np.arange(10_000.0), ys, 100)
    assert len(xs) == 100 and max(high) == 9.0 and min(low) == ys.min() and np.mean(mean) == pytest.approx(ys.mean())


def test_a_map_counts_every_coordinate_once():
    mask = np.random.default_rng(0).random((37, 5, 3, 3)) < 0.3
    whole = density(mask, 37 * 45)
    assert whole.shape == (37, 45) and np.array_equal(whole, mask.reshape(37, 45))
    assert max(density(mask, 100).shape) * min(density(mask, 100).shape) <= 110
    assert "<path" not in density_map(np.zeros((4, 4), dtype=bool), 16, "none")


def test_charts_of_one_point_or_equal_values_are_drawn():
    for xs, ys in (([1.0], [0.0]), ([1.0, 2.0], [0.0, 0.0]), ([0.0, 1e9], [1e-12, 1e-12]), ([1.0, 2.0], [5.0, 5.0])):
        drawn = chart([Line("y", xs, ys)], title="t", x_label="x", y_label="y")
        assert "nan" not in drawn and "inf" not in drawn


def test_only_markup_is_taken_as_html():
    assert tag("p", "<b>", tag("i", "&")) == "<p>&lt;b&gt;<i>&amp;</i></p>"
    assert tag("p", "", title='"><script>') == '<p title="&quot;&gt;&lt;script&gt;"></p>'
    assert escaped("\x00\ud800") == "�?" and '<td data-label="b">&lt;i&gt;</td>' in table(["a", "b"], [["x", "<i>"]])
    assert from_markdown("# A\n\n- **b** <i>\n\n| x | y |\n|---|---|\n| 1 | <2 |").count("&lt;") == 2


def test_command_writes_the_page(folder, tmp_path):
    target = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(target), "--json"])
    values = json.loads(done.stdout)
    assert done.exit_code == 0 and values["bytes"] == target.stat().st_size and values["runs"][0]["holds"] is True
    assert re.search(r"<h1>Private training: run</h1>", target.read_text(encoding="utf-8"))


def test_what_cannot_be_reported_is_refused(folder, tmp_path):
    with pytest.raises(Refusal, match="neither ledger.jsonl nor run.json"):
        write_page([tmp_path / "nothing"], tmp_path / "a.html")
    with pytest.raises(Refusal, match="ends in .html"):
        write_page([folder], folder / "run.json")
    with pytest.raises(Refusal, match="given twice"):
        write_page([folder, f"{folder}/."], tmp_path / "a.html")
    with pytest.raises(Refusal, match="cannot write"):
        write_page([folder], tmp_path / "no" / "a.html")
