"""What scores find, against simulation: their mean and variance, and every bound on ranking coordinates wrongly.

Statistical tests allow 5 standard errors, a false alarm below 1e-6, with a fixed seed and a fixed number of draws.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tests.test_theory import ERRORS, assert_mean, clipped, mean_and_error, poisson_means, records
from tptopk import theory
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.refusal import Refusal
from tptopk.supports.scores import CoordinateScores
from tptopk.supports.selection import top_k
from tptopk.supports.support import Support


def test_the_scores_mean_and_variance_in_the_additive_model():
    """300,000 scores of three steps for each of four coordinates."""
    rng, noise_std, steps, draws = np.random.default_rng(4), 0.5, 3, 300_000
    g = np.array([0.0, 0.2, 0.7, -1.5])
    noisy = g + noise_std * rng.standard_normal((steps, draws, 4))
    scores = (noisy**2 - noise_std**2).mean(0)
    assert_mean(scores, theory.score_mean(g))
    assert_mean((scores - theory.score_mean(g)) ** 2, theory.score_variance(g, noise_std, steps))


def test_on_poisson_batches_the_score_also_measures_sampling_variance():
    """Mean and variance with the cumulants of sampling are exact; the paper's mean is many standard errors off."""
    rng, noise_std, rate, steps, draws = np.random.default_rng(5), 0.03, 0.2, 2, 150_000
    contributions = clipped(records(coordinates=4), 1.0)
    g, sampling = contributions.mean(0), theory.sampling_cumulants(contributions, rate)
    means = np.stack([poisson_means(contributions, rate, draws, rng) for _ in range(steps)])
    scores = ((means + noise_std * rng.standard_normal(means.shape)) ** 2 - noise_std**2).mean(0)
    expected = theory.score_mean(g, sampling)
    assert_mean(scores, expected)
    assert_mean((scores - expected) ** 2, theory.score_variance(g, noise_std, steps, sampling))
    mean, error = mean_and_error(scores)
    assert (mean - theory.score_mean(g) > 50 * error).all()
    assert (theory.score_variance(g, noise_std, steps, sampling) > 2 * theory.score_variance(g, noise_std, steps)).all()


def test_sampling_cumulants_give_the_exact_variance_over_all_batches():
    """Every one of the 16 batches of four records, weighed by its probability; no noise."""
    contributions, rate = np.array([1.0, -0.5, 2.0, 0.3]), 0.3
    batches = np.array(list(itertools.product((0, 1), repeat=4)))
    weights = np.prod(np.where(batches == 1, rate, 1 - rate), 1)
    squares = (batches @ contributions / (rate * 4)) ** 2
    sampling, g = theory.sampling_cumulants(contributions, rate), contributions.mean()
    assert theory.score_mean(g, sampling) == pytest.approx(weights @ squares)
    exact = weights @ squares**2 - (weights @ squares) ** 2
    assert theory.score_variance(g, 0.0, 1, sampling) == pytest.approx(exact)


def test_scores_on_poisson_batches_can_settle_on_the_wrong_order():
    """A coordinate of large, opposed gradients outranks one of small, agreeing ones, however many steps."""
    opposed, agreeing = np.tile([3.0, -3.0], 50), np.full(100, 0.5)
    contributions = np.stack([agreeing, opposed], 1)
    weak = theory.score_mean(contributions.mean(0), theory.sampling_cumulants(contributions, 0.1))
    assert weak[0] < weak[1] and theory.score_mean(contributions.mean(0)).argmax() == 0


def test_the_scores_of_a_chosen_support_overstate_its_signal():
    """200 warm-ups of 10 steps on 300 coordinates, 30 chosen. Steps that did not choose them give the true energy."""
    rng, noise_std, steps = np.random.default_rng(6), 0.5, 10
    g = np.where(np.arange(300) < 30, 0.4, 0.1)
    everything = Support({"w": torch.ones(300, dtype=torch.bool)})
    own, fresh = [], []
    for _ in range(200):
        halves = []
        for _ in range(2):
            scores = CoordinateScores()
            for step in range(steps):
                noisy = torch.from_numpy(g + noise_std * rng.standard_normal(300))
                scores.add(PrivateGradient({"w": noisy}, noise_std, 0, step), everything)
            halves.append(scores.values()["w"])
        chosen = top_k({"w": halves[0]}, 30)["w"]
        energy = float((g[chosen.numpy()] ** 2).sum())
        own.append(float(halves[0][chosen].sum()) - energy)
        fresh.append(float(halves[1][chosen].sum()) - energy)
    assert_mean(fresh, 0.0)
    mean, error = mean_and_error(np.array(own))
    assert mean > 50 * error and mean > 30 * 0.1


