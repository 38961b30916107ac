"""Lower bounds on ε from how well an attacker does, each wrong with probability `error_rate` at most."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats  # type: ignore[import-untyped]

Values: TypeAlias = NDArray[np.float64]


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of μ-GDP at δ, rounded down: δ = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) (Dong, Roth and Su 2022, corollary 2.13)."""

    def delta_at(epsilon: float) -> float:
        first, second = special.log_ndtr(-epsilon / mu + mu / 2), special.log_ndtr(-epsilon / mu - mu / 2)
        return float(np.exp(first) - np.exp(epsilon + second))

    if mu <= 0 or delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_at(high) > delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return low


def gdp_bound(present: Values, absent: Values, delta: float, error_rate: float) -> float:
    """ε(δ) of the least μ-GDP that lets an observation with the record beat one without it this often.

    Formal guarantees: telling (with, without) from (without, with) is two observations, √2·μ-GDP, so
    P[with > without] ≤ Φ(μ/√2) whatever the score and its distribution; the probability is bounded from below by
    Clopper and Pearson on independent pairs. No threshold is needed. Right only for a mechanism that claims μ-GDP,
    as one step without sampling does. Ties count against.
    """
    pairs = min(len(present), len(absent))
    likely = float(_at_least((present[:pairs] > absent[:pairs]).sum(), pairs, error_rate))
    return gaussian_epsilon(math.sqrt(2) * float(special.ndtri(likely)), delta) if likely > 0.5 else 0.0


def clopper_pearson_bound(right: ArrayLike, made: ArrayLike, trials: int, delta: float, error_rate: float) -> Values:
    """A lower bound on ε from independent trials, on each of which a fair coin says whether the record is there.

    Of `trials`, an attacker made a guess of the coin on `made` (where it abstains may depend on the score alone) and
    `right` of them were right.

    Formal guarantees: let g be the probability of a guess and a that a guess is right. A guess "there" has
    probability p with the record and p′ without, one "not there" q′ and q. (ε, δ)-DP makes p ≤ e^ε p′ + δ and
    q ≤ e^ε q′ + δ; added up, a·g ≤ e^ε (1 − a)·g + δ. So e^ε ≥ (a − δ/g)/(1 − a), with Clopper and Pearson's lower
    limits of a, at 99% of the error rate, and of g at the rest.
    """
    right, made = np.asarray(right, dtype=float), np.asarray(made, dtype=float)
    a = _at_least(right, made, 0.99 * error_rate)
    g = np.maximum(_at_least(made, trials, 0.01 * error_rate), 1e-300)
    return np.asarray(np.log(np.maximum(np.maximum(a - delta / g, 0.0) / (1 - a), 1.0)))


def _at_least(hits: ArrayLike, trials: ArrayLike, error_rate: float) -> Values:
    """Clopper and Pearson's lower limit of a probability; 0 where nothing was hit."""
    hits, trials = np.asarray(hits, dtype=float), np.asarray(trials, dtype=float)
    limit = stats.beta.ppf(error_rate, np.maximum(hits, 1e-9), trials - hits + 1)
    return np.where(hits > 0, limit, 0.0)


def one_run_bound(canaries: int, made: int, right: int, delta: float, error_rate: float) -> float:
    """The largest ε that `right` of `made` guesses rule out, rounded down."""
    low, high = 0.0, 1.0
    if one_run_p_value(canaries, made, right, 0.0, delta) >= error_rate:
        return 0.0
    while one_run_p_value(canaries, made, right, high, delta) < error_rate:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        ruled_out = one_run_p_value(canaries, made, right, middle, delta) < error_rate
        low, high = (middle, high) if ruled_out else (low, middle)
    return low


def one_run_p_value(canaries: int, made: int, right: int, epsilon: float, delta: float) -> float:
    """P[at least `right` of `made` guesses are right] under (ε, δ)-DP, from above (Steinke et al. 2023, theorem 5.2).

    β + 2mδ·α with W ~ Binomial(made, e^ε/(1 + e^ε)), β = P[W ≥ right] and α = max over i of P[right > W ≥ right − i]/i.
    """
    chance = float(special.expit(epsilon))
    beta = float(stats.binom.sf(right - 1, made, chance))
    below: Any = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), made, chance))
    alpha = float((below / np.arange(1, right + 1)).max()) if right else 0.0
    return min(1.0, beta + 2 * canaries * delta * alpha)
