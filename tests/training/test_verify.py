"""`verify`: what was changed is found, and nothing else disturbs it."""

from __future__ import annotations

import itertools
import json
import os
import time
from contextlib import contextmanager

import pytest
from torch import nn

import tptopk
from tests.training.test_resume import in_a_child, run
from tptopk.privacy import ledger as ledger_module
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.refusal import Refusal
from tptopk.training.lines import missing_lines
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


def test_the_remark_on_averaged_weights_is_the_ledgers(tmp_path):
    """Taken out of run.json and of the statement it is missed."""
    folder = tmp_path / "run"
    run(folder, ema=0.9)
    summary, text = json.loads((folder / "run.json").read_text()), (folder / "statement.md").read_text()
    line = next(line for line in text.splitlines() if "moving average" in line)
    summary["facts"]["averaged"] = False
    (folder / "run.json").write_text(json.dumps(summary))
    assert verify(folder).holds, "the ledger knows"
    (folder / "statement.md").write_text(text.replace(line + "\n", ""))
    assert [what for what, ok, _ in verify(folder).checks if ok is False] == ["statement"]


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


@contextmanager
def resumed_ledger(path):
    record = read_ledger(path)
    taken = dict.fromkeys(record.charged, 0)
    ledger = Ledger.resume(path, taken, 1, record.lines[0]["hash"])
    try:
        yield ledger
    finally:
        ledger.release()


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


@pytest.mark.parametrize("kept", [(), ("statement.md",)])
def test_a_finished_run_that_was_killed_before_it_said_so_says_so_when_it_is_resumed(tmp_path, kept):
    folder = tmp_path / "run"
    done = run(folder)
    told, config = (folder / "run.json").read_text(), json.loads((folder / "run.json").read_text())["config"]
    running = {"format": 1, "status": "running", "method": done.plan.method, "config": config}
    (folder / "run.json").write_text(json.dumps(running))  # as it is until then
    if "statement.md" not in kept:
        (folder / "statement.md").unlink()
    assert not verify(folder).holds
    with pytest.raises(Refusal, match="is finished"):
        run(folder, resume=True)
    assert verify(folder).holds
    again = tptopk.load(folder, nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    assert again.status == "finished" and again.epsilon == done.epsilon and again.support == done.support
    (folder / "run.json").write_text(told)
    before = told
    with pytest.raises(Refusal, match="is finished"):
        run(folder, resume=True)
    assert (folder / "run.json").read_text() == before, "what is there is left alone"


@pytest.mark.parametrize("cut", [1, 2])  # the checkpoint stands one line before the end
def test_a_killed_runs_lost_lines_show_in_its_metrics_and_its_checkpoint(tmp_path, cut):
    """A step's metrics are written after its charge, and a checkpoint names the line at which it stood."""
    folder = tmp_path / "run"

    def kill(record):
        if record.step == 7:
            os._exit(9)

    assert in_a_child(lambda: run(folder, on_step=kill)) == 9
    assert verify(folder).holds
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(lines[:-cut]))
    if cut == 1:  # as if the metrics of that step had not been written yet
        assert [what for what, ok, _ in verify(folder).checks if ok is False] == ["files"]
        metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(metrics[:-1]))
        assert verify(folder).holds, "nothing knows of it"
        return
    for metrics in (True, False):
        if not metrics:
            (folder / "metrics.jsonl").unlink()
        found = [what for what, ok, _ in verify(folder).checks if ok is False]
        assert found == ["checkpoint", "files"][: 1 + metrics]
        with pytest.raises(Refusal, match="lines are missing" if metrics else "does not hold the line"):
            run(folder, resume=True)


def test_a_ledger_that_ends_otherwise_than_run_json_says_has_lost_lines(tmp_path):
    """Cut back to the closing line of an earlier attempt; or to its charges, with nothing closed at all."""
    folder = tmp_path / "run"
    interrupted(folder, 5)
    status = json.loads((folder / "run.json").read_text())
    (folder / "model.safetensors").unlink()
    ledger = folder / "ledger.jsonl"
    whole = ledger.read_text().splitlines(keepends=True)
    (folder / "run.json").write_text(json.dumps({**status, "status": "finished"}))
    assert "said after the closing line" in str(missing_lines(folder, read_ledger(ledger)))
    (folder / "run.json").write_text(json.dumps(status))
    assert missing_lines(folder, read_ledger(ledger)) is None
    with resumed_ledger(ledger) as resumed:
        assert missing_lines(folder, read_ledger(ledger)) is None, (
            "an attempt's first line comes before run.json is marked"
        )
        resumed.charge(*resumed.next_step, 10)
        assert "said after the closing line" in str(missing_lines(folder, read_ledger(ledger)))
    ledger.write_text("".join(whole[:-1]))
    assert "said after the closing line" in str(missing_lines(folder, read_ledger(ledger)))


def test_a_loaded_runs_caveats_are_its_ledgers(tmp_path):
    """run.json is read for what changes no figure; that a run was seeded is not of that kind."""
    run(tmp_path / "run", seed=3)
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    summary["facts"]["seeded"] = False
    (tmp_path / "run" / "run.json").write_text(json.dumps(summary))
    loaded = tptopk.load(tmp_path / "run", nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    assert loaded.facts.seeded and "Not for release" in loaded.statement()
