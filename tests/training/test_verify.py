"""`verify`: what was changed is found, and nothing else disturbs it."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from tests.training.test_resume import run
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
