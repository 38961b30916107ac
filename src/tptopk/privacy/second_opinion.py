"""ε a second time, from numpy and scipy alone: what a verifier holds against the first accountant's number.

One step compares P = (1 − q)·N(0, σ²) + q·N(1, σ²) with Q = N(0, σ²). Its privacy loss ℓ = log P/Q is put on the grid
of multiples of a width h, the losses of all steps are added by FFT, and ε is read off the hockey-stick integral
δ(ε) = E[(1 − e^(ε − ℓ))₊]. Every approximation along the way errs towards a larger ε:

==============  =====================================================================================
grid            the mass between two grid points is split onto the two so that both P's and Q's mass are kept. The
                split pair tells P and Q apart at least as well as the true one, which is got back by merging
                (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022), and no mean drifts with the number of steps
tails           the mass above the grid is an infinite loss, the mass below it lies on the lowest point
FFT             masses are first tilted by e^(θℓ), which centres their sum near ε, so that rounding is small beside δ
                and not beside 1; a bound on it is added to δ
wrap-around     what lies above the window weighs at most E[e^(θℓ)]·e^(−θ·top), by Chernoff, and is added to δ; what
                wraps from below only adds to δ
==============  =====================================================================================

As each h gives an upper bound, h is halved until that no longer helps. Two closed bounds stand behind it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy import fft, optimize, special  # type: ignore[import-untyped]

from tptopk.privacy.refusal import Refusal

if TYPE_CHECKING:  # nothing of the first accountant is run
    from tptopk.privacy.accounting import Segment

Array = np.ndarray[Any, np.dtype[np.float64]]

RELATIVE, ABSOLUTE = 1e-3, 1e-4  # halving h stops when it gains less; what is left to gain is about a third of that
TAIL = 1e-6  # share of δ that all steps' tails may take, and again what lies above the window
POINTS = 2**21  # longest grid or window
LEAST_LOSS, LARGEST_LOSS = 1e-12, 500.0  # one step's, between which floats can tell e^loss from 1 and hold it
LEAST_DELTA = 1e-200  # so that no weight underflows
ROUNDING = 64 * 2.0**-53  # relative error allowed to one value of Φ or of the tilt
ORDERS = (*range(2, 65), *range(72, 257, 8), 320, 384, 512, 768, 1024, 2048, 4096)


class Losses(NamedTuple):
    """The privacy loss of one step on the grid, in one direction, `steps` times."""

    first: int  # the lowest loss is first·h
    logs: Array  # [n], of the masses on first·h, (first + 1)·h, …
    infinite: float  # mass on an infinite loss
    steps: int


def epsilon(segments: Sequence[Segment], delta: float) -> float:
    """An upper bound on ε of all segments composed, at the given δ; within about 1% or 0.01 of the least one.

    Formal guarantees: the composed Poisson-subsampled Gaussian mechanisms of sensitivity 1, with noise, rate and count
    fixed beforehand, are (ε, δ)-DP under add/remove adjacency, both directions included.

    ===================================  ============================================================
    no steps, rate 0 or infinite noise   cost nothing
    zero noise                           infinity
    one step can lose more than 500      a closed bound, looser: Rényi DP or the Gaussian without sampling
    at most 1e-12, or δ is below 1e-200  the same
    a rate, count or δ out of range      refused
    ===================================  ============================================================
    """
    if not 0 < delta < 1:
        raise Refusal(f"delta is {delta!r}; it must be above 0 and below 1")
    merged = _merged(segments)
    if not merged:
        return 0.0
    if any(sigma == 0 for sigma, _ in merged):
        return math.inf
    best = min(_gaussian_epsilon(merged, delta), _renyi_epsilon(merged, delta))
    reach = -float(special.ndtri(TAIL * delta / sum(merged.values())))  # in standard deviations
    ranges = [_range(sigma, rate, reach) for sigma, rate in merged]
    largest = max(max(-low, high) for low, high in ranges)
    if not (0 < best < math.inf and LEAST_LOSS < largest <= LARGEST_LOSS and delta > LEAST_DELTA):
        return best
    h, before = min(best / 32, largest / 4), math.inf
    while 2 * largest / h < POINTS:
        both = [
            _losses(sigma, rate, steps, h, *bounds)
            for ((sigma, rate), steps), bounds in zip(merged.items(), ranges, strict=True)
        ]
        found = max(_composed_epsilon([pair[way] for pair in both], delta, h) for way in (0, 1))
        best = min(best, found)
        if before - found <= max(RELATIVE * found, ABSOLUTE):  # never so while both are infinite
            break
        h, before = h / 2, found
    return best


def _merged(segments: Sequence[Segment]) -> dict[tuple[float, float], int]:
    """(noise multiplier, sample rate) → steps, of what costs anything: the order of composition does not matter."""
    merged: dict[tuple[float, float], int] = {}
    for sigma, rate, steps in segments:
        if not (sigma >= 0 and 0 <= rate <= 1 and steps >= 0):
            raise Refusal(
                f"{steps!r} steps of noise {sigma!r} and rate {rate!r}: none may be below 0, nor a rate above 1"
            )
        if steps and rate and not math.isinf(sigma):
            key = sigma, rate if rate < 1 - 1e-6 else 1.0  # more sampling never costs less
            merged[key] = merged.get(key, 0) + steps
    return dict(sorted(merged.items()))


def _range(sigma: float, rate: float, reach: float) -> tuple[float, float]:
    """The losses at the outcomes −reach·σ and 1 + reach·σ; with P and Q little lies outside."""
    with np.errstate(divide="ignore", over="ignore"):
        # log(1 − q + q·e^u), u = (2x − 1) / 2σ²
        u = (np.array([-reach * sigma, 1 + reach * sigma]) - 0.5) / sigma / sigma
        low, high = np.logaddexp(np.log1p(-rate), np.log(rate) + u)
    return float(low), float(high)


def _losses(sigma: float, rate: float, steps: int, h: float, low: float, high: float) -> tuple[Losses, Losses]:
    """One step on the grid, for the removal (P against Q) and for the addition (Q against P) of an example."""
    first, last = math.floor(low / h), math.ceil(high / h)
    grid = np.arange(first, last + 1) * h  # [n]
    ratio = np.expm1(grid)  # P/Q − 1
    with np.errstate(divide="ignore", invalid="ignore"):
        u = grid if rate == 1 else np.where(ratio > -rate, np.log1p(ratio / rate), -np.inf)
    at: Array = np.asarray(sigma * u + 0.5 / sigma)  # the outcome over σ; −∞ below log(1 − q), the lowest loss
    other = at - 1 / sigma
    (q0, top0), (q1, top1) = _between(at), _between(other)  # [n − 1] of N(0, σ²) and N(1, σ²)
    p = (1 - rate) * q0 + rate * q1
    share = -math.expm1(-h)

    def excess(edge: Array) -> Array:  # P's mass less what Q's makes at the edge's loss: p − q0·e^edge
        return rate * q1 - q0 * (rate + edge)

    def slip(edge: Array) -> Array:  # bound on its rounding
        return ROUNDING * (rate * top1 + np.abs(rate + edge) * top0)

    # split: up + down = p and up·e^(−grid[i + 1]) + down·e^(−grid[i]) = q0
    up = np.clip((excess(ratio[:-1]) + slip(ratio[:-1])) / share, 0.0, p)
    removal = np.append(p - up, 0.0) + np.insert(up, 0, 0.0)
    removal[0] += (1 - rate) * special.ndtr(at[0]) + rate * special.ndtr(other[0])
    above = (1 - rate) * special.ndtr(-at[-1]) + rate * special.ndtr(-other[-1])

    # the same with P and Q changed, where the loss −grid[i] is above −grid[i + 1]
    up = np.clip((slip(ratio[1:]) - excess(ratio[1:])) * np.exp(-grid[1:]) / share, 0.0, q0)
    addition = np.append(up, 0.0) + np.insert(q0 - up, 0, 0.0)
    addition[-1] += special.ndtr(-at[-1])
    with np.errstate(divide="ignore"):
        return (
            Losses(first, np.log(removal), float(above), steps),
            Losses(-last, np.log(addition[::-1]), float(special.ndtr(at[0])), steps),
        )


def _between(edges: Array) -> tuple[Array, Array]:
    """The standard normal mass between neighbours, as a difference in the nearer tail; and the larger of the two terms."""
    left, right = edges[:-1], edges[1:]
    turned = left > 0
    larger, smaller = special.ndtr(np.where(turned, -left, right)), special.ndtr(np.where(turned, -right, left))
    return np.asarray(larger - smaller), np.asarray(larger)


def _composed_epsilon(parts: Sequence[Losses], delta: float, h: float) -> float:
    """An upper bound on ε of all parts composed; infinite where the window would be too long or h is too wide."""

    def log_moment(theta: float) -> float:  # K(θ) = log E[e^(θ·sum)], of the finite losses
        return sum(s.steps * _tilt(s, theta * h)[1] for s in parts)

    # Chernoff: ε ≤ (K(θ) + log 1/δ) / θ, and the best θ tilts the mean onto that ε. Any θ is valid; a little less serves
    # normal sums as well, and those with a heavy tail, whose ε is far below Chernoff's, better.
    best = optimize.minimize_scalar(
        lambda t: (log_moment(math.exp(t)) - math.log(delta)) / math.exp(t) / h,
        bounds=(math.log(1e-7 / h), math.log(50 / h)),
        method="bounded",
        options={"xatol": 0.05},
    )
    theta = 0.7 * math.exp(best.x)
    tilted = [_tilt(s, theta * h) for s in parts]
    k = sum(s.steps * log for s, (_, log) in zip(parts, tilted, strict=True))
    mean, variance = 0.0, 0.0  # of the tilted sum, in units of h
    for s, (masses, _) in zip(parts, tilted, strict=True):
        at = s.first + np.arange(len(masses), dtype=np.float64)
        centre = float(masses @ at)
        mean += s.steps * centre
        variance += s.steps * float(masses @ (at - centre) ** 2)
    chernoff = (k - math.log(delta)) / theta / h  # ε, in units of h
    top = max(chernoff - math.log(TAIL) / theta / h, 1.0)
    bottom = math.floor(min(mean, chernoff) - 10 * math.sqrt(variance)) - 2
    if not top - bottom < POINTS:
        return math.inf
    n = int(fft.next_fast_len(math.ceil(top - bottom) + 2, real=True))
    masses, rounding = _convolved(parts, [m for m, _ in tilted], theta * h, n)

    # Back from the tilted masses: mass of loss i·h is masses[i mod n]·e^(K − θ·i·h). Where rounding alone is worth δ
    # nothing can be read.
    first = max(0, bottom, math.ceil(chernoff + math.log(rounding) / theta / h))
    index = np.arange(first, bottom + n)
    if not len(index):
        return math.inf
    weight = np.exp(k - theta * h * index)
    real = np.maximum(masses[index % n], 0.0) * weight
    lost = sum(s.steps * s.infinite for s in parts) + weight[-1]
    rise = -np.expm1(-h * np.arange(len(index)))  # 1 − e^(−i·h)

    def hockey_stick(j: int) -> float:  # bound on δ at ε = index[j]·h
        return float(real[j:] @ rise[: len(index) - j] + rounding * weight[j] + lost)

    j = bisect.bisect_left(range(len(index)), True, key=lambda j: hockey_stick(j) <= delta)
    if j == len(index):
        return math.inf
    if j == 0:
        return float(index[0] * h)
    # Between grid points the bound is linear in e^ε, but for the rounding's share, which is convex.
    left, right = hockey_stick(j - 1), hockey_stick(j)
    return float(index[j - 1] * h + math.log1p(math.expm1(h) * (left - delta) / (left - right)))


def _tilt(part: Losses, slope: float) -> tuple[Array, float]:
    """masses·e^(slope·index), scaled to sum to 1, and the log of the scale."""
    exponent = part.logs + slope * np.arange(part.first, part.first + len(part.logs))
    most = float(exponent.max())
    masses = np.exp(exponent - most)
    total = float(masses.sum())
    return masses / total, most + math.log(total)


def _convolved(parts: Sequence[Losses], tilted: Sequence[Array], slope: float, n: int) -> tuple[Array, float]:
    """All parts, each convolved with itself `steps` times, modulo n; and a bound on the sum of all errors.

    Where masses are off by e of themselves, T of them convolved are by T·e. With a transform f off by e at every
    frequency, its power of T is off by T·e·|f|^(T − 1), and the inverse transform by the root of the sum of squares of
    that in total, as n values sum to √n times the root of their sum of squares at most.
    """
    product = np.ones(n // 2 + 1, dtype=np.complex128)
    size = np.ones(n // 2 + 1)  # of the product, at least
    e = 4 * 2.0**-53 * math.log2(n)
    relative = np.full(n // 2 + 1, e)
    rounding = ROUNDING
    for s, masses in zip(parts, tilted, strict=True):
        index = np.arange(s.first, s.first + len(masses))
        rounding += s.steps * (ROUNDING + 2.0**-53 * slope * float(np.abs(index[[0, -1]]).max()))
        f = fft.rfft(np.bincount(index % n, masses, minlength=n))
        product *= f**s.steps
        size *= np.maximum(np.abs(f), e) ** s.steps
        relative += s.steps * e / np.maximum(np.abs(f), e)
    # squares count twice for the other half of the frequencies; twice the rest to spare
    rounding += 2 * math.sqrt(2) * float(np.linalg.norm(size * relative))
    return np.asarray(fft.irfft(product, n)), rounding


def _gaussian_epsilon(merged: dict[tuple[float, float], int], delta: float) -> float:
    """Without sampling: the losses sum to N(s²/2, s²) with s² = Σ T/σ², which is above ε with probability δ at most."""
    s = math.hypot(*(math.sqrt(steps) / sigma for (sigma, _), steps in merged.items()))
    return max(0.0, s * s / 2 - s * float(special.ndtri(delta)))


def _renyi_epsilon(merged: dict[tuple[float, float], int], delta: float) -> float:
    """Rényi DP at whole orders (Mironov, Talwar, Zhang 2019), converted as in Canonne, Kamath, Steinke 2020."""
    best = math.inf
    for alpha in ORDERS:
        k = np.arange(alpha + 1.0)
        choose = special.gammaln(alpha + 1) - special.gammaln(k + 1) - special.gammaln(alpha - k + 1)
        cost = 0.0
        for (sigma, rate), steps in merged.items():
            # (α − 1)·ε_α = log Σ C(α, k) (1 − q)^(α − k) q^k e^((k² − k)/2σ²)
            with np.errstate(over="ignore"):
                terms = (
                    choose + special.xlog1py(alpha - k, -rate) + k * math.log(rate) + (k * k - k) / 2 / sigma / sigma
                )
            cost += steps * (max(0.0, float(special.logsumexp(terms))) / (alpha - 1) + ROUNDING * alpha)
        best = min(best, cost + math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1))
    return max(0.0, best)
