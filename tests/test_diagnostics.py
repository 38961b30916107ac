"""Diagnostics of supports, and the type that keeps those of true gradients out of training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tptopk import Plan, Support, fit
from tptopk.diagnostics import (
    Captured,
    TrajectoryCapture,
    composition,
    energy_concentration,
    oracle_capture,
    proxy_signal,
    true_gradient,
)
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.oracle import Oracle
from tptopk.privacy.plan import Phase
from tptopk.privacy.refusal import Refusal
from tptopk.supports.policies import SupportPolicy
from tptopk.supports.scores import CoordinateScores
from tptopk.supports.selection import top_k
from tptopk.supports.warmup import WarmUp

PHASE = Phase(steps=20, sample_rate=0.1, noise_multiplier=1.0, clip_norm=1.0)
PLAN = Plan(phases=(PHASE, PHASE), delta=1e-5, dataset_size=1000, method="tp-topk", active_ratio=0.4)


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def warmup(signal, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = WarmUp(PLAN)
    for step in range(20):
        value = signal + 0.01 * torch.randn(signal.shape, generator=generator)
        found.add(PrivateGradient({"w": value}, 0.01, 0, step))
    return found


@pytest.mark.parametrize("score", ["paper", "factored"])
def test_the_proxy_of_noise_is_what_noise_alone_gives(score):
    """Within 5 of the simulation's own standard deviations (false alarm about 1e-6)."""
    found = proxy_signal(warmup(torch.zeros(40, 50)), 400, score=score)
    assert abs(found.value - found.noise_only) < 5 * found.noise_only_std
    assert found.active_ratio == 0.2 and "noise alone" in str(found)
    if score == "paper":
        assert found.noise_only > 0.6, "far above k/d, because the support maximises it"


def test_the_proxy_of_a_signal_lies_above_noise():
    signal = torch.zeros(40, 50)
    signal[:4] = 0.03
    found = proxy_signal(warmup(signal), 200)
    assert found.value > found.noise_only + 10 * found.noise_only_std


def test_the_proxy_refuses_what_is_no_support():
    for active in (0, 2001):
        with pytest.raises(Refusal, match="active"):
            proxy_signal(warmup(torch.zeros(40, 50)), active)
    with pytest.raises(Refusal, match="no steps"):
        proxy_signal(WarmUp(PLAN), 1)


def test_a_supports_composition_adds_up():
    support = Support({"a": torch.tensor([True, True, False, False]), "b": torch.tensor([[True, False, False, False]])})
    first, second = composition(support)
    assert (first.name, first.active, first.coordinates) == ("a", 2, 4) and (second.active, second.coordinates) == (
        1,
        4,
    )
    assert first.enrichment == pytest.approx(4 / 3) and second.enrichment == pytest.approx(2 / 3)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(7 + n, 6, generator=generator), torch.arange(7 + n) % 3) for n in range(count)]


def test_the_true_gradient_is_the_mean_over_held_out_records():
    model = network().train()
    found = true_gradient(model, batches(), losses).value
    assert model.training and all(p.grad is None for p in model.parameters())
    model.eval()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    F.cross_entropy(model(inputs), targets).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    mean = true_gradient(model, batches(), lambda m, b: F.cross_entropy(m(b[0]), b[1])).value
    torch.testing.assert_close(mean, found)
    with pytest.raises(Refusal, match="no held-out"):
        true_gradient(model, [], losses)


def test_capture_and_concentration_by_hand():
    gradient = Oracle({"w": torch.tensor([3.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])})
    support = Support({"w": torch.tensor([True, False, True] + 7 * [False])})
    assert oracle_capture(gradient, support).value == Captured(10 / 14, 0.2)
    curve = energy_concentration(gradient, (0.1, 0.2, 0.3, 1.0)).value
    assert curve == [(0.1, pytest.approx(9 / 14)), (0.2, pytest.approx(13 / 14)), (0.3, 1.0), (1.0, 1.0)]
    nothing = Oracle({"w": torch.zeros(10)})
    assert oracle_capture(nothing, support).value.share == 0 and energy_concentration(nothing, (0.5,)).value == [
        (0.5, 0.0)
    ]
    with pytest.raises(TypeError, match="expected an Oracle"):
        oracle_capture({"w": torch.zeros(10)}, support)


def tiny_plan(method="tp-topk"):
    return Plan.calibrate(
        method, epsilon=3.0, delta=1e-5, batch_size=12, dataset_size=60, steps=12, warmup=0.4, accountant="rdp"
    )


def fitted(**options):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(60, 6, generator=generator), torch.arange(60) % 3
    model = options.pop("model", None) or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fit(model, data, options.pop("plan", tiny_plan()), optimizer, loss=F.cross_entropy, **options)


def test_capture_along_a_trajectory_is_a_share_and_leaves_the_run_as_it_was():
    model = network()
    watched = TrajectoryCapture(model, batches(), losses, every=2)
    with pytest.raises(Refusal, match="no step"):
        _ = watched.result
    run = fitted(model=model, on_private_gradient=watched, seed=3)
    torch.manual_seed(0)
    other = fitted(seed=3)
    found = watched.result
    assert isinstance(found, Oracle) and 0 < found.value.share < 1
    assert found.value.random == pytest.approx(run.support.ratio)
    assert run.support == other.support


def test_training_refuses_oracles():
    gradient = true_gradient(network(), batches(), losses)
    concentration = energy_concentration(gradient)
    everything = Support.full(network())
    for value in (gradient, concentration, Oracle(0.4)):
        with pytest.raises(TypeError, match="neither true nor false"):
            bool(value)
        with pytest.raises(TypeError, match="oracle"):
            Support(value)
        with pytest.raises(TypeError, match="oracle"):
            Support({"w": value})
        with pytest.raises(TypeError, match="oracle"):
            top_k(value, 3)
        with pytest.raises(TypeError, match="oracle"):
            SupportPolicy(tiny_plan(), everything, lambda n: None, schedule=value)
        with pytest.raises(TypeError, match="oracle"):
            SupportPolicy(tiny_plan(), value, lambda n: None)
        with pytest.raises(TypeError, match="PrivateGradient"):
            CoordinateScores().add(value, everything)
        with pytest.raises(TypeError, match="PrivateGradient"):
            WarmUp(tiny_plan()).add(value)
        for argument in ("ratio_schedule", "score", "scheduler", "config"):
            with pytest.raises(TypeError, match="oracle"):
                fitted(**{argument: value})
        with pytest.raises(TypeError, match="oracle"):
            fitted(config={"ratio": value})
        with pytest.raises(Refusal, match="not private"):
            Plan.calibrate(
                "tp-topk", epsilon=1.0, delta=1e-5, batch_size=12, dataset_size=60, steps=12, active_ratio=value
            )


def test_an_oracle_is_no_number():
    for use in (float, lambda o: o + 1, lambda o: o < 1, lambda o: torch.ones(2) * o, len, lambda o: o["w"]):
        with pytest.raises(TypeError):
            use(Oracle(0.5))
    assert "not private" in repr(Oracle(0.5))
