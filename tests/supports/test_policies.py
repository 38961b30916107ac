from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import hypergeom
from torch import nn
from torch.nn import functional as F

import tptopk
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal
from tptopk.supports.policies import SupportPolicy
from tptopk.supports.support import Support
from tptopk.training.mechanism import Mechanism

EVERYTHING = Support({"w": torch.ones(10, 8, dtype=torch.bool), "b": torch.ones(20, dtype=torch.bool)})


def plan(method: str, ratio: float = 0.2, steps: int = 40) -> Plan:
    return Plan.calibrate(
        method,
        epsilon=3.0,
        delta=1e-5,
        batch_size=100,
        dataset_size=1000,
        steps=steps,
        active_ratio=ratio,
        warmup=0.25,
        accountant="rdp",
    )


def walk(method, ratio=0.2, seed=0, signal=None, **options):
    """Every support of a run in which the private gradient is `signal` plus a little noise."""
    p = plan(method, ratio)
    policy = SupportPolicy(p, EVERYTHING, lambda n: np.random.default_rng((seed, n)), **options)
    generator = torch.Generator().manual_seed(seed)
    supports = []
    for phase, numbers in enumerate(p.phases):
        for step in range(numbers.steps):
            support = policy.support(phase, step)
            values = {
                n: support.keep(
                    n, (0 if signal is None else signal[n]) + 0.1 * torch.randn(m.shape, generator=generator)
                )
                for n, m in EVERYTHING.masks.items()
            }
            policy.observe(PrivateGradient(values, 0.1, phase, step))
            supports.append(support)
    return supports


def strong(*coordinates: int) -> dict[str, torch.Tensor]:
    signal = torch.zeros(100)
    signal[list(coordinates)] = 3.0
    return {"w": signal[:80].view(10, 8), "b": signal[80:]}


def indices(support: Support) -> set[int]:
    return set(torch.cat([m.flatten() for m in support.masks.values()]).nonzero()[:, 0].tolist())


def test_dense_methods_keep_everything():
    assert all(s.is_full for s in walk("dp-sgd"))


def test_tp_topk_finds_the_signal_and_stays():
    where = {3, 17, 50, 79, 80, 99}
    supports = walk("tp-topk", ratio=0.06, signal=strong(*where))
    assert all(s.is_full for s in supports[:10])
    assert all(s is supports[10] for s in supports[10:])
    assert indices(supports[10]) == where


def test_tp_rand_is_fixed_and_blind_to_the_signal():
    supports = walk("tp-rand", signal=strong(1, 2, 3))
    assert all(s.is_full for s in supports[:10]) and all(s is supports[10] for s in supports[10:])
    assert supports[10].size == 20
    assert supports[10] == walk("tp-rand")[10] and supports[10] != walk("tp-rand", seed=1)[10]


