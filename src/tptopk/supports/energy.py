"""How much of the signal a support keeps, estimated from a private warm-up without bias, and how sure that is.

The warm-up's steps lie in four parts. A support is chosen by the scores of two parts and its signal energy is the inner
product, on it, of the other two parts' mean gradients, averaged over all six ways to do so:

    E(S) = (1/6) Σ_{C<D} ⟨m_C, m_D⟩ on S(the two other parts),        α(ρ) = E(S_ρ) / E(everything).

Noise and Poisson samples of different steps are independent, so neither the energy that sampling adds to a score nor
the luck of the chosen coordinates is in it. With v = ν₁²/T_C the variance of a part's mean on one coordinate, and λ the
variance of a step's sample along the gradient, Var E(S) = (1/36) Σ_{C<D} k v_C v_D + E(S) Σ_C (v_C + λ/T_C)/4, and small
mixed terms. Intervals invert the normal test of E(S) − α E = 0.

What training uses is a support ranked by the whole warm-up, which keeps more than one ranked by half of it. How much more cannot be
measured, as no step is left to judge by; but rankings by a quarter can be judged in the same way. Where what a ranking holds beyond
chance grows no faster than the steps it is made of, the second doubling adds at most twice what the first did: the upper end of α's
interval is raised by twice the growth from a quarter to a half, at its own upper end. That is an extrapolation, and no bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tptopk.privacy.plan import Plan
from tptopk.supports.scores import SCORES
from tptopk.supports.warmup import PARTS, WarmUp

Array = NDArray[np.float64]


class Interval(NamedTuple):
    estimate: float
    low: float
    high: float


class Variance(NamedTuple):
    """Var Σ_p w_p ĝ_p = noise·Σw² + mixed + slope·Σ w² G_p², for the estimate ĝ_p of G_p²."""

    noise: float
    mixed: float
    slope: float

    def std(self, coordinates: Array | float, energy: Array | float) -> Array:
        """For weights of at most 1 with Σw² = `coordinates` and Σ w² G_p² = `energy`."""
        return np.sqrt(self.noise * coordinates + self.mixed + self.slope * np.maximum(energy, 0.0))


class Grown(NamedTuple):
    """E(S ranked by two parts) − E(S ranked by one of them), and Σw² of its weights."""

    energy: float
    coordinates: float


class Energies(NamedTuple):
    """What the warm-up says of signal on the best k coordinates by each score, averaged over the six ways."""

    kept: dict[str, list[float]]  # by score, for each k: E(S)
    grown: dict[str, list[Grown]]  # by score, for each k: how much less a ranking by one part keeps
    scored: dict[str, list[float]]  # by score, for each k: Σ_S of the raw scores of the two parts that did not choose S
    ranked: dict[str, float]  # by score: Σ_p ĝ_p·(share of coordinates ranked no higher than p)
    whole: float  # E(everything)


@torch.no_grad()
def energies(warmup: WarmUp, counts: Sequence[int]) -> Energies:
    folds = list(combinations(range(PARTS), 2))
    means = [_flat(warmup.mean(part)) for part in range(PARTS)]
    kept = {score: [0.0] * len(counts) for score in SCORES}
    scored = {score: [0.0] * len(counts) for score in SCORES}
    grown = {score: [Grown(0.0, 0.0)] * len(counts) for score in SCORES}
    ranked = dict.fromkeys(SCORES, 0.0)
    whole = 0.0
    alone = {
        score: [_ranks(_order(rank(warmup.scores([part])))) for part in range(PARTS)] for score, rank in SCORES.items()
    }
    for pair in folds:
        product = (means[pair[0]] * means[pair[1]]).double() / len(folds)
        whole += float(product.sum())
        judged = _flat(warmup.scores(pair)).double() / len(folds)
        rankers = [part for part in range(PARTS) if part not in pair]
        raw = warmup.scores(rankers)
        for score, rank in SCORES.items():
            order = _order(rank(raw))
            running, sampled = product[order].cumsum(0), judged[order].cumsum(0)
            ranks = [_ranks(order), *(alone[score][part] for part in rankers)]
            for place, k in enumerate(counts):
                kept[score][place] += float(running[k - 1])
                scored[score][place] += float(sampled[k - 1])
                both, *each = ((found < k).double() for found in ranks)
                more, before = both - sum(each) / len(each), grown[score][place]
                grown[score][place] = Grown(
                    before.energy + float((more * product).sum()),
                    before.coordinates + float(more.square().sum()) / len(folds),
                )
            ranked[score] += float(running.mean())  # = Σ_p ĝ_p (d − rank_p + 1)/d
    return Energies(kept, grown, scored, ranked, whole)


def _order(scores: dict[str, Tensor]) -> Tensor:
    """Coordinates from the highest score down; ties in flat order, as `top_k` breaks them."""
    return torch.sort(_flat(scores), descending=True, stable=True).indices


def _ranks(order: Tensor) -> Tensor:
    return torch.empty(len(order), dtype=torch.int32).index_copy_(0, order, torch.arange(len(order), dtype=torch.int32))


def _flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1).cpu() for value in values.values()])


def sampling_energy(plan: Plan, phase: int = 0) -> float:
    """(1 − q)C²/B: the most that Poisson sampling can add to the expected squared norm of one step."""
    numbers = plan.phases[phase]
    return (1 - numbers.sample_rate) * numbers.clip_norm**2 / plan.expected_batch_size(numbers)


def variance_of(warmup: WarmUp, energy: float) -> Variance:
    """The noise's own part is known; the part of the samples along the gradient is measured, and bounded."""
    parts = [(warmup.noise_std**2 / count, sampling_energy(warmup.plan) / count) for count in warmup.counts]
    noise = sum(v * w for (v, _), (w, _) in combinations(parts, 2)) / 36
    mixed = sum(v * t + w * s + s * t for (v, s), (w, t) in combinations(parts, 2)) / 36
    along = _variance_along(warmup, energy)
    return Variance(
        noise, mixed, sum(v + along / count for (v, _), count in zip(parts, warmup.counts, strict=True)) / 4
    )


