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
    ("field", "value", "words"),
    [
        ("delta", 0, "^delta is 0; it must be"),
        ("delta", 1, "^delta is 1; it must be"),
        ("delta", math.nan, "^delta is nan; it must be"),
        ("dataset_size", 0, "^dataset_size is 0; it must be"),
        ("dataset_size", 10.5, r"^dataset_size is 10\.5; it must be"),
        ("active_ratio", 0, "^active_ratio is 0; it must be"),
        ("active_ratio", 1.1, r"^active_ratio is 1\.1; it must be"),
        ("active_ratio", math.nan, "^active_ratio is nan; it must be"),
        ("accountant", "prv", "unknown accountant 'prv'; it is one of: pld"),
        ("adjacency", "replace-one", "adjacency is 'replace-one'; only 'zero-out'"),
        ("method", "tp-top", "unknown method 'tp-top'; did you mean 'tp-topk'"),
        ("phases", (), "dp-sgd needs at least 1 phases; the plan has 0"),
    ],
)
def test_a_plan_refuses_values_out_of_range(field, value, words):
    with pytest.raises(Refusal, match=words):
        Plan(**{**PLAN, field: value})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("epsilon", 0, "^epsilon is 0; it must be"),
        ("epsilon", -1, "^epsilon is -1; it must be"),
        ("epsilon", math.nan, "^epsilon is nan; it must be"),
        ("epsilon", math.inf, "^epsilon is inf; it must be"),
        ("delta", 0, "^delta is 0; it must be"),
        ("delta", 1.0, r"^delta is 1\.0; it must be"),
        ("batch_size", 0, "^batch_size is 0; it must be"),
        ("batch_size", 1001, "batch_size is 1001, more than dataset_size 1000"),
        ("batch_size", 2.5, r"^batch_size is 2\.5; it must be"),
        ("dataset_size", 0, "^dataset_size is 0; it must be"),
        ("epochs", 0, "^epochs is 0; it must be"),
        ("epochs", math.nan, "^epochs is nan; it must be"),
        ("active_ratio", 0, "^active_ratio is 0; it must be"),
        ("active_ratio", 2, "^active_ratio is 2; it must be"),
        ("warmup", 0, "^warmup is 0; it must be"),
        ("warmup", 1, "^warmup is 1; it must be"),
        ("warmup", 0.001, "leaves 0 for the warm-up and 100 for the rest"),
        ("warmup", 0.999, "leaves 100 for the warm-up and 0 for the rest"),
        ("warmup_budget", 0, "^warmup_budget is 0; it must be"),
        ("warmup_budget", 1, "^warmup_budget is 1; it must be"),
        ("warmup_budget", math.nan, "^warmup_budget is nan; it must be"),
        ("clip_norm", 0, "^clip_norm is 0; it must be"),
        ("clip_norm", -1, "^clip_norm is -1; it must be"),
        ("clip_norm", math.inf, "^clip_norm is inf; it must be"),
        ("clip_norm", [1.0], r"clip_norm has 1 values; tp-topk has 2 phase\(s\)"),
        ("accountant", "pdl", "unknown accountant 'pdl'; did you mean 'pld'"),
        ("steps", 10, "give either epochs or steps, and not both"),
    ],
)
def test_calibration_refuses_values_out_of_range(field, value, words):
    with pytest.raises(Refusal, match=words):
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
    ("values", "words"),
    [
        ({}, "missing 2 required keyword-only arguments: 'delta' and 'dataset_size'"),
        ({"phases": 3}, "'int' object is not iterable"),
        ({**Plan(**PLAN).to_dict(), "extra": 1}, "a plan has no field 'extra'"),
        ({**Plan(**PLAN).to_dict(), "phases": [{}]}, "not a plan: 'clip_norm'"),
        ([], "not a plan"),
        (None, "not a plan"),
    ],
)
def test_what_is_not_a_plan_is_refused(values, words):
    with pytest.raises(Refusal, match=words):
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
    with pytest.raises(Refusal, match="0.001 leaves k = 0 of d = 999 coordinates; it must be at least 0.00101"):
        Plan(**{**PLAN, "active_ratio": 0.001}).active_coordinates(999)
