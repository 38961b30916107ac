"""What the paper proves about supports and convergence, as functions of plain numbers.

Three groups: one step on a support (signal lost against noise saved), the reliability of warm-up scores, and the
convergence of the phase after the warm-up. Nothing here looks at records or is used in training; G is known only
where a gradient is computed without privacy, after the fact. Throughout ν = σC/B is `noise_std`, and a step's
records are a Poisson sample of rate q among N, divided by B = qN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from tptopk.privacy.refusal import Refusal, check_count, check_number
from tptopk.supports.support import Support

Array = NDArray[np.float64]
RAREST = -690.0  # log of the rarest probability that is simulated; a float ends at −708
EXPONENT = 1 / 8  # the c of the exponential misranking bound: proven, and the largest possible


# One step on a support


def captured_energy(gradient: Mapping[str, Tensor], support: Support) -> tuple[float, float]:
    """‖P_A G‖² and ‖G‖²; their difference is the signal loss ‖P_Ā G‖²."""
    squares = {name: value.detach().double().square() for name, value in gradient.items()}
    captured = sum(float(support.keep(name, value).sum()) for name, value in squares.items())
    return captured, sum(float(value.sum()) for value in squares.values())


def one_step_error(
    lost: float, active: float, noise_std: float, *, clipping_shift: float = 0.0, sampling_variance: float = 0.0
) -> float:
    """E‖g̃ᴬ − G‖² = ‖P_Ā G‖² + kν² + ‖Gᴬ − P_A G‖² + E‖gᴬ − Gᴬ‖², for G the mean of clipped gradients.

    The paper's criterion is the first two terms. They are the whole error only for a full batch in which no record
    is clipped. The third, `clipping_shift`, is there because phase 2 masks before it clips: a record's part of
    Gᴬ = (1/N) Σ clip(m ⊙ g_i) is longer than its part of P_A G wherever its whole gradient would have been clipped.
    The fourth is the `sampling_variance` of the masked records.
    """
    return lost + active * noise_std**2 + clipping_shift + sampling_variance


def restriction_helps(lost: float, frozen: float, noise_std: float) -> bool:
    """The paper's one-step criterion ‖P_Ā G‖² < (d − k) ν²: less signal is lost than noise is saved."""
    return lost < frozen * noise_std**2


def random_support_loss(energy: float, active: int, total: int) -> float:
    """(1 − ρ)‖G‖², the expected signal loss of a uniformly random support, with ρ = k/d after rounding k to a whole."""
    check_count("total", total)
    check_count("active", active, least=0)
    if active > total:
        raise Refusal(f"active is {active}, of {total} coordinates; it must be at most {total}")
    return (1 - active / total) * energy


def sampling_variance(norms: ArrayLike, sample_rate: float) -> float:
    """E‖gᴬ − E gᴬ‖² = ((1 − q)/B) · (1/N) Σ ‖ḡ_i‖² of a Poisson batch, from the N norms after clipping.

    This is τ²/B of the paper's variance assumption. It takes the second moment of the records, not their spread
    about the mean: identical records vary too, because the size of a Poisson batch does. As ‖ḡ_i‖ ≤ C, the
    assumption always holds with τ² = C².
    """
    check_number("sample_rate", sample_rate, above=0, most=1)
    squares = np.square(np.asarray(norms, dtype=np.float64))
    if not squares.size:
        raise Refusal("norms is empty; give that of each record")
    return (1 - sample_rate) * float(squares.mean()) / (sample_rate * squares.size)


# The reliability of warm-up scores


class Cumulants(NamedTuple):
    """κ₂, κ₃, κ₄ of each coordinate of a batch's mean; zero in the paper's additive model."""

    second: Array | float = 0.0
    third: Array | float = 0.0
    fourth: Array | float = 0.0


def sampling_cumulants(contributions: ArrayLike, sample_rate: float) -> Cumulants:
    """Cumulants of (1/B) Σ δ_i ḡ_i over a Poisson sample, for clipped contributions ḡ of shape [N, …]."""
    check_number("sample_rate", sample_rate, above=0, most=1)
    shares = np.asarray(contributions, dtype=np.float64)
    shares = shares / (sample_rate * len(shares))
    spread = sample_rate * (1 - sample_rate)
    return Cumulants(
        spread * np.sum(shares**2, 0),
        spread * (1 - 2 * sample_rate) * np.sum(shares**3, 0),
        spread * (1 - 6 * spread) * np.sum(shares**4, 0),
    )


