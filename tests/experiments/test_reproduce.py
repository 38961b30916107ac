"""Results files: appended to, continued, never run twice; and tptopk reproduce from data to document."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial

import pytest

from tests.data.made import make_cifar10, make_mnist
from tptopk.cli import main
from tptopk.experiments import recipes, reproduce
from tptopk.privacy.refusal import Refusal
from tptopk.supports.advice import advise
from tptopk.supports.warmup import WarmUp


@pytest.fixture
def tptopk(monkeypatch, capsys, tmp_path):
    """(status, standard output, standard error) of the command line in an empty folder, whose data is made up."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TPTOPK_DATA", str(tmp_path / "data"))
        monkeypatch.setattr(sys, "argv", ["tptopk", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def line(r: recipes.Recipe, **more: object) -> str:
    return json.dumps({"recipe": r.identity(), **more}) + "\n"


RECIPES = [recipes.quick_recipe("mnist", "dp-sgd", 1.0, seed) for seed in (0, 1, 2)]


def test_finished_runs_are_not_run_again_and_others_are_appended(tmp_path):
    path, ran = tmp_path / "new" / "main.jsonl", []

    def run(r, data_dir, device):
        ran.append(r.seed)
        return [{"recipe": r.identity()}]

    reproduce.run_all(RECIPES[:2], path, None, "cpu", lambda result: None, run)
    reproduce.run_all(RECIPES, path, None, "cpu", lambda result: None, run)
    assert ran == [0, 1, 2]
    assert [result["recipe"]["seed"] for result in reproduce.read_results(path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_half_written_last_line_is_cut_off_and_run_again(tmp_path, cut):
    path, ran = tmp_path / "main.jsonl", []
    path.write_text(line(RECIPES[0]) + line(RECIPES[1])[:-cut])
    kept = 2 if cut == 1 else 1  # without its end of line it is still whole
    assert len(reproduce.read_results(path)) == kept
    reproduce.run_all(
        RECIPES[:2], path, None, "cpu", lambda result: None, lambda r, *_: ran.append(r) or [{"recipe": r.identity()}]
    )
    assert ran == RECIPES[1:2]
    assert path.read_text() == line(RECIPES[0]) + line(RECIPES[1])


def test_a_run_that_was_cut_between_its_lines_is_not_finished(tmp_path):
    path = tmp_path / "diagnostics.jsonl"

    def run(r, data_dir, device):
        return [{"recipe": {**r.identity(), "score": score}} for score in ("paper", "factored")]

    reproduce.run_all(RECIPES[:1], path, None, "cpu", lambda result: None, run)
    assert not reproduce.pending(RECIPES[:1], path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) - 10])
    assert reproduce.pending(RECIPES[:1], path) == RECIPES[:1]


def test_a_run_from_before_a_setting_existed_counts_as_run_with_its_default(tmp_path):
    path, old = tmp_path / "main.jsonl", RECIPES[0].identity()
    assert old.pop("annealed") is False
    path.write_text(json.dumps({"recipe": old}) + "\n")
    assert reproduce.pending([RECIPES[0], replace(RECIPES[0], annealed=True)], path) == [
        replace(RECIPES[0], annealed=True)
    ]


@pytest.mark.parametrize("bad", ['{"recipe": {"seed"', "[1, 2]", '{"accuracy": 3}'])
def test_a_spoilt_line_before_the_last_is_named(tmp_path, bad):
    path = tmp_path / "main.jsonl"
    path.write_text(line(RECIPES[0]) + bad + "\n" + line(RECIPES[1]))
    with pytest.raises(Refusal, match=r"line 2 of .*main.jsonl is not"):
        reproduce.read_results(path)


def test_a_run_that_another_table_has_is_taken_from_there(tmp_path, monkeypatch):
    ran, shown = [], []
    monkeypatch.setattr(reproduce, "run_one", lambda r, data_dir, device: ran.append(r) or json.loads(line(r)))
    (tmp_path / "main.jsonl").write_text(line(RECIPES[0]))
    twin = replace(RECIPES[0], variant="ρ = 1")
    other = replace(twin, seed=RECIPES[0].seed + 7)
    reproduce.run_all([twin, other], tmp_path / "ratio.jsonl", None, "cpu", shown.append)
    found = reproduce.read_results(tmp_path / "ratio.jsonl")
    assert ran == [other] and {run["recipe"]["variant"] for run in found} == {"ρ = 1"} and len(shown) == 2
    taken = next(run for run in found if "taken_from" in run)
    assert taken["taken_from"] == "main.jsonl" and taken["seconds"] == 0 and taken["recipe"] == twin.identity()
    assert not reproduce.pending([twin, other], tmp_path / "ratio.jsonl")


def test_a_run_says_which_source_it_is_of_or_nothing(tmp_path, monkeypatch):
    reproduce.commit.cache_clear()
    monkeypatch.setenv("TPTOPK_COMMIT", "abc1234")
    assert reproduce.commit() == "abc1234"
    reproduce.commit.cache_clear()
    monkeypatch.delenv("TPTOPK_COMMIT")
    monkeypatch.setattr(reproduce, "__file__", str(tmp_path / "site-packages" / "reproduce.py"))
    tmp_path.joinpath("site-packages").mkdir()
    subprocess.run(
        ["git", "init", "-q", str(tmp_path)], check=True
    )  # somebody's own repository, with the library inside
    assert reproduce.commit() is None
    reproduce.commit.cache_clear()


def test_all_passes_over_tables_without_the_dataset(tptopk, monkeypatch):
    asked = []
    monkeypatch.setattr(reproduce, "run_all", lambda wanted, *_: asked.append({r.dataset for r in wanted}))
    status, _, error = tptopk("reproduce", "all", "--quick", "--only", "mnist")
    assert status == 0, error
    assert asked == [{"mnist"}, set(), set(), set(), {"mnist"}, set()]


def test_shares_cover_every_run_once():
    table = recipes.table_named("main", quick=True)
    shares = [reproduce.share_of(table, n, 4) for n in range(1, 5)]
    assert sorted(map(str, table)) == sorted(str(r) for share in shares for r in share)


@pytest.mark.parametrize(
    "words, message",
    [
        (["table-man"], "unknown table or figure 'table-man'; did you mean 'table-main'?"),
        (["main"], "did you mean 'table-main'?"),
        (["figure-energie"], "did you mean 'figure-energy'?"),
        (["table-main", "--part", "7/6"], "part is '7/6'; it must be like 2/6"),
        (["table-main", "--quick", "--only", "mnits"], "unknown dataset 'mnits'; did you mean 'mnist'?"),
        (["table-main", "--quick", "--only", "mnist"], "tptopk data fetch mnist"),
        (["table-main", "--quick", "--only", "mnist, fmnist"], "tptopk data fetch"),
        (["table-split", "--quick", "--only", "mnist"], "table split has no runs on mnist; give --only cifar10"),
        (
            ["figure-energy", "--quick", "--only", "mnist"],
            "table diagnostics has no runs on mnist; give --only cifar10",
        ),
        (["figure-pipeline", "--quick", "--only", "fmnist"], "of no run on fmnist"),
        (["table-main", "--quick", "--device", "cudda"], "cannot use device 'cudda'"),
        (["table-main", "--quick", "--device", "cuda:99"], "cannot use device 'cuda:99'"),
        (["table-main", "--quick", "--results", __file__], "give --results FOLDER"),
    ],
)
def test_what_a_person_got_wrong_is_one_line(tptopk, words, message):
    status, out, error = tptopk("reproduce", *words)
    assert status == 2 and not out and message in error and "Traceback" not in error


def test_a_run_keeps_what_advice_its_warm_up_would_have_given(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce.Plan, "calibrate", partial(reproduce.Plan.calibrate, accountant="rdp"))  # faster
    reproduce._calibrated.cache_clear()
    make_mnist(tmp_path)
    r = recipes.quick_recipe("mnist", "tp-topk", 3.0, 0, epochs=8)
    made = reproduce.features(r.dataset, str(tmp_path), r.views, r.records, "cpu")
    train, _ = reproduce.held_out(made, 0)
    r = replace(r, batch_size=max(1, len(train[0]) // 5))
    model = reproduce.network_for(r, train[0], made.scale)
    warmup = WarmUp(reproduce.plan_for(r, train[0], model))
    reproduce.train_one(r, train, model, on_private_gradient=warmup.add)
    said = advise(warmup)
    assert reproduce.run_one(r, str(tmp_path), "cpu")["advice"] == {
        "verdict": said.verdict, "active_ratio": said.active_ratio, "score": said.score,
    }  # fmt: skip
    short = reproduce.run_one(replace(r, epochs=2), str(tmp_path), "cpu")
    assert short["advice"] is None, "too few steps for any advice"
    assert "advice" not in reproduce.run_one(replace(r, method="dp-sgd"), str(tmp_path), "cpu")
    reproduce._calibrated.cache_clear()


def test_quick_from_made_up_data_to_a_document_and_again_without_running(tptopk, tmp_path, monkeypatch):
    make_mnist(tmp_path / "data")
    make_cifar10(tmp_path / "data")
    monkeypatch.setattr(recipes, "HELD_OUT", 4)
    monkeypatch.setattr(recipes, "EPSILONS", (3.0,))
    monkeypatch.setattr(recipes, "METHODS", ("dp-sgd", "tp-rand", "tp-topk"))
    status, out, error = tptopk("reproduce", "table-main", "--quick", "--only", "mnist")
    assert status == 0, error
    assert out == "results/quick/reproduction.md\n" and "main 5/5: mnist tp-rand ε = 3 TP-TopK's recipe seed 0" in error
    first = (tmp_path / "results/quick/reproduction.md").read_text()
    assert "5 of 15 runs are there" in first and "Its figures mean nothing" in first
    runs = reproduce.read_results(tmp_path / "results/quick/main.jsonl")
    assert all(0.999 * 3 <= run["epsilon"] <= 3 and abs(run["epsilon_second_opinion"] - 3) < 0.02 for run in runs)

    status, out, _ = tptopk("reproduce", "table-main", "--quick", "--only", "mnist", "--part", "1/2")
    assert status == 0 and not out, "a share writes no document"
    status, _, error = tptopk("reproduce", "figure-pipeline", "--quick")
    assert status == 0 and (tmp_path / "results/quick/pipeline.png").stat().st_size > 10_000, error
    status, _, error = tptopk("reproduce", "figure-energy", "--quick")
    assert status == 0 and (tmp_path / "results/quick/energy.png").stat().st_size > 10_000, error
    judged = reproduce.read_results(tmp_path / "results/quick/diagnostics.jsonl")
    for run in (*runs, *judged):  # every line says what it cost and what it ran on
        assert reproduce.Plan.from_dict(run["plan"]).epsilon() == run["epsilon"] <= run["epsilon_rdp"]
        assert abs(run["epsilon_second_opinion"] - 3) < 0.02 and run["device"] == "cpu" and run["versions"]
        assert {"commit", "recipe"} <= set(run)
    document = (tmp_path / "results/quick/reproduction.md").read_text()
    assert "![Energy" in document and "(pipeline.png)" in document and "6 of 15 runs" in document

    monkeypatch.setattr(reproduce, "run_one", lambda *_: pytest.fail("a finished run was run again"))
    for words in (["table-main", "--only", "mnist"], ["figure-pipeline"], ["all", "--render"]):
        status, out, error = tptopk("reproduce", *words, "--quick")
        assert status == 0, error
        assert (tmp_path / "results/quick/reproduction.md").read_text() == document
    status, out, _ = tptopk("reproduce", "all", "--render", "--quick", "--json")
    assert json.loads(out)["document"] == "results/quick/reproduction.md"
