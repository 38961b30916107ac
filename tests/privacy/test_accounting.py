"""Promise 6: no optimistic ε."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from tptopk.privacy.accounting import Segment, epsilon
from tptopk.privacy.methods import METHODS
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal

PRIVATE = [name for name, method in METHODS.items() if method.private]

# σ, q, T, δ, exact ε (to three digits), published RDP where there is one
GOLDEN = [
    (1.5, 0.04, 2250, 1e-5, 6.769, 7.3291),
    (0.7, 0.01, 120, 1e-5, 2.461, 3.23927),
    (0.8, 0.001, 100, 1e-6, 0.260, None),
    (1.5, 0.05, 100, 1e-6, 1.944, None),
    (2.0, 0.05, 1000, 1e-6, 4.163, None),
    (3.0, 0.2, 100, 1e-6, 3.371, None),
    (1.3, 0.0025, 6000, 1e-5, 0.640, 0.72422),
]
TWO_SEGMENTS = [Segment(2.0, 0.01, 200), Segment(1.0, 0.02, 800)]


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta", "exact", "rdp"), GOLDEN)
def test_golden_numbers(sigma, rate, steps, delta, exact, rdp):
    segment = [Segment(sigma, rate, steps)]
    assert abs(epsilon(segment, delta, "pld") - exact) <= 0.001
    if rdp is not None:
        assert epsilon(segment, delta, "rdp") == pytest.approx(rdp, rel=5e-4)


def test_golden_numbers_of_two_segments():
    assert abs(epsilon(TWO_SEGMENTS, 1e-5, "pld") - 3.499) <= 0.001
    assert epsilon(TWO_SEGMENTS, 1e-5, "rdp") == pytest.approx(3.901, rel=5e-4)


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta", "exact", "rdp"), GOLDEN)
def test_a_second_implementation_agrees(sigma, rate, steps, delta, exact, rdp):
    """Opacus's PRV (numerical composition) and RDP accountants share no code with dp-accounting."""
    opacus = pytest.importorskip("opacus.accountants")
    prv, renyi = opacus.PRVAccountant(), opacus.RDPAccountant()
    for accountant in (prv, renyi):
        accountant.history = [(sigma, rate, steps)]
    ours = [Segment(sigma, rate, steps)]
    assert epsilon(ours, delta, "pld") <= prv.get_epsilon(delta) + 1e-3
    assert epsilon(ours, delta, "pld") >= prv.get_epsilon(delta) - 0.02
    assert epsilon(ours, delta, "rdp") == pytest.approx(renyi.get_epsilon(delta), rel=0.02)


def analytic(s, delta):
    """Balle and Wang 2018: δ(ε) = Φ(s/2 − ε/s) − e^ε Φ(−s/2 − ε/s) with s = √T/σ."""
    return brentq(lambda e: norm.cdf(s / 2 - e / s) - math.exp(e + norm.logcdf(-s / 2 - e / s)) - delta, 1e-9, 200)


