"""Convergence, against simulation: that every bound holds, and how loose it is.

Statistical tests allow 5 standard errors, a false alarm below 1e-6, with a fixed seed and a fixed number of draws.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.test_theory import ERRORS, clipped, mean_and_error, records
from tptopk import theory
from tptopk.privacy.accounting import Segment, noise_for
from tptopk.privacy.refusal import Refusal
from tptopk.theory import Bound


def test_the_clipping_residual_bounds_the_bias_tightly_only_for_gradients_that_agree():
    def bias(gradients, clip_norm):
        return float(np.linalg.norm(clipped(gradients, clip_norm).mean(0) - gradients.mean(0)))

    def residual(gradients, clip_norm):
        return theory.clipping_residual(np.linalg.norm(gradients, axis=1), clip_norm)

    gradients = records()
    for clip_norm in (0.3, 1.0, 2.0):
        assert 1.5 < residual(gradients, clip_norm) / bias(gradients, clip_norm) < 6
    agreeing = np.linspace(0.1, 3.0, 30)[:, None] * np.ones((1, 4))
    assert residual(agreeing, 1.0) == pytest.approx(bias(agreeing, 1.0)) and bias(agreeing, 1.0) > 0.1
    opposed = np.concatenate([agreeing, -agreeing])
    assert bias(opposed, 1.0) == pytest.approx(0, abs=1e-12) and residual(opposed, 1.0) > 0.1
    assert residual(gradients, 100.0) == 0 == bias(gradients, 100.0)


def descend(start, gradients_at, active, *, clip_norm, rate, noise_std, eta, steps, runs, seed):
    """Masked DP-SGD on Poisson batches, `runs` at once; what the theorem speaks of, at every step of every run."""
    rng = np.random.default_rng(seed)
    theta, rows = np.tile(start, (runs, 1)), []
    for _ in range(steps):
        gradients = gradients_at(theta)  # [runs, N, d]
        full, masked = gradients.mean(1), gradients * active
        kept = clipped(masked, clip_norm)
        rows.append(
            {
                "full": np.sum(full**2, -1),
                "projected": np.sum((full * active) ** 2, -1),
                "bias": np.sum((kept.mean(1) - full * active) ** 2, -1),
                "residual": np.maximum(np.linalg.norm(masked, axis=-1) - clip_norm, 0).mean(1) ** 2,
                "sampling": (1 - rate) / (rate * gradients.shape[1]) * np.sum(kept**2, -1).mean(1),
            }
        )
        drawn = rng.random(gradients.shape[:2]) < rate
        step = np.einsum("rn,rnd->rd", drawn, kept) / (rate * gradients.shape[1])
        theta = theta - eta * (step + noise_std * active * rng.standard_normal(theta.shape))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}  # [T, runs]


class Waves:
    """L(θ) = (1/N) Σ_i Σ_p h_p (1 − cos(θ_p − c_ip)): not convex, its least value and smoothness known exactly."""

    def __init__(self):
        self.heights = np.linspace(1.0, 0.1, 10)
        self.centres = np.random.default_rng(0).normal(0.0, 0.8, (25, 10))
        self.start = np.full(10, 2.5)
        resultant = np.exp(1j * self.centres).mean(0)
        self.depths, self.phases = self.heights * np.abs(resultant), np.angle(resultant)
        self.smoothness = float(self.depths.max())

    def gradients(self, theta):
        return self.heights * np.sin(theta[:, None, :] - self.centres)

    def gap(self, active):
        """L(θ₀) less the least loss that the active coordinates can reach."""
        return float(np.sum((self.depths * (1 - np.cos(self.start - self.phases)))[active]))


@pytest.mark.parametrize("clip_norm, loose", [(0.4, (1.1, 1.5)), (100.0, (1.7, 2.4))], ids=["clipped", "unclipped"])
def test_projected_stationarity_holds_on_a_loss_that_is_not_convex(clip_norm, loose):
    """400 runs of 60 steps on 4 of 10 coordinates: the bound is 1.3 times the measured mean clipped, 2.0 unclipped."""
    waves, active, noise_std, steps = Waves(), np.arange(10) < 4, 0.15, 60
    eta = theory.scheduled_learning_rate(waves.smoothness, steps)
    options = {"clip_norm": clip_norm, "rate": 0.3, "noise_std": noise_std, "eta": eta, "steps": steps}
    seen = descend(waves.start, waves.gradients, active, runs=400, seed=12, **options)
    known = {
        "gap": waves.gap(active),
        "smoothness": waves.smoothness,
        "learning_rate": eta,
        "steps": steps,
        "sampling_variance": float(seen["sampling"].max()),
        "active": 4,
        "noise_std": noise_std,
    }
    bound = theory.projected_stationarity(squared_bias=float(seen["bias"].mean()), **known)
    mean, error = mean_and_error(seen["projected"].mean(0))
    assert mean - ERRORS * error < bound.total
    assert loose[0] < bound.total / mean < loose[1]

    above = theory.projected_stationarity(squared_bias=float(seen["residual"].mean()), **known)
    assert (seen["bias"] <= seen["residual"] + 1e-12).all()
    assert bound.total <= above.total < 1.5 * bound.total

    capture = theory.energy_capture(seen["projected"], seen["full"])
    assert theory.captures_more_than_random(capture, 4 / 10)
    whole = theory.full_gradient_stationarity(bound, capture)
    assert seen["full"].mean() < whole.total and loose[0] < whole.total / seen["full"].mean() < loose[1]


def test_progress_sampling_and_noise_are_tight_on_a_bowl():
    """L = (β/2N) Σ ‖θ − c_i‖² at η = 1/β, 4,000 runs of 40 steps: the bound is 1.017 times the measured mean."""
    beta, noise_std, steps = 2.0, 0.4, 40
    centres = np.random.default_rng(13).choice([-2.0, 2.0], (10, 5))
    centres = np.concatenate([centres, -centres])
    active, start = np.arange(5) < 3, np.array([3.0, -2.0, 1.0, 1.0, 1.0])
    options = {"clip_norm": 1e9, "rate": 0.5, "noise_std": noise_std, "eta": 1 / beta, "steps": steps}
    seen = descend(start, lambda theta: beta * (theta[:, None, :] - centres), active, runs=4000, seed=13, **options)
    bound = theory.projected_stationarity(
        gap=beta / 2 * float(np.sum(start[active] ** 2)),
        smoothness=beta,
        learning_rate=1 / beta,
        steps=steps,
        squared_bias=float(seen["bias"].mean()),
        sampling_variance=float(seen["sampling"].mean()),
        active=3,
        noise_std=noise_std,
    )
    mean, error = mean_and_error(seen["projected"].mean(0))
    assert bound.clipping_bias == 0 and min(bound.progress, bound.sampling, bound.noise) > 0.1 * mean
    assert mean - ERRORS * error < bound.total < 1.03 * mean


def test_the_clipping_floor_stays_and_the_rest_falls_with_the_root_of_the_steps():
    """One record in five far away, clipped: its pull is lost for good. 200 runs of 25, 100 and 400 steps.

    Descent comes to rest where the clipped gradients cancel, at ‖∇L‖² = ‖b‖² = 1.75², and the bound comes down to it.
    """
    centres = np.array([[0.0, 0.0]] * 8 + [[10.0, 0.0]] * 2)
    active, start, noise_std = np.array([True, False]), np.array([0.25, 0.0]), 0.3
    bounds, means = [], []
    for steps in (25, 100, 400):
        eta = theory.scheduled_learning_rate(1.0, steps)
        options = {"clip_norm": 1.0, "rate": 0.5, "noise_std": noise_std, "eta": eta, "steps": steps}
        seen = descend(start, lambda theta: theta[:, None, :] - centres, active, runs=200, seed=14, **options)
        bounds.append(
            theory.projected_stationarity(
                gap=0.5 * (0.25 - 2.0) ** 2,
                smoothness=1.0,
                learning_rate=eta,
                steps=steps,
                squared_bias=float(seen["bias"].mean()),
                sampling_variance=1.0**2 / 5,  # C²/B, whatever the records
                active=1,
                noise_std=noise_std,
            )
        )
        assert seen["sampling"].max() < 1.0**2 / 5
        mean, error = mean_and_error(seen["projected"].mean(0))
        means.append(mean)
        assert mean - ERRORS * error < bounds[-1].total
    for slow, fast in itertools.pairwise(bounds):
        assert fast.vanishing == pytest.approx(slow.vanishing / 2)
        assert fast.floor == pytest.approx(slow.floor, rel=0.01) == pytest.approx(1.75**2, rel=0.01)
    assert min(means) > 0.99 * 1.75**2
    assert [round(bound.total / mean, 1) for bound, mean in zip(bounds, means, strict=True)] == [1.2, 1.1, 1.1]


def test_at_a_fixed_budget_the_noise_term_does_not_vanish():
    """ε = 2 at q = 0.01: from 2,000 to 32,000 steps the term grows 2.6 times, on its way to 4."""
    bounds = []
    for steps in (2000, 32_000):
        sigma = noise_for(2.0, 1e-5, "rdp", Segment(0.0, 0.01, steps))
        eta = theory.scheduled_learning_rate(1.0, steps)
        bound = theory.projected_stationarity(
            gap=1.0,
            smoothness=1.0,
            learning_rate=eta,
            steps=steps,
            squared_bias=0.0,
            sampling_variance=0.0,
            active=100,
            noise_std=sigma / 500,
        )
        bounds.append(bound)
    assert bounds[1].progress == pytest.approx(bounds[0].progress / 4)
    assert 2 < bounds[1].noise / bounds[0].noise < 4


def test_a_support_that_beats_random_can_still_have_the_worse_bound():
    """ρ̄ < α_T makes the noise term smaller, and every other term larger."""
    dense = Bound(progress=1.0, clipping_bias=0.2, sampling=0.1, noise=0.4)
    sparse = theory.full_gradient_stationarity(Bound(1.0, 0.2, 0.1, noise=0.25 * 0.4), capture=0.5)
    assert theory.captures_more_than_random(0.5, 0.25) and not theory.captures_more_than_random(0.25, 0.25)
    assert sparse == Bound(2.0, 0.4, 0.2, 0.2)
    assert sparse.noise < dense.noise and sparse.total > dense.total
    assert dense.total == pytest.approx(dense.vanishing + dense.floor) == pytest.approx(1.7)
    assert dense.floor == dense.clipping_bias


def test_energy_capture_is_a_ratio_of_sums():
    assert theory.energy_capture([[9.0, 0.0], [0.0, 1.0]], [[9.0, 1.0], [9.0, 1.0]]) == 0.5
    assert theory.energy_capture([0.0], [0.0]) == 1.0 and theory.energy_capture([0.0], [2.0]) == 0.0


def test_a_learning_rate_above_one_over_smoothness_is_refused():
    known = {"gap": 1.0, "squared_bias": 0.0, "sampling_variance": 0.0, "active": 1, "noise_std": 0.1}
    with pytest.raises(Refusal, match="learning_rate is 0.6"):
        theory.projected_stationarity(smoothness=2.0, learning_rate=0.6, steps=10, **known)
    with pytest.raises(Refusal, match="capture is 0"):
        theory.full_gradient_stationarity(Bound(1.0, 0.0, 0.0, 0.0), 0.0)
