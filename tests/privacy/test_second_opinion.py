"""Promise 6 from the other side: a second accountant, of other code, finds the same ε and never too small a one."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from tptopk.privacy import accounting, second_opinion
from tptopk.privacy.accounting import Segment
from tptopk.privacy.refusal import Refusal
from tptopk.privacy.second_opinion import epsilon

# segments, δ, exact ε (to three digits)
GOLDEN = [
    ([Segment(1.5, 0.04, 2250)], 1e-5, 6.769),
    ([Segment(0.7, 0.01, 120)], 1e-5, 2.461),
    ([Segment(0.8, 0.001, 100)], 1e-6, 0.260),
    ([Segment(1.5, 0.05, 100)], 1e-6, 1.944),
    ([Segment(2.0, 0.05, 1000)], 1e-6, 4.163),
    ([Segment(3.0, 0.2, 100)], 1e-6, 3.371),
    ([Segment(1.3, 0.0025, 6000)], 1e-5, 0.640),
    ([Segment(2.0, 0.01, 200), Segment(1.0, 0.02, 800)], 1e-5, 3.499),
]
VARIED = [
    ([Segment(4.0, 0.16, 183)], 1e-5),
    ([Segment(8.0, 0.16, 366)], 1e-5),
    ([Segment(6.0, 0.16, 366)], 1e-9),
    ([Segment(1.0, 0.01, 10_000)], 1e-5),
    ([Segment(1.0, 0.01, 10_000)], 1e-9),
    ([Segment(0.3, 0.1, 10)], 1e-6),
    ([Segment(0.5, 1e-5, 1000)], 1e-7),
    ([Segment(200.0, 0.9, 100_000)], 1e-5),
    ([Segment(20.0, 0.5, 1000)], 1e-2),
    ([Segment(1.0, 0.01, 1)], 1e-5),
    ([Segment(5.0, 0.5, 100), Segment(10.0, 0.1, 1000)], 1e-6),
    ([Segment(2.0, 0.02, 500), Segment(1.0, 0.001, 5000), Segment(50.0, 1.0, 10)], 1e-6),
]


def test_it_runs_no_code_of_the_first_accountant():
    tree = ast.parse(Path(second_opinion.__file__).read_text())
    run = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in run}
    allowed = {"__future__", "bisect", "math", "collections.abc", "typing", "numpy", "scipy", "tptopk.privacy.refusal"}
    assert names <= allowed


@pytest.mark.parametrize(("segments", "delta", "exact"), GOLDEN)
def test_golden_numbers(segments, delta, exact):
    assert exact - 0.0005 <= epsilon(segments, delta) <= 1.001 * exact + 0.001


@pytest.mark.parametrize(("segments", "delta"), VARIED)
def test_it_agrees_with_the_first_accountant(segments, delta):
    first = accounting.epsilon(segments, delta, "pld")
    assert 0.995 * first <= epsilon(segments, delta) <= 1.02 * first + 0.01


def analytic(s, delta):
    """Balle and Wang 2018: δ(ε) = Φ(s/2 − ε/s) − e^ε Φ(−s/2 − ε/s) with s = √T/σ."""
    return brentq(
        lambda e: norm.cdf(s / 2 - e / s) - math.exp(e + norm.logcdf(-s / 2 - e / s)) - delta, 1e-9, s * s + 10 * s
    )


@pytest.mark.parametrize(("sigma", "steps"), [(0.3, 1), (1.0, 1), (1.0, 100), (20.0, 16), (200.0, 1), (200.0, 100_000)])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_full_batches_equal_the_analytic_gaussian_from_above(sigma, steps, delta):
    exact = analytic(math.sqrt(steps) / sigma, delta)
    assert exact <= epsilon([Segment(sigma, 1.0, steps)], delta) <= 1.002 * exact + 1e-3


def one_step(sigma, rate, delta):
    """ε of one step, from δ(ε) in closed form, in the worse direction."""

    def removal(e):
        x = sigma**2 * math.log1p(math.expm1(e) / rate) + 0.5
        return rate * norm.sf((x - 1) / sigma) - (math.expm1(e) + rate) * norm.sf(x / sigma)

    def addition(e):
        if math.expm1(-e) <= -rate:
            return 0.0
        x = sigma**2 * math.log1p(math.expm1(-e) / rate) + 0.5
        return norm.cdf(x / sigma) - math.exp(e) * ((1 - rate) * norm.cdf(x / sigma) + rate * norm.cdf((x - 1) / sigma))

    def root(direction):
        return brentq(lambda e: direction(e) - delta, 0, 200) if direction(0) > delta else 0.0

    return max(root(removal), root(addition))


@pytest.mark.parametrize("delta", [1e-4, 1e-9])
@pytest.mark.parametrize(
    ("sigma", "rate"), [(0.3, 1e-5), (0.3, 0.999), (0.5, 0.01), (1.0, 1e-5), (1.0, 0.5), (3.0, 0.9), (200.0, 0.5)]
)
def test_one_step_equals_the_closed_form_from_above(sigma, rate, delta):
    exact = one_step(sigma, rate, delta)
    assert exact <= epsilon([Segment(sigma, rate, 1)], delta) <= 1.002 * exact + 1e-3


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    sigma=st.floats(0.4, 100), rate=st.floats(1e-4, 0.8), steps=st.integers(1, 20_000), log_delta=st.floats(-9.0, -2.5)
)
def test_epsilon_is_monotone(sigma, rate, steps, log_delta):
    def cost(sigma=sigma, rate=rate, steps=steps, delta=10**log_delta):
        return epsilon([Segment(sigma, rate, steps)], delta)

    slack = 1.001 * cost() + 1e-4  # the grid's error differs from one to the next
    assert cost(sigma=1.2 * sigma) <= slack
    assert cost(rate=rate / 1.2) <= slack
    assert cost(steps=steps - steps // 5) <= slack
    assert cost(delta=2 * 10**log_delta) <= slack


def test_splitting_a_segment_changes_nothing():
    whole = epsilon([Segment(1.5, 0.05, 300)], 1e-6)
    assert epsilon([Segment(1.5, 0.05, 100), Segment(1.5, 0.05, 200)], 1e-6) == whole
    nearly = [Segment(1.5, 0.05, 100), Segment(1.5 + 1e-9, 0.05, 200)]  # too different to be merged
    assert epsilon(nearly, 1e-6) == pytest.approx(whole, rel=1e-6)


def test_a_second_segment_never_lowers_epsilon():
    one = Segment(2.0, 0.05, 300)
    assert epsilon([one, Segment(100.0, 0.001, 10)], 1e-6) >= epsilon([one], 1e-6) * (1 - 1e-3)


def test_what_costs_nothing():
    free = [Segment(1.0, 0.1, 0), Segment(math.inf, 0.1, 10), Segment(1.0, 0.0, 10)]
    assert epsilon([], 1e-5) == epsilon(free, 1e-5) == 0.0
    assert epsilon([Segment(1e20, 0.5, 1)], 1e-5) <= 1e-9


@pytest.mark.parametrize("sigma", [0.0, 1e-320, 1e-200])
def test_hopeless_noise_is_infinite(sigma):
    assert epsilon([Segment(sigma, 0.1, 5)], 1e-5) == math.inf


def test_beyond_the_grid_a_looser_bound_is_returned():
    tiny_noise, tiny_delta = epsilon([Segment(0.02, 1.0, 1)], 1e-5), epsilon([Segment(1.0, 1.0, 1)], 1e-250)
    assert analytic(1 / 0.02, 1e-5) <= tiny_noise <= 1.1 * analytic(1 / 0.02, 1e-5)
    assert epsilon([Segment(1.0, 1.0, 1)], 1e-190) < tiny_delta < math.inf


@pytest.mark.parametrize(
    "segment", [Segment(-1.0, 0.1, 5), Segment(math.nan, 0.1, 5), Segment(1.0, 1.5, 5), Segment(1.0, 0.1, -5)]
)
def test_numbers_out_of_range_are_refused(segment):
    with pytest.raises(Refusal, match="steps of noise"):
        epsilon([segment], 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
def test_a_delta_out_of_range_is_refused(delta):
    with pytest.raises(Refusal, match="delta is"):
        epsilon([Segment(1.0, 0.1, 5)], delta)
