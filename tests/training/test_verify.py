"""`verify`: what was changed is found, and nothing else disturbs it."""

from __future__ import annotations

import itertools
import json
import os
import time

import pytest
from torch import nn

import tptopk
from tests.training.test_resume import in_a_child, run
from tptopk.privacy import ledger as ledger_module
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.refusal import Refusal
from tptopk.training.run import RunFolder
from tptopk.training.verify import verify


def test_the_clock_is_not_read_for_anything_that_counts(tmp_path, monkeypatch):
    """A clock that goes backwards changes neither charges nor the verdict on them."""
    hours = itertools.count(10**9, -3600)
    monkeypatch.setattr(time, "time", lambda: float(next(hours)))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(hours)))
    run(tmp_path / "run")
    assert verify(tmp_path / "run").holds


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_verify_finds_what_was_changed(tmp_path):
    folder = tmp_path / "run"
    run(folder)
    assert verify(folder).holds
    for name, part in (
        ("model.safetensors", "model"),
        ("support.safetensors", "support"),
        ("statement.md", "statement"),
        ("plan.json", "plan"),
    ):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content.replace(b"0", b"1"))
        verdict = verify(folder)
        assert not verdict.holds and part in [what for what, ok, _ in verdict.checks if not ok], name
        (folder / name).unlink()
        assert not verify(folder).holds
        (folder / name).write_bytes(content)
    assert verify(folder).holds
    summary = json.loads((folder / "run.json").read_text())
    summary["facts"]["epsilon"] = 0.5
    (folder / "run.json").write_text(json.dumps(summary))
    assert "run.json" in [what for what, ok, _ in verify(folder).checks if not ok]


@pytest.mark.parametrize(
    "name, wrong", [("epsilon", 0.1), ("delta", 1e-12), ("method", "dp-sgd"), ("status", "interrupted")]
)
def test_verify_finds_another_figure_in_run_json(tmp_path, name, wrong):
    run(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**summary, name: wrong}))
    assert [what for what, ok, _ in verify(tmp_path / "run").checks if ok is False] == ["run.json"]


@pytest.mark.parametrize("told", [True, False])
def test_a_ledger_whose_end_was_cut_off_is_found(tmp_path, told):
    """Its chain is whole. But files that the run left know of more lines than there are."""
    folder = tmp_path / "run"
    run(folder)
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(lines[:6]))
    if not told:  # run.json is gone too: the weights still name the last line
        (folder / "run.json").unlink()
    found = verify(folder)
    assert not found.holds and "lines are missing" in next(words for what, ok, words in found.checks if ok is False)
    if told:
        with pytest.raises(Refusal, match="lines are missing"):
            tptopk.load(folder, nn.Linear(6, 3))


def stopping_at(step):
    def stop(record):
        if record.step == step:
            raise KeyboardInterrupt

    return stop


def interrupted(folder, step, **options):
    with pytest.raises(KeyboardInterrupt):
        run(folder, on_step=stopping_at(step), **options)


@pytest.mark.parametrize("told", [True, False])
def test_a_run_whose_ledger_was_cut_is_not_gone_on_with(tmp_path, told):
    """Resumed, it would charge anew what it released before, and nothing that tells of that would be left."""
    folder = tmp_path / "run"
    interrupted(folder, 5)
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text(
        "".join(lines[:-2])
    )  # the closing line and a charge; the checkpoint stands before
    if not told:
        summary = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**summary, "status": "running"}))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(Refusal, match="lines are missing"):
        run(folder, resume=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")  # of steps that the budget does not pay
def test_a_kill_between_the_two_marks_of_a_new_attempt_is_no_cut(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    interrupted(folder, 5)

    def killed(self, *given, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "__init__", killed)  # the ledger has the attempt's line, run.json not yet
        run(folder, resume=True)
    assert read_ledger(folder / "ledger.jsonl").end is None and verify(folder).holds
    assert run(folder, resume=True).status == "finished" and verify(folder).holds


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")  # of steps that the budget does not pay
def test_a_ledger_that_could_not_be_written_once_leaves_a_folder_as_a_crash_does(tmp_path, monkeypatch):
    folder, lines, honest = tmp_path / "run", [], ledger_module.append_durably

    def flaky(file, text):
        lines.append(text)
        if len(lines) == 7:
            raise OSError(122, "Disk quota exceeded")
        honest(file, text)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="quota exceeded"):
        patch.setattr(ledger_module, "append_durably", flaky)
        run(folder)
    found = verify(folder)
    assert found.holds and [ok for what, ok, _ in found.checks if what == "end"] == [None]
    with pytest.raises(Refusal, match="killed before it could save a model"):
        tptopk.load(folder, nn.Linear(6, 3))
    assert run(folder, resume=True).status == "finished" and verify(folder).holds


def test_an_honest_run_that_was_resumed_and_killed_is_within_its_budget(tmp_path):
    """What its first attempt lost in the dear warm-up is charged; the steps that this leaves no budget for are not."""
    folder = tmp_path / "run"
    interrupted(folder, 2)  # before the first checkpoint

    def kill(record):
        if record.step == 7:
            os._exit(9)

    assert in_a_child(lambda: run(folder, resume=True, on_step=kill)) == 9
    found = verify(folder)
    assert found.holds and "so far" in next(words for what, _, words in found.checks if what == "budget")


def test_an_interrupt_after_the_closing_line_leaves_a_folder_that_holds(tmp_path, monkeypatch):
    folder, honest, calls = tmp_path / "run", RunFolder._write, []

    def slow(self, name, values):
        calls.append(name)
        if calls.count("run.json") == 2 and name == "run.json":
            raise KeyboardInterrupt
        honest(self, name, values)

    monkeypatch.setattr(RunFolder, "_write", slow)
    with pytest.raises(KeyboardInterrupt):
        run(folder)
    assert verify(folder).holds


def test_a_loaded_runs_caveats_are_its_ledgers(tmp_path):
    """run.json is read for what changes no figure; that a run was seeded is not of that kind."""
    run(tmp_path / "run", seed=3)
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    summary["facts"]["seeded"] = False
    (tmp_path / "run" / "run.json").write_text(json.dumps(summary))
    loaded = tptopk.load(tmp_path / "run", nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    assert loaded.facts.seeded and "Not for release" in loaded.statement()