def score_mean(signal: ArrayLike, sampling: Cumulants | None = None) -> Array:
    """E a_p = G_p² + κ₂.

    The paper's lemma, E a_p = G_p², leaves sampling out. On Poisson batches the score estimates signal plus sampling
    variance, κ₂ = ((1 − q)/B) (1/N) Σ ḡ²_{i,p}, which more steps do not take away. Where G moves during the warm-up,
    read G_p² as its mean over the steps. The mean is over all runs: of the coordinates that a run's own top k chose,
    the scores lie above the signal, so that a support's energy is to be estimated from steps that did not choose it.
    """
    return np.square(np.asarray(signal, dtype=np.float64)) + (sampling or Cumulants()).second


def score_variance(signal: ArrayLike, noise_std: float, steps: int, sampling: Cumulants | None = None) -> Array:
    """Var a_p = (2(ν² + κ₂)² + 4G_p²(ν² + κ₂) + 4G_p κ₃ + κ₄) / T₁; without sampling (2ν⁴ + 4ν²G_p²)/T₁."""
    check_count("steps", steps)
    g, (second, third, fourth) = np.asarray(signal, dtype=np.float64), sampling or Cumulants()
    spread = noise_std**2 + second
    return np.asarray((2 * spread**2 + 4 * g**2 * spread + 4 * g * third + fourth) / steps)


def misranking_chebyshev(stronger: ArrayLike, weaker: ArrayLike, noise_std: float, steps: int) -> Array:
    """Pr[a_p < a_q] ≤ (4ν⁴ + 4ν²(G_p² + G_q²)) / (T₁(G_p² − G_q²)²), at most 1, where G_p² > G_q².

    This and the other misranking bounds are of the additive model: G fixed, noise the only randomness. On Poisson
    batches scores settle on the order of G² + κ₂ instead (`score_mean`).
    """
    check_count("steps", steps)
    spread, gap = _spread_and_gap(stronger, weaker, noise_std)
    return _bound_where(gap > 0, lambda: 4 * spread / (steps * gap**2))


def misranking_exponential(
    stronger: ArrayLike, weaker: ArrayLike, noise_std: float, steps: int, constant: float = EXPONENT
) -> Array:
    """Pr[a_p < a_q] ≤ exp(−c T₁ (G_p² − G_q²)² / (ν⁴ + ν²(G_p² + G_q²))) with c = 1/8.

    The paper leaves c open and takes the minimum with a second, linear term; neither is needed. With u = G_p²/ν²,
    v = G_q²/ν², Δ = u − v and S = u + v, Chernoff's bound at 0 < x < 1 has, for each step, the exponent
    ½ log(1 − x²) + (xΔ − x²S) / (2(1 − x²)) ≥ (xΔ − x²(1 + S)) / 2, which is Δ²/(8(1 + S)) at x = Δ/(2(1 + S)).
    No larger c holds: for small Δ and many steps the scores' difference is normal with just that exponent.
    """
    check_count("steps", steps)
    spread, gap = _spread_and_gap(stronger, weaker, noise_std)
    return _bound_where(gap > 0, lambda: np.exp(-constant * steps * gap**2 / spread))


def misranking_chernoff(stronger: ArrayLike, weaker: ArrayLike, noise_std: float, steps: int) -> Array:
    """The exponential bound at its best x for each pair: its exponent is exact as T₁ grows."""
    check_count("steps", steps)
    u, v = _in_noise(stronger, weaker, noise_std)
    return np.exp(steps * _log_moment(_best_tilt(u, v), u, v))


def simulated_misranking(
    stronger: float, weaker: float, noise_std: float, steps: int, draws: int, generator: np.random.Generator
) -> tuple[float, float]:
    """Pr[a_p < a_q] in the additive model and the estimate's standard error, however rare the event.

    Σ_t g̃²_{t,p}/ν² is noncentral χ² with T₁ degrees of freedom. Draws are tilted by exp(−(x/2) Σ_t (g̃²_p − g̃²_q)/ν²)
    with Chernoff's x, under which p and q change places about every second time, and weighed back.
    """
    check_count("steps", steps)
    check_count("draws", draws)
    u, v = map(float, _in_noise(stronger, weaker, noise_std))
    x = float(_best_tilt(u, v))
    exponent = steps * float(_log_moment(x, u, v))
    if exponent < RAREST:
        raise Refusal(
            f"the probability is below exp({exponent:.0f}), too rare for a float; take fewer than {steps} steps, or signals that are "
            "closer together"
        )
    difference = generator.noncentral_chisquare(steps, steps * u / (1 + x), draws) / (1 + x)
    difference -= generator.noncentral_chisquare(steps, steps * v / (1 - x), draws) / (1 - x)
    weights = np.exp(np.minimum(difference, 0) * x / 2 + exponent) * (difference < 0)
    return float(weights.mean()), float(weights.std() / math.sqrt(draws))


