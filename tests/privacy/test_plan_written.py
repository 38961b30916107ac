"""Promise 1: a plan on disk is the plan, and one that was changed there is refused or costs what is written now."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tptopk.privacy.accounting import ACCOUNTANTS, Segment, epsilon
from tptopk.privacy.description import plain
from tptopk.privacy.methods import METHODS
from tptopk.privacy.plan import Phase, Plan, PrivacyWarning
from tptopk.privacy.refusal import Refusal

POSITIVE = st.floats(1e-3, 1e3)
PHASES = st.builds(
    Phase,
    steps=st.integers(1, 10**6),
    sample_rate=st.floats(1e-9, 1.0),
    noise_multiplier=POSITIVE,
    clip_norm=POSITIVE,
    name=st.from_regex("[a-zé0-9 -]{0,10}", fullmatch=True).filter(lambda word: word == plain(word)),
)
PLANS = st.builds(
    Plan,
    phases=st.lists(PHASES, min_size=2, max_size=2),
    queries=st.lists(PHASES, max_size=2),
    delta=st.floats(1e-12, 1e-8),
    dataset_size=st.integers(1, 10**7),
    method=st.sampled_from([name for name in METHODS if METHODS[name].private]),
    active_ratio=st.floats(1e-6, 1.0),
    accountant=st.sampled_from(sorted(ACCOUNTANTS)),
    target_epsilon=st.none() | st.floats(0.01, 100.0),
    unit=st.sampled_from(["record", "patient"]),
)
WRITTEN = Plan(
    phases=[
        Phase(steps=10, sample_rate=0.1, noise_multiplier=1.5, clip_norm=1.0, name="warm-up"),
        Phase(steps=20, sample_rate=0.1, noise_multiplier=2.0, clip_norm=0.5, name="sparse"),
    ],
    queries=[Phase(steps=2, sample_rate=1.0, noise_multiplier=20.0, clip_norm=3.0, name="standardize")],
    delta=1e-5,
    dataset_size=1000,
    method="tp-topk",
    active_ratio=0.4,
    accountant="rdp",
    target_epsilon=3.0,
)
OF_A_PHASE = ("steps", "sample_rate", "noise_multiplier", "clip_norm")
PLACES = [("phases", 0), ("phases", 1), ("queries", 0)]


def changed(place: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """What is written of the plan, through JSON, with one value changed by hand."""
    values = json.loads(WRITTEN.to_json())
    *way, last = place
    where = values
    for step in way:
        where = where[step]
    where[last] = value
    return json.loads(json.dumps(values))


def cost(values: dict[str, Any]) -> float:
    """ε of what is written, and of nothing else."""
    segments = [
        Segment(p["noise_multiplier"], p["sample_rate"], p["steps"]) for p in values["queries"] + values["phases"]
    ]
    return epsilon(segments, values["delta"], values["accountant"])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(plan=PLANS)
def test_any_plan_is_read_as_it_was_written(plan):
    again = Plan.from_dict(json.loads(plan.to_json()))
    assert again == plan and again.to_json() == plan.to_json()
    assert [again.noise_std(p) for p in again.phases] == [plan.noise_std(p) for p in plan.phases]


IMPOSSIBLE = {
    "steps": [0, -1, 1.5, 1e300, math.nan, math.inf, None, "10", True, [10]],
    "sample_rate": [0, -0.1, 1.001, math.nan, math.inf, None, "0.1", True],
    "noise_multiplier": [0, -1.5, math.nan, math.inf, -math.inf, None, "1.5", True],
    "clip_norm": [0, -1.0, 1e-9, math.nan, math.inf, None, "1", True],
}
OF_THE_PLAN = {
    "delta": [0, 1, -1e-5, 1.5, math.nan, math.inf, None, "1e-5", True],
    "dataset_size": [0, -1, 10.5, math.nan, math.inf, None, "1000", True],
    "active_ratio": [0, -0.4, 1.5, math.nan, math.inf, None, "0.4", True],
    "method": ["tp-top", "", None, 3, "non-private"],
    "accountant": ["prv", "", None, 3],
    "adjacency": ["replace-one", "add-remove", None],
    "unit": ["", None, 3, "a\nb", "x" * 41],
    "phases": [[], None, 3, {}, [None], [3], [[]], [{}]],
    "queries": [None, 3, [None], [{}]],
}


WORDS = {
    "method": "unknown method|in a plan for non-private",
    "phases": "not a plan|needs at least 2 phases",
    "queries": "not a plan",
}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(((*place, field), value) for place in PLACES for field in IMPOSSIBLE for value in IMPOSSIBLE[field]),
        *(((field,), value) for field, values in OF_THE_PLAN.items() for value in values),
        *((("target_epsilon",), value) for value in (0, -3.0, math.nan, math.inf, "3", True)),
        *((("phases", 0, field), 10**400) for field in OF_A_PHASE),
        *(((field,), 10**400) for field in ("delta", "dataset_size", "active_ratio")),
    ],
    ids=lambda part: ".".join(map(str, part)) if isinstance(part, tuple) else str(part)[:12].replace("\n", " "),
)
def test_an_impossible_value_is_refused(place, value):
    with pytest.raises(Refusal, match=WORDS.get(place[-1], place[-1])):
        Plan.from_dict(changed(place, value))


@pytest.mark.parametrize("place", [(), *PLACES], ids=str)
def test_unknown_and_missing_keys_are_refused(place):
    given = changed(("delta",), WRITTEN.delta)
    where = given
    for step in place:
        where = where[step]
    for word in ("divisor", "epsilon", "sampling_rate", "noise", ""):
        where[word] = 1.0
        with pytest.raises(Refusal, match=f"no field '{word}'|unexpected keyword argument '{word}'"):
            Plan.from_dict(given)
        del where[word]
    assert Plan.from_dict(given) == WRITTEN
    for word in OF_A_PHASE if place else ("phases", "delta", "dataset_size"):
        kept = where.pop(word)
        with pytest.raises(Refusal, match=word):
            Plan.from_dict(given)
        where[word] = kept


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    place=st.sampled_from(PLACES),
    change=st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 10**5)),
        st.tuples(st.just("sample_rate"), st.floats(1e-6, 1.0)),
        st.tuples(st.just("noise_multiplier"), st.floats(0.3, 100.0)),
    ),
)
def test_a_possible_value_costs_what_is_written_now(place, change):
    """Also a second phase at a sample rate of its own: its divisor is its own too."""
    values = changed((*place, change[0]), change[1])
    plan = Plan.from_dict(values)
    assert plan.epsilon() == cost(values)
    if getattr(WRITTEN, place[0])[place[1]] != getattr(plan, place[0])[place[1]]:
        assert plan != WRITTEN
    for phase, said in zip((*plan.queries, *plan.phases), values["queries"] + values["phases"], strict=True):
        assert plan.expected_batch_size(phase) == said["sample_rate"] * 1000
        assert plan.noise_std(phase) == said["noise_multiplier"] * said["clip_norm"] / (said["sample_rate"] * 1000)


@pytest.mark.parametrize(
    ("field", "value"), [("delta", 1e-7), ("accountant", "pld"), ("accountant", "rdp-paper"), ("target_epsilon", 0.5)]
)
def test_a_changed_claim_costs_what_is_written_now(field, value):
    values = changed((field,), value)
    assert Plan.from_dict(values).epsilon() == cost(values)


def test_a_changed_size_changes_the_divisor_and_the_noise_with_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        larger = Plan.from_dict(changed(("dataset_size",), 2000))
        with pytest.raises(PrivacyWarning, match="1/dataset_size"):
            Plan.from_dict(changed(("dataset_size",), 10**6))
    for mine, theirs in zip(WRITTEN.phases, larger.phases, strict=True):
        assert larger.expected_batch_size(theirs) == 2 * WRITTEN.expected_batch_size(mine)
        assert larger.noise_std(theirs) == WRITTEN.noise_std(mine) / 2