def test_on_rand_is_fresh_at_every_epoch():
    supports = walk("on-rand")
    epochs = [supports[start] for start in range(0, 40, 10)]
    assert all(s.size == 20 for s in supports)
    assert all(supports[i] is epochs[i // 10] for i in range(40))
    assert len({frozenset(indices(s)) for s in epochs}) == 4


def test_on_topk_keeps_what_it_found_and_explores():
    where = set(range(0, 100, 10))
    supports = walk("on-topk", ratio=0.5, signal=strong(*where))
    assert all(s.size == 50 for s in supports)
    first, last = indices(supports[0]), indices(supports[-1])
    assert len(first & where) < 10 or len(first) == 50
    assert (first & where) <= last, "signal once seen is kept"
    assert len(indices(supports[30]) - indices(supports[20])) >= 1, "and something new is tried"


@pytest.mark.parametrize("method", ["tp-topk", "tp-rand", "on-topk", "on-rand"])
@pytest.mark.parametrize("schedule", ["linear", "cosine", lambda progress: 1 - 0.8 * progress**2])
def test_schedules_come_down_to_the_active_ratio(method, schedule):
    supports = walk(method, schedule=schedule)
    sparse = supports[10:] if method.startswith("tp") else supports
    sizes = [s.size for s in sparse]
    assert sizes[0] == 100 and sizes[-1] == 20 and sizes == sorted(sizes, reverse=True)
    if method.startswith("tp"):
        assert all(indices(b) <= indices(a) for a, b in itertools.pairwise(sparse)), "a fixed ranking is nested"


@pytest.mark.parametrize("score", ["paper", "factored"])
def test_scores_are_a_choice(score):
    supports = walk(
        "tp-topk",
        signal={"w": torch.ones(10, 8) * torch.tensor([2.0] * 4 + [0.0] * 4), "b": torch.zeros(20)},
        score=score,
    )
    assert supports[-1]["w"][:, :4].sum() == 20


@pytest.mark.parametrize("ratio", [0.001, 0.009])
def test_k_of_zero_is_refused_before_training(ratio):
    with pytest.raises(Refusal, match="k = 0"):
        SupportPolicy(plan("tp-topk", ratio), EVERYTHING, np.random.default_rng)


@pytest.mark.parametrize(
    "method, options, message",
    [
        ("dp-sgd", {"score": "factored"}, "dp-sgd does not choose coordinates by a score; leave it out"),
        ("tp-rand", {"score": "factored"}, "tp-rand does not choose"),
        ("dp-sgd", {"schedule": "linear"}, "dp-sgd trains all coordinates; leave it out"),
        ("non-private", {"schedule": lambda progress: 0.5}, "non-private trains all"),
        ("dp-sgd", {"score": "factord"}, "did you mean 'factored'"),
        ("dp-sgd", {"schedule": "linar"}, "did you mean 'linear'"),
    ],
)
def test_what_a_method_does_not_use_is_refused(method, options, message):
    with pytest.raises(Refusal, match=message):
        walk(method, **options)


@pytest.mark.parametrize("value", [0.0, 1.5, float("nan")])
def test_a_schedule_out_of_range_is_refused_before_training(value):
    with pytest.raises(Refusal, match="active ratio"):
        SupportPolicy(plan("on-rand"), EVERYTHING, np.random.default_rng, schedule=lambda progress: value)
    with pytest.raises(Refusal, match="did you mean 'cosine'"):
        SupportPolicy(plan("on-rand"), EVERYTHING, np.random.default_rng, schedule="cosinus")


def trained(monkeypatch, noise_multiplier, score="paper"):
    """A tp-topk run on data whose gradients are all in 100 of 1,000 weights: its plan, releases (as numbers), supports."""
    model = nn.Linear(200, 5, bias=False)
    x = F.pad(torch.randn(100, 20), (0, 180))
    numbers = tptopk.Phase(steps=4, sample_rate=0.5, noise_multiplier=noise_multiplier, clip_norm=1.0)
    p = Plan(
        phases=(numbers, numbers),
        delta=1e-5,
        dataset_size=100,
        method="tp-topk",
        active_ratio=0.1,
        accountant="rdp",
    )
    released, supports = [], []
    inner = Mechanism.private_gradient

    def watched(self, batches, support, phase, step):
        private = inner(self, batches, support, phase, step)
        released.append(({n: v.clone() for n, v in private.values.items()}, private.noise_std, phase, step))
        supports.append(support)
        return private

    monkeypatch.setattr(Mechanism, "private_gradient", watched)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tptopk.fit(model, (x, torch.arange(100) % 5), p, optimizer, loss=F.cross_entropy, score=score)
    return p, released, supports


@pytest.mark.parametrize("score", ["paper", "factored"])
def test_a_support_is_a_function_of_what_was_released(score, monkeypatch):
    """A policy that is shown copies of the released numbers, and nothing else, chooses the run's supports again."""
    p, released, supports = trained(monkeypatch, 2.0, score)
    policy = SupportPolicy(p, supports[0], np.random.default_rng, score)
    for (values, noise_std, phase, step), support in zip(released, supports, strict=True):
        assert policy.support(phase, step) == support
        policy.observe(PrivateGradient(values, noise_std, phase, step))
    assert supports[0].is_full and supports[-1].size == 100


def test_under_noise_that_drowns_the_data_a_support_finds_nothing(monkeypatch):
    """At σ = 10⁴ the 100 weights that hold all the signal are in the support as often as any others: their number is
    hypergeometric, as the signal is below 1% of the noise. A false alarm once in a million runs.
    """
    _, _, supports = trained(monkeypatch, 1e4)
    found = int(supports[-1]["weight"][:, :20].sum())
    assert hypergeom(1000, 100, 100).sf(found - 1) > 1e-6
