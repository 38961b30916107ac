"""tptopk reproduce, from data to document; and what a run of it says of itself."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.data.made import make_cifar10, make_mnist
from tptopk.cli import main
from tptopk.experiments import recipes, reproduce, results
from tptopk.experiments.features import seen
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
    monkeypatch.setattr(
        results, "run_all", lambda jobs, *_: asked.extend({(j.path.stem, j.recipe.dataset) for j in jobs})
    )
    status, _, error = tptopk("reproduce", "all", "--quick", "--only", "mnist")
    assert status == 0, error
    assert sorted(asked) == [("context", "mnist"), ("further", "mnist"), ("main", "mnist")]


@pytest.mark.parametrize(
    "words, message",
    [
        (["table-man"], "unknown table or figure 'table-man'; did you mean 'table-main'?"),
        (["main"], "did you mean 'table-main'?"),
        (["figure-energie"], "did you mean 'figure-energy'?"),
        (["table-main", "--quick", "--only", "mnits"], "unknown dataset 'mnits'; did you mean 'mnist'?"),
        (["table-main", "--quick", "--only", "mnist"], "tptopk data fetch mnist"),
        (["table-main", "--quick", "--only", "mnist, fmnist"], "tptopk data fetch"),
        (["table-split", "--quick", "--only", "mnist"], "table split has no runs on mnist; give --only cifar10"),
        (
            ["figure-energy", "--quick", "--only", "mnist"],
            "table diagnostics has no runs on mnist; give --only cifar10",
        ),
        (["figure-pipeline", "--quick", "--only", "fmnist"], "of no run on fmnist"),
        (["table-further", "--quick", "--only", " , "], "--only names no dataset; give some of mnist,fmnist"),
        (
            ["all", "--render", "--results", "reslts"],
            "there are no runs in reslts to write about; give --results FOLDER",
        ),
        (["table-main", "--quick", "--device", "cudda"], "cannot use device 'cudda'"),
        (["table-main", "--quick", "--device", "cuda:99"], "cannot use device 'cuda:99'"),
        (["table-main", "--quick", "--results", __file__], "give --results FOLDER"),
    ],
)
def test_what_a_person_got_wrong_is_one_line(tptopk, words, message):
    status, out, error = tptopk("reproduce", *words)
    assert status == 2 and not out and message in error and "Traceback" not in error


def test_files_without_a_run_are_nothing_to_write_about(tptopk, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "further.jsonl").touch()  # as a run that was refused for want of data leaves it
    status, _, error = tptopk("reproduce", "all", "--render")
    assert status == 2 and "there are no runs in results" in error and not (tmp_path / "docs").exists()


def test_an_interrupt_says_that_finished_runs_are_kept(tptopk, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "run_all", interrupted)
    status, out, error = tptopk("reproduce", "table-main", "--quick", "--only", "mnist")
    assert status == 130 and not out and error.endswith("finished runs are kept: type the same again to go on\n")


def test_a_run_keeps_what_advice_its_warm_up_would_have_given(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce.Plan, "calibrate", partial(reproduce.Plan.calibrate, accountant="rdp"))  # faster
    reproduce._calibrated.cache_clear()
    make_mnist(tmp_path)
    r = recipes.quick_recipe("mnist", "tp-topk", 3.0, 0, epochs=8)
    made = reproduce.features(r.dataset, str(tmp_path), r.views, r.shift, r.records, "cpu")
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
    runs = results.read_results(tmp_path / "results/quick/main.jsonl")
    assert all(0.999 * 3 <= run["epsilon"] <= 3 and abs(run["epsilon_second_opinion"] - 3) < 0.02 for run in runs)

    status, _, error = tptopk("reproduce", "figure-pipeline", "--quick")
    assert status == 0 and (tmp_path / "results/quick/pipeline.png").stat().st_size > 10_000, error
    status, _, error = tptopk("reproduce", "figure-energy", "--quick")
    assert status == 0 and (tmp_path / "results/quick/energy.png").stat().st_size > 10_000, error
    judged = results.read_results(tmp_path / "results/quick/diagnostics.jsonl")
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


def test_views_are_the_image_its_mirror_and_each_of_them_moved_both_ways():
    images = torch.arange(2 * 4 * 5.0).view(2, 1, 4, 5)
    assert torch.equal(seen(images, 1, 0), images[:, None])
    assert torch.equal(seen(images, 2, 0), torch.stack([images, images.flip(-1)], 1))
    moved = seen(images, 2, 1)
    assert moved.shape == (2, 4, 1, 4, 5) and torch.equal(seen(images, 1, 1), moved[:, :2])
    assert torch.equal(moved[:, 0, :, :3, :4], images[..., 1:, 1:]) and torch.equal(
        moved[:, 0, :, 3], moved[:, 0, :, 2]
    )
    assert torch.equal(moved[:, 1, :, 1:, 1:], images[..., :3, :4]) and torch.equal(
        moved[:, 1, ..., 0], moved[:, 1, ..., 1]
    )
    assert torch.equal(moved[:, 2:], moved[:, :2].flip(-1))
