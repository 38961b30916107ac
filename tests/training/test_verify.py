"""`verify`: what was changed is found, and nothing else disturbs it."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from torch import nn

import tptopk
from tests.training.test_resume import run
from tptopk.privacy.refusal import Refusal
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


def test_a_loaded_runs_caveats_are_its_ledgers(tmp_path):
    """run.json is read for what changes no figure; that a run was seeded is not of that kind."""
    run(tmp_path / "run", seed=3)
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    summary["facts"]["seeded"] = False
    (tmp_path / "run" / "run.json").write_text(json.dumps(summary))
    loaded = tptopk.load(tmp_path / "run", nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    assert loaded.facts.seeded and "Not for release" in loaded.statement()
