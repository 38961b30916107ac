"""One step on a support, against simulation: what it loses, what noise and sampling add; and what no theorem is about is refused.

Statistical tests allow 5 standard errors, a false alarm below 1e-6, with a fixed seed and a fixed number of draws.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tptopk import theory
from tptopk.privacy.refusal import Refusal
from tptopk.supports.selection import random_ranking, top_k
from tptopk.supports.support import Support

ERRORS = 5  # standard errors allowed


def mean_and_error(draws):
    return draws.mean(0), draws.std(0) / math.sqrt(len(draws))


def assert_mean(draws, expected):
    mean, error = mean_and_error(np.asarray(draws))
    assert (np.abs(mean - expected) < ERRORS * error).all(), (mean, expected, error)


def clipped(gradients, clip_norm):
    norms = np.linalg.norm(gradients, axis=-1, keepdims=True)
    return gradients * np.minimum(1.0, clip_norm / np.maximum(norms, 1e-300))


def records(seed=0, count=60, coordinates=12):
    """Gradients of uneven lengths and uneven coordinates, with a mean."""
    rng = np.random.default_rng(seed)
    scale = np.linspace(2.0, 0.2, coordinates)
    return scale * (0.4 + rng.standard_normal((count, coordinates))) * rng.gamma(2.0, 0.5, (count, 1))


def poisson_means(contributions, rate, draws, rng):
    """`draws` batch means Σ δ_i ḡ_i / (qN)."""
    return (rng.random((draws, len(contributions))) < rate) @ contributions / (rate * len(contributions))


# One step on a support


def test_captured_energy_is_of_the_active_coordinates():
    gradient = {"w": torch.tensor([[3.0, 4.0], [0.0, 1.0]]), "b": torch.tensor([2.0])}
    support = Support({"w": torch.tensor([[True, False], [True, True]]), "b": torch.tensor([False])})
    assert theory.captured_energy(gradient, support) == (10.0, 30.0)


def test_the_error_of_a_step_is_lost_signal_and_noise():
    """In the paper's setting, a full batch with no clipping."""
    rng, noise_std, k = np.random.default_rng(1), 0.3, 5
    g = records().mean(0)
    released = np.where(np.arange(12) < k, g + noise_std * rng.standard_normal((100_000, 12)), 0.0)
    lost = float(np.sum(g[k:] ** 2))
    assert_mean(np.sum((released - g) ** 2, 1), theory.one_step_error(lost, k, noise_std))
    dense = g + noise_std * rng.standard_normal((100_000, 12))
    assert_mean(np.sum((dense - g) ** 2, 1), theory.one_step_error(0.0, 12, noise_std))


def test_sampling_and_clipping_after_masking_add_to_the_error_of_a_step():
    """Poisson batches of clipped gradients: all four terms are exact, and the paper's two miss a good part."""
    rng, noise_std, rate, k, clip_norm = np.random.default_rng(2), 0.05, 0.2, 5, 1.0
    gradients, active = records(), np.arange(12) < 5
    g = clipped(gradients, clip_norm).mean(0)
    masked = clipped(gradients * active, clip_norm)
    draws = poisson_means(masked, rate, 100_000, rng) + noise_std * active * rng.standard_normal((100_000, 12))
    lost = float(np.sum(g[~active] ** 2))
    proxy = theory.one_step_error(lost, k, noise_std)
    exact = theory.one_step_error(
        lost,
        k,
        noise_std,
        clipping_shift=float(np.sum((masked.mean(0) - g * active) ** 2)),
        sampling_variance=theory.sampling_variance(np.linalg.norm(masked, axis=1), rate),
    )
    errors = np.sum((draws - g) ** 2, 1)
    assert_mean(errors, exact)
    assert 1.5 < errors.mean() / proxy < 4


def test_the_criterion_tells_which_of_two_updates_is_nearer():
    g, noise_std = records().mean(0), 0.1
    for k in range(13):
        lost = float(np.sum(g[k:] ** 2))
        nearer = theory.one_step_error(lost, k, noise_std) < theory.one_step_error(0.0, 12, noise_std)
        assert theory.restriction_helps(lost, 12 - k, noise_std) == nearer
    verdicts = {theory.restriction_helps(float(np.sum(g[5:] ** 2)), 7, nu) for nu in (0.001, 1.0)}
    assert verdicts == {True, False}