def simulated_exponent(
    pairs: Iterable[tuple[float, float]], noise_std: float, steps: int, draws: int, generator: np.random.Generator
) -> float:
    """The c that simulation leaves room for: the least −log Pr[a_p < a_q] · (ν⁴ + ν²(G_p² + G_q²)) / (T₁(G_p² − G_q²)²)."""
    found = []
    check_count("steps", steps)
    for stronger, weaker in pairs:
        spread, gap = _spread_and_gap(stronger, weaker, noise_std)
        probability, _ = simulated_misranking(stronger, weaker, noise_std, steps, draws, generator)
        if probability == 0:
            raise Refusal(f"in none of {draws} draws was {stronger:g} ranked below {weaker:g}; take more draws")
        found.append(-math.log(probability) * float(spread) / (steps * float(gap) ** 2))
    return min(found)


def recovery_failure(
    signal: ArrayLike,
    active: int,
    noise_std: float,
    steps: int,
    pair: Callable[[Any, Any, float, int], Array] = misranking_exponential,
) -> float:
    """Pr[TopK(a, k) ≠ TopK(G², k)] ≤ Σ over p inside, q outside of the pair's misranking bound, at most 1.

    k(d − k) pairs, each with its own gap. A tie at the boundary leaves nothing to recover and gives 1.
    """
    strengths = np.sort(np.abs(np.asarray(signal, dtype=np.float64)).ravel())[::-1]
    check_count("active", active, least=0)
    if active > len(strengths):
        raise Refusal(f"active is {active}, of {len(strengths)} coordinates; it must be at most {len(strengths)}")
    outside = strengths[active:]
    if 0 < active < len(strengths) and strengths[active - 1] == outside[0]:
        return 1.0
    return min(1.0, float(sum(np.sum(pair(inside, outside, noise_std, steps)) for inside in strengths[:active])))


def _in_noise(stronger: ArrayLike, weaker: ArrayLike, noise_std: float) -> tuple[Array, Array]:
    """G_p²/ν² and G_q²/ν²."""
    check_number("noise_std", noise_std, above=0)
    p, q = np.asarray(stronger, dtype=np.float64), np.asarray(weaker, dtype=np.float64)
    return np.square(p / noise_std), np.square(q / noise_std)


def _spread_and_gap(stronger: ArrayLike, weaker: ArrayLike, noise_std: float) -> tuple[Array, Array]:
    """ν⁴ + ν²(G_p² + G_q²), a quarter of the variance of one step's a_p − a_q, and G_p² − G_q², in units in which the largest of the
    three is 1: bounds are made of the first over the second's square, which has no unit."""
    check_number("noise_std", noise_std, least=0)
    p, q = np.abs(np.asarray(stronger, dtype=np.float64)), np.abs(np.asarray(weaker, dtype=np.float64))
    unit = np.maximum(np.maximum(p, q), noise_std)
    unit = np.where(unit > 0, unit, 1.0)
    p, q, noise = p / unit, q / unit, noise_std / unit
    return noise**4 + noise**2 * (p**2 + q**2), (p - q) * (p + q)


def _bound_where(applies: Array | np.bool_ | NDArray[np.bool_], bound: Callable[[], Array]) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(applies, np.minimum(1.0, bound()), 1.0)


def _log_moment(x: Array | float, u: Array | float, v: Array | float) -> Array:
    """log E exp(−(x/2)(g̃²_p − g̃²_q)/ν²) of one step."""
    return np.asarray(-0.5 * (np.log1p(-x) + np.log1p(x)) - 0.5 * x * (u / (1 + x) - v / (1 - x)))


def _best_tilt(u: Array | float, v: Array | float) -> Array:
    """The x at which the log-moment is least: where tilting makes both squares equally large on average."""
    u, v = np.broadcast_arrays(u, v)
    for p, q in zip(u[~(u > v)], v[~(u > v)], strict=True):
        raise Refusal(f"the squared signals are {p:g}ν² and {q:g}ν²; the first must be the larger")
    low, high = np.zeros(u.shape), np.ones(u.shape)
    for _ in range(80):
        x = (low + high) / 2
        with np.errstate(divide="ignore", invalid="ignore"):  # x = 1 is too high
            more = 1 / (1 + x) + u / (1 + x) ** 2 > 1 / (1 - x) + v / (1 - x) ** 2
        low, high = np.where(more, x, low), np.where(more, high, x)
    return low


# Convergence of the phase after the warm-up


@dataclass(frozen=True)
class Bound:
    """A bound on the mean squared gradient norm of a trajectory, by its four causes."""

    progress: float  # 2(L₀ − L*)/(ηT₂)
    clipping_bias: float  # (1/T₂) Σ_t E‖b_t‖²
    sampling: float  # βη τ²/B
    noise: float  # βη k̄ν²

    @property
    def total(self) -> float:
        return self.vanishing + self.floor

    @property
    def vanishing(self) -> float:
        """What η = 1/(β√T₂) sends to zero as T₂^(−1/2)."""
        return self.progress + self.sampling + self.noise

    @property
    def floor(self) -> float:
        """What no number of steps and no learning rate takes away."""
        return self.clipping_bias


