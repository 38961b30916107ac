"""Promise 1: one plan owns the numbers, and refuses what makes no sense."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from tptopk.privacy.accounting import epsilon
from tptopk.privacy.plan import Phase, Plan, PrivacyWarning
from tptopk.privacy.refusal import Refusal

PHASE = {"steps": 10, "sample_rate": 0.1, "noise_multiplier": 1.0, "clip_norm": 1.0}
PLAN = {"phases": (Phase(**PHASE),), "delta": 1e-5, "dataset_size": 1000}
CALIBRATE = {"epsilon": 3.0, "delta": 1e-5, "batch_size": 100, "dataset_size": 1000, "epochs": 10, "accountant": "rdp"}


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan(**PLAN).delta = 1e-3
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan(**PLAN).phases[0].noise_multiplier = 0.1


@pytest.mark.parametrize("field", PHASE)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "1", None])
def test_a_phase_refuses_numbers_out_of_range(field, value):
    with pytest.raises(Refusal, match=field):
        Phase(**{**PHASE, field: value})


@pytest.mark.parametrize(("field", "value"), [("steps", 1.5), ("steps", True), ("sample_rate", 1.01)])
def test_a_phase_refuses_more_numbers_out_of_range(field, value):
    with pytest.raises(Refusal, match=field):
        Phase(**{**PHASE, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("delta", 0),
        ("delta", 1),
        ("delta", math.nan),
        ("dataset_size", 0),
        ("dataset_size", 10.5),
        ("active_ratio", 0),
        ("active_ratio", 1.1),
        ("active_ratio", math.nan),
        ("accountant", "prv"),
        ("adjacency", "replace-one"),
        ("method", "tp-top"),
        ("phases", ()),
    ],
)
def test_a_plan_refuses_values_out_of_range(field, value):
    with pytest.raises(Refusal):
        Plan(**{**PLAN, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 0),
        ("epsilon", -1),
        ("epsilon", math.nan),
        ("epsilon", math.inf),
        ("delta", 0),
        ("delta", 1.0),
        ("batch_size", 0),
        ("batch_size", 1001),
        ("batch_size", 2.5),
        ("dataset_size", 0),
        ("epochs", 0),
        ("epochs", math.nan),
        ("active_ratio", 0),
        ("active_ratio", 2),
        ("warmup", 0),
        ("warmup", 1),
        ("warmup", 0.001),
        ("warmup", 0.999),
        ("warmup_budget", 0),
        ("warmup_budget", 1),
        ("warmup_budget", math.nan),
        ("clip_norm", 0),
        ("clip_norm", -1),
        ("clip_norm", math.inf),
        ("clip_norm", [1.0]),
        ("accountant", "pdl"),
        ("steps", 10),
    ],
)
def test_calibration_refuses_values_out_of_range(field, value):
    with pytest.raises(Refusal):
        Plan.calibrate("tp-topk", **{**CALIBRATE, field: value})


def test_unknown_words_come_with_the_nearest():
    with pytest.raises(Refusal, match="did you mean 'tp-topk'"):
        Plan.calibrate("tptopk", **CALIBRATE)
    with pytest.raises(TypeError, match="did you mean 'warmup_budget'"):
        Plan.calibrate("tp-topk", **CALIBRATE, warmup_bugdet=0.2)


def test_a_large_delta_is_warned_about():
    with pytest.warns(PrivacyWarning, match="1/dataset_size"):
        Plan(**{**PLAN, "delta": 1e-3})


def test_the_divisor_is_the_public_expected_batch_size():
    plan = Plan.calibrate("tp-topk", **CALIBRATE, clip_norm=(2.0, 0.5))
    for phase, clip_norm in zip(plan.phases, (2.0, 0.5), strict=True):
        assert plan.expected_batch_size(phase) == pytest.approx(100)
        assert plan.noise_std(phase) == pytest.approx(phase.noise_multiplier * clip_norm / 100)


def test_two_phases_split_steps_and_budget_as_asked():
    plan = Plan.calibrate("tp-topk", **CALIBRATE, warmup=0.3, warmup_budget=0.3)
    assert [phase.steps for phase in plan.phases] == [30, 70]
    assert 0.9 * 0.999 <= epsilon([plan.phases[0].segment], 1e-5, "rdp") <= 0.9
    one = Plan.calibrate("tp-topk", **CALIBRATE, warmup_budget=None)
    assert one.phases[0].noise_multiplier == one.phases[1].noise_multiplier
    assert 3.0 * 0.999 <= one.epsilon() <= 3.0


def test_queries_are_composed_into_the_budget():
    query = Phase(steps=2, sample_rate=1.0, noise_multiplier=24.0, clip_norm=1.0, name="standardize")
    without = Plan.calibrate("dp-sgd", **CALIBRATE)
    plan = Plan.calibrate("dp-sgd", **CALIBRATE, queries=[query])
    assert plan.phases[0].noise_multiplier > without.phases[0].noise_multiplier
    assert 3.0 * 0.999 <= plan.epsilon() <= 3.0
    assert plan.epsilon() > epsilon([plan.phases[0].segment], 1e-5, "rdp")
    with pytest.raises(Refusal, match="nothing is left"):
        Plan.calibrate("dp-sgd", **CALIBRATE, queries=[dataclasses.replace(query, noise_multiplier=1.0)])


def test_golden_query_costs():
    """Two queries at σ raise the training σ over 183 steps of batch 8192 in 50,000 at ε = 1: 8.40 → 8.60 (σ = 24), 8.47 (σ = 40)."""

    def sigma(*queries):
        plan = Plan.calibrate(
            "dp-sgd", epsilon=1.0, delta=1e-5, batch_size=8192, dataset_size=50_000, steps=183, queries=queries
        )
        return plan.phases[0].noise_multiplier

    def query(noise):
        return Phase(steps=2, sample_rate=1.0, noise_multiplier=noise, clip_norm=1.0)

    assert sigma() == pytest.approx(8.40, abs=0.02)
    assert sigma(query(24.0)) == pytest.approx(8.60, abs=0.02)
    assert sigma(query(40.0)) == pytest.approx(8.47, abs=0.02)


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk", "non-private"])
def test_a_plan_survives_json(method):
    plan = Plan.calibrate(method, **CALIBRATE)
    assert Plan.from_dict(json.loads(plan.to_json())) == plan


@pytest.mark.parametrize(
    "values",
    [{}, {"phases": 3}, {**Plan(**PLAN).to_dict(), "extra": 1}, {**Plan(**PLAN).to_dict(), "phases": [{}]}, [], None],
)
def test_what_is_not_a_plan_is_refused(values):
    with pytest.raises(Refusal):
        Plan.from_dict(values)


def test_a_plan_without_noise_is_only_for_the_method_that_says_so():
    ordinary = Phase(steps=1, sample_rate=0.1, noise_multiplier=0.0, clip_norm=math.inf)
    assert Plan(phases=(ordinary,), delta=1e-5, dataset_size=10, method="non-private").epsilon() == math.inf
    with pytest.raises(Refusal, match="above 0"):
        Plan(phases=(ordinary,), delta=1e-5, dataset_size=10)
    with pytest.raises(Refusal, match="NOT|0, with an infinite"):
        Plan(**{**PLAN, "method": "non-private"})


def test_the_active_coordinates_are_the_floor_of_the_share():
    for ratio, total, k in [(0.29, 100, 29), (0.4, 5050, 2020), (0.333, 10, 3), (1.0, 7, 7)]:
        assert Plan(**{**PLAN, "active_ratio": ratio}).active_coordinates(total) == k


def test_a_plan_that_leaves_no_coordinate_is_refused():
    with pytest.raises(Refusal, match="0.001 leaves k = 0 of d = 999 coordinates; it must be at least 0.001"):
        Plan(**{**PLAN, "active_ratio": 0.001}).active_coordinates(999)
