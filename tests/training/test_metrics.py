"""Who is shown what a private run may show."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

import pytest

from tests.training.test_fit import data, fit
from tptopk.privacy.refusal import Refusal
from tptopk.training.metrics import JsonLines, Metrics, StepRecord


class Watching:
    def __init__(self, stop_at: int | None = None) -> None:
        self.records, self.ends, self.stop_at = [], [], stop_at

    def step(self, record):
        self.records.append(record)
        if record.step == self.stop_at:
            raise KeyboardInterrupt

    def end(self, run):
        self.ends.append((run.status, dict(run.test)))


def test_metrics_are_shown_every_step_and_the_end_once():
    watching = Watching()
    run = fit(on_step=watching, test_set=data(seed=1))
    assert isinstance(watching, Metrics) and watching.records == run.history
    assert watching.ends == [("finished", run.test)] and run.test


def test_metrics_hear_of_an_interrupted_run():
    watching = Watching(stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        fit(on_step=watching)
    assert len(watching.records) == 3 and watching.ends == [("interrupted", {})]


def test_a_plain_function_is_enough():
    records = []
    assert fit(on_step=records.append).history == records


def test_json_lines_are_the_run_folders_own(tmp_path):
    run = fit(on_step=JsonLines(tmp_path / "mine.jsonl"), out=tmp_path / "run")
    assert (tmp_path / "mine.jsonl").read_bytes() == (tmp_path / "run" / "metrics.jsonl").read_bytes()
    lines = (tmp_path / "mine.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [asdict(record) for record in run.history]


def test_what_cannot_be_called_is_refused_before_anything_is_charged(tmp_path):
    with pytest.raises(Refusal, match="on_step is a list; give a function"):
        fit(on_step=[], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(Refusal, match="cannot write to"):
        JsonLines(tmp_path / "nowhere" / "mine.jsonl")


def test_a_step_shows_no_loss():
    assert {f.name for f in fields(StepRecord)} == {"step", "phase", "support_size", "learning_rate", "gradient_norm"}