def clipping_residual(norms: ArrayLike, clip_norm: float) -> float:
    """‖b‖ ≤ (1/N) Σ (‖g_i‖ − C)₊ for the bias b of clipping, from the norms of the N masked gradients.

    Equality where all clipped gradients point the same way. Where they point in all directions b may be zero though
    every gradient is clipped: a positive residual does not prove a bias.
    """
    return float(np.maximum(np.asarray(norms, dtype=np.float64) - clip_norm, 0.0).mean())


def projected_stationarity(
    *,
    gap: float,
    smoothness: float,
    learning_rate: float,
    steps: int,
    squared_bias: float,
    sampling_variance: float,
    active: float,
    noise_std: float,
) -> Bound:
    """(1/T₂) Σ_t E‖P_t ∇L(θ_t)‖² ≤ 2(L₀ − L*)/(ηT₂) + (1/T₂) Σ_t E‖b_t‖² + βη(τ²/B + k̄ν²), for η ≤ 1/β.

    `gap` is L₀ − L*; with one fixed support L* may be the least loss among θ that differ from θ₀ on the support alone,
    which is the tighter bound. `squared_bias` is the mean of ‖b_t‖², or of squared `clipping_residual`s above it.
    β = `smoothness` holds for L on the whole space, ∇L is not clipped, and no support looks at its own step's batch.
    At η = 1/β all four terms are tight: L = β‖θ‖²/2 attains them but for what loss is left after the last step.
    """
    check_number("smoothness", smoothness, above=0)
    check_number("learning_rate", learning_rate, above=0, most=1 / smoothness)
    check_count("steps", steps)
    for name, value in (
        ("gap", gap),
        ("squared_bias", squared_bias),
        ("sampling_variance", sampling_variance),
        ("active", active),
        ("noise_std", noise_std),
    ):
        check_number(name, value, least=0)
    curvature = smoothness * learning_rate
    return Bound(
        progress=2 * gap / (learning_rate * steps),
        clipping_bias=squared_bias,
        sampling=curvature * sampling_variance,
        noise=curvature * active * noise_std**2,
    )


def scheduled_learning_rate(smoothness: float, steps: int) -> float:
    """η = 1/(β√T₂), at which every term but the clipping bias falls as T₂^(−1/2), for a noise that stays the same.

    At a fixed ε it does not: σ₂² grows with T₂ in the end, and the noise term with √T₂.
    """
    check_number("smoothness", smoothness, above=0)
    check_count("steps", steps)
    return 1 / (smoothness * math.sqrt(steps))


def energy_capture(projected: ArrayLike, full: ArrayLike) -> float:
    """α_T = Σ ‖P_t ∇L(θ_t)‖² / Σ ‖∇L(θ_t)‖² over steps and runs; 1 where all gradients are zero.

    A ratio of sums: steps with large gradients count for more. Both must be of the true gradient; private scores
    that also chose the support overstate α_T (`score_mean`).
    """
    kept, whole = np.asarray(projected, dtype=np.float64), np.asarray(full, dtype=np.float64)
    if kept.shape != whole.shape:
        raise Refusal(f"projected has shape {kept.shape} and full {whole.shape}; give both for the same steps")
    if not bool(((kept >= 0) & (kept <= whole * (1 + 1e-9))).all()):  # but for what rounding adds
        raise Refusal(
            "projected holds energies that are negative, larger than those of full or no numbers; it is a part of them"
        )
    energy = float(whole.sum())
    return float(np.minimum(1.0, kept.sum() / energy)) if energy else 1.0


def captures_more_than_random(capture: float, active_ratio: float) -> bool:
    """ρ̄ < α_T: the support holds more energy than its share of coordinates, as a random one would on average.

    At equal ν² this makes the noise term of `full_gradient_stationarity`, βη k̄ν²/α_T, smaller than βη dν² of dense
    training. It is not enough for a smaller total: progress, clipping bias and sampling are divided by α_T as well.
    """
    return active_ratio < capture


def full_gradient_stationarity(bound: Bound, capture: float) -> Bound:
    """(1/T₂) Σ_t E‖∇L(θ_t)‖² ≤ the projected bound / α_T, every term of it.

    α_T = 0 is refused: the support misses the gradient entirely, and nothing bounds what it misses.
    """
    check_number("capture", capture, above=0, most=1)
    return Bound(
        bound.progress / capture, bound.clipping_bias / capture, bound.sampling / capture, bound.noise / capture
    )