def test_a_random_support_loses_its_share():
    """1,500 random supports of 7 in 40 coordinates."""
    g, losses = {"w": torch.linspace(-1, 3, 40).reshape(8, 5)}, []
    for n in range(1500):
        captured, energy = theory.captured_energy(g, top_k(random_ranking(g, np.random.default_rng(n)), 7))
        losses.append(energy - captured)
    assert_mean(losses, theory.random_support_loss(energy, 7, 40))


def test_sampling_variance_is_of_the_second_moment():
    """Identical records vary as well: their number does. Never above C²/B."""
    rng, rate = np.random.default_rng(3), 0.3
    same = np.ones((40, 3))
    for contributions in (clipped(records(coordinates=6), 1.0), same):
        means = poisson_means(contributions, rate, 100_000, rng)
        variance = theory.sampling_variance(np.linalg.norm(contributions, axis=1), rate)
        assert_mean(np.sum((means - contributions.mean(0)) ** 2, 1), variance)
    assert 0 < theory.sampling_variance(np.minimum(np.arange(50.0), 2.0), rate) < 2.0**2 / (rate * 50)


# Refusals


STATIONARY = {"gap": 1.0, "smoothness": 1.0, "learning_rate": 0.5, "steps": 10, "squared_bias": 0.1}
STATIONARY |= {"sampling_variance": 0.1, "active": 3.0, "noise_std": 0.1}


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: theory.recovery_failure([1, 2], 5, 1.0, 10), "active is 5, of 2 coordinates"),
        (lambda: theory.recovery_failure([1, 2], 1, -1.0, 10), "noise_std is -1.0"),
        (lambda: theory.recovery_failure([1, 2], 1, 1.0, 0), "steps is 0"),
        (lambda: theory.misranking_chernoff(2.0, 1.0, 0.0, 10), "noise_std is 0.0"),
        (lambda: theory.misranking_chernoff([2.0, 1.0], [1.0, 1.0], 1.0, 10), "1ν² and 1ν²; the first must be the"),
        (lambda: theory.random_support_loss(1.0, 5, 3), "active is 5, of 3 coordinates"),
        (lambda: theory.random_support_loss(1.0, 0, 0), "total is 0"),
        (lambda: theory.energy_capture([2.0], [1.0]), "larger than those of full"),
        (lambda: theory.energy_capture([-1.0], [1.0]), "negative"),
        (lambda: theory.energy_capture([float("nan")], [1.0]), "no numbers"),
        (lambda: theory.sampling_variance([], 0.5), "norms is empty"),
        (lambda: theory.energy_capture([1.0], [1.0, 2.0]), "for the same steps"),
        (lambda: theory.scheduled_learning_rate(1.0, 0), "steps is 0"),
        (lambda: theory.scheduled_learning_rate(0.0, 1), "smoothness is 0"),
        (lambda: theory.sampling_variance([1.0], 0.0), "sample_rate is 0"),
        (lambda: theory.sampling_cumulants([1.0], 1.5), "sample_rate is 1.5"),
        (lambda: theory.simulated_misranking(3.0, 0.0, 1.0, 5000, 10, np.random.default_rng(0)), "too rare"),
        (lambda: theory.simulated_exponent([(3.0, 0.0)], 1.0, 5000, 10, np.random.default_rng(0)), "too rare"),
        (lambda: theory.simulated_exponent([(1.0, 0.0)], 1.0, 0, 10, np.random.default_rng(0)), "steps is 0"),
        *(
            (lambda name=name: theory.projected_stationarity(**{**STATIONARY, name: -0.1}), f"{name} is -0.1")
            for name in ("gap", "squared_bias", "sampling_variance", "active", "noise_std")
        ),
    ],
)
def test_what_no_theorem_is_about_is_refused(ask, words):
    with pytest.raises(Refusal, match=words):
        ask()
