"""The reproduction document: means, differences and intervals that are known beforehand; missing and partial files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from tests.report.runs import row
from tptopk.experiments import published, recipes
from tptopk.experiments.recipes import PAPER, Recipe
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.refusal import Refusal
from tptopk.report import paper_tables as tables
from tptopk.report.outcomes import read
from tptopk.report.reproduction import write

PLAN = Plan(
    method="tp-topk",
    active_ratio=0.4,
    delta=1e-5,
    dataset_size=1000,
    phases=(
        Phase(steps=9, sample_rate=0.1, noise_multiplier=3.5, clip_norm=0.1, name="warm-up"),
        Phase(steps=21, sample_rate=0.1, noise_multiplier=2.25, clip_norm=0.1, name="sparse"),
    ),
)


@pytest.fixture(autouse=True)
def untuned(tmp_path, monkeypatch):
    """No tuned.toml: a run counts for its cell by whatever recipe."""
    monkeypatch.setattr(recipes, "TUNED", tmp_path / "none.toml")
    recipes.tuned.cache_clear()
    yield
    recipes.tuned.cache_clear()


@pytest.fixture
def undrawn(monkeypatch):
    """Drawing takes seconds."""
    for name in ("energy_figure", "pipeline_figure"):
        monkeypatch.setattr(f"tptopk.report.reproduction.{name}", lambda *_: None)


def made(r: Recipe, accuracy: float, **more: Any) -> dict[str, Any]:
    return {
        "dataset": r.dataset, "method": r.method, "target_epsilon": r.target_epsilon, "seed": r.seed, "variant": r.variant,
        "accuracy": accuracy, "epsilon": 2.9991, "epsilon_second_opinion": 2.9985, "epsilon_rdp": 3.2104, "active": 400,
        "coordinates": 1000, "seconds": 2.0, "plan": PLAN.to_dict(), "recipe": r.identity(), "device": "made-up",
        "versions": {"torch": "2.0"}, "commit": "abc1234", **more,
    }  # fmt: skip


def keep(folder: Path, name: str, runs: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))


def level(r: Recipe) -> float:
    """dp-sgd 80, 81, 82 by seed; tp-rand 1 above; tp-topk 2, 2.1, 2.2 above, its control .5 below it; on-topk below; on-rand scattered."""
    base = 80.0 + r.seed
    above = {"dp-sgd": 0.0, "tp-rand": 1.0, "tp-topk": 2.0 + 0.1 * r.seed, "on-topk": -3.0 + 0.2 * r.seed}
    return base + above.get(r.method, (-9.0, 9.0, 0.0)[r.seed]) - 0.5 * (r.variant == recipes.TWO_PHASES)


def test_runs_on_another_device_than_those_they_are_compared_with_are_named(tmp_path, undrawn):
    def said() -> str:
        write(tmp_path, tmp_path / "r.md", quick=True)
        return (tmp_path / "r.md").read_text()

    everything(tmp_path)
    assert "on a CPU" not in said()
    runs = [made(r, level(r), **advised(r)) for r in recipes.table_main(recipes.quick_recipe)]
    twins = [run for run in runs if run["variant"] == recipes.TWIN and run["dataset"] == "fmnist"]
    for run in twins:
        run["device"] = "cpu"
    keep(tmp_path, "main", runs)
    document = said()
    assert f"made on a CPU, in float32: {len(twins)} of the" in document
    assert row(document, "Fashion-MNIST", "1", "ours, TP-TopK's recipe")[4].endswith(" †")
    parts = document.split("**tp-topk − tp-rand")
    same, other = (part.split("**tp-topk − dp-sgd**")[0] for part in parts[1:])
    assert "†" not in same and "†" in row(other, "Fashion-MNIST", "1")[2] and "†" not in row(other, "MNIST", "1")[2]


def everything(folder: Path) -> None:
    """Every run of every table."""
    for name in ("main", "further", "ratio", "split", "context"):
        keep(folder, name, [made(r, level(r), **advised(r)) for r in recipes.TABLES[name](recipes.quick_recipe)])
    medical = [
        made(r, 85.0, auc=0.9 + 0.01 * r.seed, balanced_accuracy=0.8, sensitivity=0.9, specificity=0.7, minority_recall=0.7)
        for r in recipes.table_medical(recipes.quick_recipe)
    ]  # fmt: skip
    keep(folder, "medical", medical)
    keep(folder, "diagnostics", [row for r in recipes.table_diagnostics(recipes.quick_recipe) for row in judged(r)])
    trials = [recipes.quick_recipe("mnist", m, 1.0, 100, variant="tuning", held_out=50) for m in ("dp-sgd", "tp-topk")]
    keep(folder, "tuning", [{"recipe": r.identity(), "measured": [90.0, 91.0, 92.0], "seconds": 3.0} for r in trials])


def advised(r: Recipe) -> dict[str, Any]:
    """Restrict, cannot tell, stay dense, by seed."""
    if r.method != "tp-topk" or r.variant != PAPER:
        return {}
    verdict = ("restrict", "cannot tell", "stay dense")[r.seed]
    return {"advice": {"verdict": verdict, "active_ratio": 0.2 if r.seed == 0 else None, "score": "paper"}}


def judged(r: Recipe) -> list[dict[str, Any]]:
    curve = [(p, p ** (0.25 + 0.02 * r.target_epsilon)) for p in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)]
    return [
        {
            "dataset": r.dataset, "method": r.method, "target_epsilon": r.target_epsilon, "seed": r.seed, "score": score,
            "active_ratio": r.active_ratio, "active": 400, "coordinates": 1000, "proxy": 0.981, "proxy_noise_only": 0.98,
            "proxy_noise_only_std": 0.001, "oracle": 0.42 + 0.1 * (score == "factored") + 0.01 * r.seed + 0.01 * r.target_epsilon,
            "random": 0.4, "concentration": curve, "held_out_accuracy": 60.0, "seconds": 5.0,
            "composition": [{"name": "1.0.weight", "active": 300, "coordinates": 800, "enrichment": 0.94},
                            {"name": "1.6.weight", "active": 100, "coordinates": 200, "enrichment": 1.25}],
            "recipe": r.identity(),
        }
        for score in ("paper", "factored")
    ]  # fmt: skip


# ---- The paper's numbers ---------------------------------------------------------------------------------------------


def test_the_papers_numbers_fit_each_other_where_the_paper_does():
    assert len(published.MAIN) == 45 and published.MAIN["cifar10", 3.0, "tp-topk"] == (71.05, 0.37)
    assert published.SPLIT[0.3, 0.3] == published.MAIN["cifar10", 3.0, "tp-topk"]
    assert published.gap("cifar10", 1.0, "tp-topk", "dp-sgd") == 9.21
    assert all(published.gap(d, e, "tp-topk", "tp-rand") > 0 for d, e, _ in published.MAIN)
    gaps = {place: round(chosen - chance, 2) for place, (chance, chosen) in published.RATIO.items()}
    assert gaps["cifar10", 0.2] == 0.85 and gaps["fmnist", 0.8] == 0.05
    for numbers in published.EYEPACS.values():
        assert (numbers.sensitivity + numbers.specificity) / 2 == pytest.approx(numbers.balanced_accuracy, abs=6e-4)
    for line in published.CONTEXT:
        if line.method == "TP-TopK":
            assert all(line.accuracy[e] == published.MAIN[line.dataset, e, "tp-topk"].mean for e in line.accuracy)
    assert all(line.source for line in [*published.CONTEXT, *published.BEST])


# ---- The document ----------------------------------------------------------------------------------------------------


def test_a_mean_is_compared_with_the_papers_as_it_prints_it(tmp_path, undrawn):
    """(98.97 + 98.91 + 98.91) / 3 is 98.93, and a little less in floating point."""
    runs = [
        made(r, (98.97, 98.91, 98.91)[r.seed] if r.variant == PAPER else 99.0)
        for r in recipes.table_main(recipes.quick_recipe)
        if (r.dataset, r.target_epsilon, r.method) == ("mnist", 8.0, "tp-topk")
    ]
    keep(tmp_path, "main", runs)
    write(tmp_path, tmp_path / "r.md")
    document = (tmp_path / "r.md").read_text()
    assert "at or above the paper's in 1 of 1 cells that were run, TP-TopK's in 1 of 1" in document
    assert "between +0.00 and +0.00" in document and "Cells below the paper's" not in document


def test_a_whole_document_has_known_means_differences_and_counts(tmp_path):
    everything(tmp_path / "results")
    path = tmp_path / "docs" / "reproduction.md"
    assert write(tmp_path / "results", path) == []
    document = path.read_text()
    assert document.count("not run") == 1, "the head of a column, and nothing else"
    assert row(document, "CIFAR-10", "3", "ours")[3:6] == ["81.00 ± 1.00", "82.00 ± 1.00", "83.10 ± 1.10"]
    assert row(document, "CIFAR-10", "3", "the paper")[5] == "71.05 ± 0.37"
    assert row(document, "CIFAR-10", "3", "ours, factored score")[3:6] == ["–", "–", "83.10 ± 1.10"]

    part = document.split("## Active ratios")[1].split("## ")[0]
    columns = row(part, "CIFAR-10", "8", "0.4")
    assert columns[3:8] == ["81.00 ± 1.00", "82.60 ± 1.10", "–", "82.00 ± 1.00", "83.10 ± 1.10"]
    assert columns[9:11] == ["+1.10 [+0.85, +1.35]", "higher"]
    assert columns[12:] == ["+2.10 [+1.85, +2.35]: higher", "+0.50 [+0.50, +0.50]: higher"]

    part = document.split("## Was the advice right?")[1].split("## ")[0]
    words = row(part, "CIFAR-10", "8")
    assert words[2:4] == ["restrict (1), cannot tell (1), stay dense (1)", "0.2"] and words[4].endswith(": higher")
    assert words[5] == "83.10 at ρ = 0.8" and row(part, "MNIST", "1")[5] == "–"
    assert "Of 27 runs, advice and table agree in 9 and disagree in 9; in 9 the advice" in part

    part = document.split("**tp-topk − tp-rand**")[1].split("**")[0]
    low, high = stats.t.interval(0.95, 2, 1.1, 0.1 / 3**0.5)  # differences 1.0, 1.1, 1.2
    assert row(part, "MNIST", "1")[2:] == [
        f"+1.10 [{low:+.2f}, {high:+.2f}]", "higher", "+0.15", "yes in direction; the paper's size is ruled out",
    ]  # fmt: skip
    assert row(part, "CIFAR-10", "1")[4:] == ["+1.23", "yes"]
    lower = row(document.split("**on-topk − dp-sgd**")[1].split("**")[0], "CIFAR-10", "1")
    assert lower[3:] == ["lower", "+8.34", "no: the opposite"]
    unseen = row(document.split("**on-topk − on-rand**")[1].split("**")[0], "CIFAR-10", "1")
    assert unseen[3:] == ["no difference seen", "+0.67", "undecided: neither 0 nor the paper's is ruled out"]

    average, counts = document.split("Cell by cell:")
    assert row(average, "tp-topk − tp-rand")[1:] == [
        "9", f"+1.10 [{low:+.2f}, {high:+.2f}]", "higher", "+0.43", "yes in direction; the paper's size is ruled out",
    ]  # fmt: skip
    assert row(average, "tp-topk (factored score) − dp-sgd")[4:] == ["–", "–"]
    assert row(counts, "tp-topk − tp-rand") == [
        "tp-topk − tp-rand",
        "9",
        "9",
        "0",
        "0",
        "0",
        "0",
        "9 of 9",
        "3 / 6 / 0 / 0",
    ]
    assert row(counts, "on-topk − dp-sgd")[2:7] == ["0", "9", "0", "0", "0"]
    assert row(counts, "on-topk − on-rand")[2:8] == ["0", "0", "9", "0", "0", "6 of 9"]
    assert row(counts, "tp-topk (factored score) − dp-sgd")[7:] == ["–", "–"]
    assert "Of these 63 intervals 54 exclude 0; about 3.2 would by chance" in document
    assert (
        "at ε = 1 / 3 / 8, the chosen coordinates hold of the true gradient's energy by the paper score 44.0 / 46.0 / 51.0%"
        in document
    )
    assert "with 3 seeds, 2 degrees of freedom" in document
    assert row(document, "MNIST", "1", "tp-topk", "2.9991", "2.9985", "3.2104")[6:] == ["9 + 21", "3.500 / 2.250", "400 of 1,000"]  # fmt: skip
    assert row(document, "`split.jsonl`", "27", "-0.0009")[3:] == ["-0.0006 to -0.0006", "+0.2113 to +0.2113"]
    seconds = 2.0 * (189 + 27 + 168 + 27 + 81 + 21) + 5.0 * 9 + 3.0 * 2
    assert (
        f"Runs of the tables: 522 of 522, 0 of them taken from another line. Seconds of the runs that are shown, each counted once: {seconds:,.0f}."
        in document
    )
    for target in ("main", "further", "ratio", "split", "medical", "context", "diagnostics"):
        assert f"`tptopk reproduce table-{target} --device cuda`" in document
    for disagreement in published.DISAGREEMENTS:
        assert disagreement in document
    for name in ("energy", "pipeline"):
        assert f"]({name}.png)" in document and (path.parent / f"{name}.png").stat().st_size > 10_000


def test_cells_below_the_papers_are_listed_with_what_the_other_methods_reach(tmp_path, undrawn):
    everything(tmp_path / "results")
    write(tmp_path / "results", tmp_path / "r.md")
    part = (tmp_path / "r.md").read_text().split("**Cells below the paper's.**")[1].split("\n**")[0]
    assert row(part, "MNIST", "3", "tp-topk (factored score)") == [
        "MNIST", "3", "tp-topk (factored score)", "83.10 ± 1.10", "98.33 ± 0.05", "-15.23 [-17.95, -12.51]", "lower", "83.10 (tp-topk)",
    ]  # fmt: skip
    assert "| CIFAR-10 |" not in part, "ours are above there"


def test_what_was_tuned_further_stands_between_the_main_table_and_the_papers(tmp_path, undrawn):
    everything(tmp_path / "results")
    runs = [made(r, level(r) + 1.0) for r in recipes.table_further(recipes.quick_recipe)]
    keep(tmp_path / "results", "further", runs)
    write(tmp_path / "results", tmp_path / "r.md")
    document = (tmp_path / "r.md").read_text()
    part = document.split("## Tuned further")[1].split("\n## ")[0]
    assert row(part, "CIFAR-10", "3", "as in the main table")[3:] == ["81.00 ± 1.00", "82.00 ± 1.00", "83.10 ± 1.10"]
    assert row(part, "CIFAR-10", "3", "tuned further")[3:] == ["82.00 ± 1.00", "83.00 ± 1.00", "84.10 ± 1.10"]
    assert row(part, "CIFAR-10", "3", "the paper's")[5] == "71.05 ± 0.37"
    assert row(part, "CIFAR-10", "3", "tp-topk − the paper's")[3].startswith("+13.05 [+10.")
    assert row(part, "CIFAR-10", "3", "tp-topk − tp-rand")[3:] == ["+1.10 [+0.85, +1.35]", "higher"]
    assert row(part, "CIFAR-10", "3", "tp-topk − dp-sgd")[3:] == ["+2.10 [+1.85, +2.35]", "higher"]
    before = document.split("## Tuned further")[0]
    assert "84.10" not in before, "the main table and its verdicts know nothing of it"


def test_the_stand_in_is_named_wherever_its_figures_appear(tmp_path, undrawn):
    everything(tmp_path / "results")
    write(tmp_path / "results", tmp_path / "r.md")
    document = (tmp_path / "r.md").read_text()
    for line in document.splitlines():
        if "PneumoniaMNIST" in line:
            assert re.search("stand-in|stands in", line), line
    assert row(document, "PneumoniaMNIST (stand-in for EyePACS)", "8", "tp-topk")[3] == "91.00 ± 1.00"
    assert row(document, "EyePACS (the paper)", "8", "tp-topk")[3:] == ["68.2", "0.631", "0.520", "0.742", "0.520"]
    assert "Its minority is *normal*" in document


def test_the_proxy_never_stands_without_its_noise_only_value(tmp_path, undrawn):
    everything(tmp_path / "results")
    write(tmp_path / "results", tmp_path / "r.md")
    found = row((tmp_path / "r.md").read_text(), "CIFAR-10", "8", "factored", "0.981 ± 0.000")
    assert found[4] == "0.980 ± 0.000" and found[6:8] == ["0.610 ± 0.010", "0.400"] and found[8].endswith(": higher")


def test_without_any_file_every_cell_says_not_run(tmp_path):
    assert write(tmp_path / "nothing", tmp_path / "r.md") == []
    document = (tmp_path / "r.md").read_text()
    assert row(document, "MNIST", "1", "ours")[3:] == ["not run"] * 5
    average, counts = document.split("Cell by cell:")
    assert row(average, "tp-topk − tp-rand")[1:] == ["0", "not run", "not run", "–", "–"]
    assert row(counts, "tp-topk − tp-rand")[2:7] == ["0", "0", "0", "0", "9"]
    assert "Runs of the tables: 0 of 522, 0 of" in document and "Nothing is chosen yet" in document
    assert not list(tmp_path.glob("*.png")) and ".png" not in document


def test_partial_files_say_how_many_of_how_many(tmp_path):
    runs = [made(r, level(r)) for r in recipes.table_main(recipes.quick_recipe) if r.dataset == "mnist" and r.seed < 2]
    keep(tmp_path / "results", "main", runs[:-1])
    with (tmp_path / "results" / "main.jsonl").open("a") as file:
        file.write(json.dumps(runs[-1])[:100])  # cut short
    write(tmp_path / "results", tmp_path / "r.md")
    document = (tmp_path / "r.md").read_text()
    assert f"{len(runs) - 1} of 189 runs are there" in document
    assert row(document, "MNIST", "1", "ours")[3] == "80.50 ± 0.71 (2 of 3 seeds)"
    assert row(document, "CIFAR-10", "1", "ours")[3] == "not run"


def test_variants_that_no_recipe_has_are_extra_rows(tmp_path):
    own = [made(r, level(r)) for r in recipes.table_main(recipes.quick_recipe) if r.variant == PAPER]
    extra = [made(recipes.quick_recipe("mnist", "tp-topk", 1.0, s, variant="ρ by advice"), 90.0 + s) for s in range(3)]
    keep(tmp_path / "results", "main", own + extra)
    main = read(tmp_path / "results", "main")
    assert (main.there, main.wanted) == (135, 189)
    assert row(tables.main_accuracy(main), "MNIST", "1", "ours, ρ by advice")[5] == "91.00 ± 1.00"
    assert "**tp-topk (ρ by advice) − tp-rand**" in tables.main_differences(main)


def test_runs_of_outdated_recipes_are_counted_and_not_shown(tmp_path):
    current = recipes.table_named("main", quick=True)
    runs = [made(r, 50.0) for r in current]
    runs[0]["recipe"]["learning_rate"] = 123.0
    keep(tmp_path / "quick", "main", runs)
    found = read(tmp_path / "quick", "main", quick=True)
    assert (found.there, found.wanted, found.outdated) == (len(runs) - 1, len(runs), 1)
    write(tmp_path / "quick", tmp_path / "r.md", quick=True)
    assert "1 lines of outdated recipes are not shown" in (tmp_path / "r.md").read_text()


def test_of_two_lines_of_one_run_the_later_counts(tmp_path):
    r = recipes.quick_recipe("mnist", "dp-sgd", 1.0, 0)
    keep(tmp_path / "results", "main", [made(r, 10.0), made(r, 20.0)])
    assert read(tmp_path / "results", "main").values(method="dp-sgd") == {0: 20.0}


def test_a_run_without_its_measure_is_refused(tmp_path):
    r = recipes.quick_recipe("mnist", "dp-sgd", 1.0, 0)
    keep(tmp_path / "results", "main", [{**made(r, 10.0), "accuracy": None}])
    with pytest.raises(Refusal, match="a run of main.jsonl has no accuracy"):
        write(tmp_path / "results", tmp_path / "r.md")


def test_without_matplotlib_the_document_is_still_written(tmp_path, monkeypatch):
    everything(tmp_path / "results")

    def missing(*_: object) -> None:
        raise Refusal("figures need matplotlib")

    for name in ("energy_figure", "pipeline_figure"):
        monkeypatch.setattr(f"tptopk.report.reproduction.{name}", missing)
    complaints = write(tmp_path / "results", tmp_path / "r.md")
    assert len(complaints) == 2 and ".png" not in (tmp_path / "r.md").read_text()
