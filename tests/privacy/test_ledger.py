"""Promise 5, first half: charged before noise, only by the plan, never twice."""

from __future__ import annotations

import json

import pytest

from tptopk.privacy.ledger import Ledger
from tptopk.privacy.plan import Phase, Plan

PLAN = Plan(
    phases=(
        Phase(steps=2, sample_rate=0.1, noise_multiplier=2.0, clip_norm=1.0),
        Phase(steps=3, sample_rate=0.1, noise_multiplier=1.0, clip_norm=0.5),
    ),
    delta=1e-5,
    dataset_size=1000,
    method="tp-rand",
    active_ratio=0.5,
    accountant="rdp",
    queries=(Phase(steps=1, sample_rate=1.0, noise_multiplier=30.0, clip_norm=1.0, name="q"),),
)


def test_a_full_ledger_costs_what_the_plan_costs():
    ledger = Ledger(PLAN)
    ledger.charge_queries()
    spent = [ledger.epsilon()]
    for phase, numbers in enumerate(PLAN.phases):
        for step in range(numbers.steps):
            ledger.charge(phase, step, 10)
            spent.append(ledger.epsilon())
    assert spent == sorted(spent)
    assert spent[-1] == PLAN.epsilon()


@pytest.mark.parametrize(("phase", "step"), [(0, 1), (0, -1), (1, 1), (2, 0)])
def test_a_step_out_of_order_is_not_charged(phase, step):
    ledger = Ledger(PLAN)
    with pytest.raises(RuntimeError, match="not the next step"):
        ledger.charge(phase, step, 1)
    assert ledger.epsilon() == 0.0


def test_a_step_is_charged_once_and_no_phase_is_longer_than_planned():
    ledger = Ledger(PLAN)
    for step in range(2):
        ledger.charge(0, step, 1)
        with pytest.raises(RuntimeError):
            ledger.charge(0, step, 1)
    with pytest.raises(RuntimeError):
        ledger.charge(0, 2, 1)


def test_a_charge_is_on_disk_when_it_returns(tmp_path):
    ledger = Ledger(PLAN, tmp_path / "ledger.jsonl")
    ledger.charge_queries()
    ledger.charge(0, 0, 7)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["plan", "query", "step"]
    assert Plan.from_dict(lines[0]["plan"]) == PLAN
    assert lines[2] == {
        "kind": "step",
        "attempt": 1,
        "phase": 0,
        "step": 0,
        "noise_multiplier": 2.0,
        "sample_rate": 0.1,
        "clip_norm": 1.0,
        "divisor": 100.0,
        "support_size": 7,
        "adjacency": "zero-out",
    }
    with pytest.raises(FileExistsError):
        Ledger(PLAN, tmp_path / "ledger.jsonl")