def _variance_along(warmup: WarmUp, energy: float) -> float:
    """An upper estimate of the variance of a step's sample along the mean gradient, at most (1 − q)C²/B.

    From successive differences of the private gradients along the sum of those before them, in the warm-up's second
    half, less ν₁². That sum points along the gradient but in part, so the rest is divided by its squared cosine.
    """
    most, noise = sampling_energy(warmup.plan), warmup.noise_std**2
    late = np.diff(np.asarray(warmup.along[warmup.steps // 2 :]))
    if len(late) < 4 or energy <= 0:
        return most
    seen = 0.5 * float(np.mean(late**2)) * (1 + 2 * math.sqrt(3 / len(late)))  # differences overlap: 3/n, not 2/n
    cosine = energy / (energy + warmup.total * noise / (0.75 * warmup.steps))
    return min(most, max(0.0, seen - noise) / cosine)


def share_kept(energy: float, whole: float, k: int, total: int, variance: Variance, sure: float) -> Interval:
    """α with its interval; everything is everything, however little that is."""
    if k == total:
        return Interval(1.0, 1.0, 1.0)

    def std(a: Array) -> Array:
        inside, outside = (1 - a) ** 2, a**2
        lost = max(whole - energy, 0.0)
        return variance.std(inside * k + outside * (total - k), inside * max(energy, 0.0) + outside * lost)

    return fieller(energy, whole, std, sure)


def share_kept_by_all(
    kept: Interval, grown: Grown, whole: float, k: int, total: int, variance: Variance, sure: float
) -> Interval:
    """`share_kept` with its upper end raised to that of a ranking by the whole warm-up."""
    if k == total or whole <= 0:
        return kept
    most = grown.energy + sure * float(variance.std(grown.coordinates, abs(grown.energy)))
    return kept._replace(high=min(1.0, kept.high + 2 * max(0.0, most / whole)))


def fieller(part: float, whole: float, std: Callable[[Array], Array], sure: float) -> Interval:
    """All a in [0, 1] for which part − a·whole is within `sure` standard deviations of zero (Fieller's interval)."""
    shares = np.linspace(0, 1, 1001)
    errors = sure * std(shares)
    accepted = shares[np.abs(part - shares * whole) <= errors]
    estimate = min(1.0, max(0.0, part / whole)) if whole > 0 else 0.5
    if whole <= errors[-1] or not len(accepted):
        return Interval(estimate, 0.0, 1.0)
    return Interval(estimate, min(estimate, float(accepted[0])), max(estimate, float(accepted[-1])))