PAIRS = [(0.3, 0.0), (0.5, 0.3), (1.0, 0.0), (1.0, 0.8), (3.0, 2.5)]  # G_p and G_q in units of ν


def steps_for(pair, deviations):
    """The T₁ at which the mean of a_p − a_q is so many of its standard deviations above zero."""
    p, q = pair[0] ** 2, pair[1] ** 2
    return max(1, round(deviations**2 * 4 * (1 + p + q) / (p - q) ** 2))


@pytest.mark.parametrize("pair", PAIRS)
def test_simulated_misranking_is_that_of_gaussian_steps(pair):
    """Tilted draws of χ² against 200,000 plain sums of squares, at one standard deviation."""
    rng, draws = np.random.default_rng(7), 200_000
    steps = steps_for(pair, 1)
    difference = np.zeros(draws)
    if steps > 60:  # the same sums, drawn whole
        for sign, g in zip((1, -1), pair, strict=True):
            shifted = (g * math.sqrt(steps) + rng.standard_normal(draws)) ** 2
            difference += sign * (shifted + rng.chisquare(steps - 1, draws))
    else:
        for _ in range(steps):
            difference += (pair[0] + rng.standard_normal(draws)) ** 2 - (pair[1] + rng.standard_normal(draws)) ** 2
    plain, plain_error = mean_and_error(difference < 0)
    tilted, tilted_error = theory.simulated_misranking(*pair, 1.0, steps, draws, rng)
    assert abs(plain - tilted) < ERRORS * math.hypot(plain_error, tilted_error)
    assert 0.05 < plain < 0.3


@pytest.mark.parametrize("pair", PAIRS)
def test_misranking_bounds_hold_and_are_this_loose(pair):
    """At 1.5, 3 and 6 standard deviations, 20,000 tilted draws each, with noise 0.7.

    Chebyshev's bound is 7, 90 and 30 million times the probability, the exponential bound 5, 9 and 17 times (90 for a
    strong signal beside none). Chernoff's at its best lies between the probability and the exponential bound.
    """
    rng, noise_std = np.random.default_rng(8), 0.7
    p, q = pair[0] * noise_std, pair[1] * noise_std
    expected = {1.5: ((5, 10), (4, 7)), 3: ((60, 200), (7, 20)), 6: ((1e7, 1e9), (12, 150))}
    for deviations, ranges in expected.items():
        steps = steps_for(pair, deviations)
        probability, error = theory.simulated_misranking(p, q, noise_std, steps, 20_000, rng)
        assert error < 0.03 * probability
        least = probability - ERRORS * error
        chebyshev = float(theory.misranking_chebyshev(p, q, noise_std, steps))
        exponential = float(theory.misranking_exponential(p, q, noise_std, steps))
        chernoff = theory.misranking_chernoff(p, q, noise_std, steps)
        assert least <= chernoff <= exponential * (1 + 1e-9) and least <= chebyshev
        for bound, (low, high) in zip((chebyshev, exponential), ranges, strict=True):
            assert low < bound / probability < high


def test_the_exponential_constant_is_an_eighth():
    """Simulation leaves no room for more: 20 standard deviations out, a probability near 1e-89, it finds 0.127; over a few hundred
    steps, from pairs at hand, 0.146.
    """
    rng = np.random.default_rng(9)
    for pair in ((0.51, 0.5), (2.01, 2.0)):
        found = theory.simulated_exponent([pair], 1.0, steps_for(pair, 20), 20_000, rng)
        assert theory.EXPONENT == 1 / 8 < found < 0.13
    assert theory.EXPONENT < theory.simulated_exponent(PAIRS, 1.0, 300, 20_000, rng) < 0.16


