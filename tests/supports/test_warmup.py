"""What is kept of a warm-up, and its file."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.refusal import Refusal
from tptopk.supports.scores import CoordinateScores
from tptopk.supports.support import Support
from tptopk.supports.warmup import WarmUp

PHASE = Phase(steps=9, sample_rate=0.1, noise_multiplier=1.0, clip_norm=1.0)
PLAN = Plan(phases=(PHASE, PHASE), delta=1e-5, dataset_size=1000, method="tp-topk", active_ratio=0.4)


def steps():
    generator = torch.Generator().manual_seed(0)
    return [
        PrivateGradient(
            {"b": torch.randn(2, generator=generator), "a": torch.randn(3, 2, generator=generator)}, 0.01, 0, n
        )
        for n in range(9)
    ]


def filled():
    warmup = WarmUp(PLAN)
    for gradient in steps():
        warmup.add(gradient)
    return warmup


def test_all_parts_together_give_the_papers_score():
    scores = CoordinateScores()
    everything = Support({"b": torch.ones(2, dtype=torch.bool), "a": torch.ones(3, 2, dtype=torch.bool)})
    for gradient in steps():
        scores.add(gradient, everything)
    warmup = filled()
    for name, value in scores.values().items():
        torch.testing.assert_close(warmup.scores()[name], value)
    assert warmup.counts == [3, 2, 2, 2] and warmup.complete and warmup.total == 8
    torch.testing.assert_close(warmup.mean(1)["a"], (steps()[1].values["a"] + steps()[5].values["a"]) / 2)


def test_later_phases_are_passed_over_and_raw_gradients_refused():
    warmup = filled()
    warmup.add(PrivateGradient({"b": torch.ones(2), "a": torch.ones(3, 2)}, 0.01, 1, 0))
    assert warmup.steps == 9
    with pytest.raises(TypeError, match="PrivateGradient"):
        warmup.add({"a": torch.ones(3, 2)})


def test_a_file_gives_back_what_was_written(tmp_path):
    warmup = filled()
    (tmp_path / "w").write_bytes(warmup.content())
    again = WarmUp.load(tmp_path / "w")
    assert again.plan == PLAN and again.counts == warmup.counts and again.along == warmup.along
    assert list(again.shapes) == ["b", "a"], "in the model's order"
    for name, value in warmup.state().items():
        assert torch.equal(again.state()[name], value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_sound(tmp_path, data):
    content = bytearray(filled().content())
    start = data.draw(st.integers(0, len(content)))
    content[start : start + data.draw(st.integers(0, 50))] = data.draw(st.binary(max_size=20))
    (tmp_path / "w").write_bytes(bytes(content))
    try:
        found = WarmUp.load(tmp_path / "w")
    except Refusal:
        return
    assert found.total == 8 and found.steps <= 9
    assert all(torch.isfinite(value).all() for value in found.state().values() if value.is_floating_point())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update({"sums/1/a": torch.ones(2, 3)}), "another shape"),
        (lambda s: s.update({"sums/1/a": torch.full((3, 2), torch.nan)}), "not finite"),
        (lambda s: s.update({"squares/1/a": torch.full((3, 2), -1.0)}), "negative"),
        (lambda s: s.update({"counts": torch.tensor([30, 2, 2, 2])}), "steps of 9"),
        (lambda s: s.update({"counts": torch.tensor([2, 2, 2, 2])}), "add up"),
        (lambda s: s.pop("sums/2/b"), "not a saved warm-up"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path, monkeypatch, change, words):
    warmup = filled()
    state = warmup.state()
    change(state)
    monkeypatch.setattr(warmup, "state", lambda: state)
    (tmp_path / "w").write_bytes(warmup.content())
    with pytest.raises(Refusal, match=words):
        WarmUp.load(tmp_path / "w")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(Refusal, match="not there"):
        WarmUp.load(tmp_path / "none")
    Support({"a": torch.ones(3, dtype=torch.bool)}).save(tmp_path / "support")
    with pytest.raises(Refusal, match="not a saved warm-up"):
        WarmUp.load(tmp_path / "support")