@pytest.mark.parametrize("sigma", [0.7, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("steps", [1, 16])
def test_full_batches_equal_the_analytic_gaussian(sigma, steps):
    exact = analytic(math.sqrt(steps) / sigma, delta=1e-5)
    found = epsilon([Segment(sigma, 1.0, steps)], 1e-5, "pld")
    assert exact - 1e-9 <= found <= exact + 2e-3


@pytest.mark.parametrize("accountant", ["pld", "rdp", "rdp-paper"])
def test_epsilon_is_monotone(accountant):
    def cost(sigma=1.5, rate=0.05, steps=200, delta=1e-5):
        return epsilon([Segment(sigma, rate, steps)], delta, accountant)

    assert cost(sigma=1.4) > cost() > cost(sigma=1.6)
    assert cost(rate=0.06) > cost() > cost(rate=0.04)
    assert cost(steps=300) > cost() > cost(steps=100)
    assert cost(delta=1e-6) > cost() > cost(delta=1e-4)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    sigma=st.floats(0.6, 20),
    rate=st.floats(0.001, 1),
    steps=st.integers(1, 3000),
    delta=st.sampled_from([1e-4, 1e-5, 1e-7]),
)
def test_the_tight_accountant_is_never_above_rdp_nor_rdp_above_the_classic_conversion(sigma, rate, steps, delta):
    segment = [Segment(sigma, rate, steps)]
    pld, rdp, classic = (epsilon(segment, delta, a) for a in ("pld", "rdp", "rdp-paper"))
    assert pld <= rdp * (1 + 1e-3) + 1e-3
    assert rdp <= classic


def test_edge_cases():
    assert epsilon([], 1e-5) == 0.0
    assert epsilon([Segment(math.inf, 0.1, 10)], 1e-5) == 0.0
    assert epsilon([Segment(0.0, 0.1, 10)], 1e-5) == math.inf
    assert epsilon([Segment(1e-5, 0.1, 10)], 1e-5, "pld") == math.inf
    with pytest.raises(Refusal, match="use accountant='rdp'"):
        epsilon([Segment(1.0, 0.1, 10)], 1e-13, "pld")
    with pytest.raises(Refusal, match="did you mean 'rdp'"):
        epsilon([Segment(1.0, 0.1, 10)], 1e-5, "rdpp")


def test_the_order_of_segments_does_not_matter_and_reading_changes_nothing():
    forward = epsilon(TWO_SEGMENTS, 1e-5)
    assert epsilon(TWO_SEGMENTS[::-1], 1e-5) == forward == epsilon(TWO_SEGMENTS, 1e-5)


plans = {
    "target": st.floats(0.2, 15),
    "delta": st.sampled_from([5e-6, 1e-6, 1e-8]),
    "batch": st.integers(1, 1000),
    "size": st.integers(1000, 100_000),
    "steps": st.integers(10, 2000),
    "method": st.sampled_from(PRIVATE),
    "warmup": st.floats(0.1, 0.9),
    "budget": st.one_of(st.none(), st.floats(0.1, 0.9)),
}


def calibrated(accountant, target, delta, batch, size, steps, method, warmup, budget):
    plan = Plan.calibrate(
        method,
        epsilon=target,
        delta=delta,
        batch_size=batch,
        dataset_size=size,
        steps=steps,
        warmup=warmup,
        warmup_budget=budget,
        accountant=accountant,
    )
    spent = plan.epsilon()
    assert target * 0.999 <= spent <= target
    if budget is not None and len(plan.phases) == 2:
        alone = epsilon([plan.phases[0].segment], delta, accountant)
        assert budget * target * 0.999 <= alone <= budget * target


def test_methods_with_the_same_phases_are_calibrated_alike():
    def sigmas(method):
        plan = Plan.calibrate(
            method, epsilon=2.0, delta=1e-5, batch_size=50, dataset_size=1000, steps=90, accountant="rdp"
        )
        return [phase.noise_multiplier for phase in plan.phases]

    for method in PRIVATE:
        assert sigmas(method) == sigmas("tp-topk" if METHODS[method].warmup else "dp-sgd")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk"])
@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
@given(**{key: value for key, value in plans.items() if key != "method"})
def test_calibration_never_overspends_under_rdp(target, delta, batch, size, steps, method, warmup, budget):
    calibrated("rdp", target, delta, batch, size, steps, method, warmup, budget)


@pytest.mark.parametrize("steps", [1_000, 100_000])
@pytest.mark.parametrize("delta", [1e-5, 1e-8, 2e-9])
def test_rounding_over_many_steps_does_not_make_epsilon_optimistic(steps, delta):
    """At q = 1 the exact ε is the analytic Gaussian's; the FFTs behind a PLD lose mass that small δ would miss."""
    sigma = math.sqrt(steps)
    exact = analytic(1.0, delta)
    assert exact <= epsilon([Segment(sigma, 1.0, steps)], delta, "pld") <= exact * 1.02


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk"])
@settings(
    max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
@given(**{key: value for key, value in plans.items() if key != "method"})
def test_calibration_never_overspends_under_pld(target, delta, batch, size, steps, method, warmup, budget):
    calibrated("pld", target, delta, batch, size, steps, method, warmup, budget)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("target", [0.01, 0.02, 0.05])
def test_very_small_budgets_can_be_calibrated(accountant, target):
    plan = Plan.calibrate(
        "dp-sgd", epsilon=target, delta=5e-6, batch_size=43, dataset_size=80_699, steps=43, accountant=accountant
    )
    assert target * 0.999 <= plan.epsilon() <= target