def test_the_exponential_bound_never_falls_below_chernoffs_best():
    """On 2,000 random pairs from far below the noise to far above it; the proof's inequality, checked."""
    rng = np.random.default_rng(10)
    nearest = math.inf
    for _ in range(2000):
        q, p = np.sort(np.exp(rng.uniform(-4, 4, 2)))
        exponential = -math.log(max(float(theory.misranking_exponential(p, q, 1.0, 1)), 1e-300))
        chernoff = -math.log(max(theory.misranking_chernoff(p, q, 1.0, 1), 1e-300))
        assert exponential <= chernoff * (1 + 1e-9) + 1e-12
        nearest = min(nearest, chernoff / exponential)
    assert nearest < 1.01


def test_equal_signals_have_no_bound():
    for bound in (theory.misranking_chebyshev, theory.misranking_exponential):
        assert bound([1.0, 1.0, 2.0], [1.0, 2.0, 0.0], 0.0, 10).tolist() == [1.0, 1.0, 0.0]
    with pytest.raises(Refusal, match="the larger"):
        theory.misranking_chernoff(1.0, 1.0, 1.0, 10)


def test_the_union_bound_holds_for_exact_recovery():
    """50,000 warm-ups of 4 in 12 coordinates. 18 and 25 times too large; with Chebyshev's pairs it says nothing yet."""
    rng, noise_std, draws = np.random.default_rng(11), 0.5, 50_000
    g = np.array([1.0, -1.1, 1.2, 1.0, 0.4, 0.3, -0.4, 0.2, 0.0, 0.0, 0.1, -0.1])
    for steps in (10, 20):
        sums = rng.noncentral_chisquare(steps, steps * (g / noise_std) ** 2, (draws, 12))
        failed, error = mean_and_error(sums[:, :4].min(1) < sums[:, 4:].max(1))
        bound = theory.recovery_failure(g, 4, noise_std, steps)
        assert failed - ERRORS * error < bound < 1
        assert 12 < bound / failed < 40
        assert theory.recovery_failure(g, 4, noise_std, steps, theory.misranking_chebyshev) == 1
    pairs = [
        theory.recovery_failure(g, 4, noise_std, 400, pair)
        for pair in (theory.misranking_exponential, theory.misranking_chebyshev)
    ]
    assert pairs[0] < 1e-40 and 0.05 < pairs[1] < 0.5


def test_recovery_without_a_boundary_is_certain_and_with_a_tie_unbounded():
    assert theory.recovery_failure([1.0, 2.0], 2, 1.0, 5) == 0 == theory.recovery_failure([1.0, 2.0], 0, 1.0, 5)
    assert theory.recovery_failure([1.0, -1.0, 0.0], 1, 1e-3, 1000) == 1
    g = [3.0, 2.0, 1.0]
    pairs = [theory.misranking_chebyshev(3.0, q, 0.5, 50) for q in (2.0, 1.0)]
    assert theory.recovery_failure(g, 1, 0.5, 50, theory.misranking_chebyshev) == pytest.approx(float(sum(pairs)))


def test_a_tie_at_the_boundary_leaves_nothing_to_recover_and_either_bound_serves():
    g = [1.0, -1.1, 0.4, 0.3]
    each = [theory.misranking_chernoff(p, q, 0.5, 60) for p in (1.0, 1.1) for q in (0.4, 0.3)]
    chernoff = theory.recovery_failure(g, 2, 0.5, 60, theory.misranking_chernoff)
    assert chernoff == pytest.approx(float(sum(each))) and chernoff < theory.recovery_failure(g, 2, 0.5, 60) < 1
    for pair in (theory.misranking_exponential, theory.misranking_chernoff):
        assert theory.recovery_failure([2.0, 1.0, -1.0], 2, 0.5, 60, pair) == 1
        assert theory.recovery_failure(g, 4, 0.5, 60, pair) == 0 == theory.recovery_failure(g, 0, 0.5, 60, pair)


@pytest.mark.parametrize("bound", [theory.misranking_chebyshev, theory.misranking_exponential])
def test_bounds_do_not_depend_on_the_unit_however_small_or_large_it_is(bound):
    for unit in (1e-150, 1e-100, 1e100, 1e150):
        assert bound(3.0 * unit, unit, 2.0 * unit, 40) == pytest.approx(bound(3.0, 1.0, 2.0, 40))
        assert bound(unit, 0.0, 0.0, 5) == 0.0 and theory.recovery_failure([unit, 0.0], 1, 0.0, 5, bound) == 0.0
