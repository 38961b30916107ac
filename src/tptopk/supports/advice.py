"""When do fewer coordinates suffice? An answer from a private warm-up, at no further privacy cost.

The estimate. The warm-up's steps lie in four parts. A support is chosen by the scores of two parts and its signal
energy is the inner product, on it, of the other two parts' mean gradients, averaged over all six ways to do so:

    E(S) = (1/6) Σ_{C<D} ⟨m_C, m_D⟩ on S(the two other parts),        α(ρ) = E(S_ρ) / E(everything).

Noise and Poisson samples of different steps are independent, so neither the energy that sampling adds to a score nor
the luck of the chosen coordinates is in it. With v = ν₁²/T_C the variance of a part's mean on one coordinate, and λ the
variance of a step's sample along the gradient, Var E(S) = (1/36) Σ_{C<D} k v_C v_D + E(S) Σ_C (v_C + λ/T_C)/4, and small
mixed terms. Intervals invert the normal test of E(S) − α E = 0. A support ranked by the whole warm-up keeps no less.

The verdict. Over a phase of T₂ steps at its best learning rate, both the paper's stationarity bound and the quadratic
model of the loss make progress in proportion to E²/(E + noise/n), where n counts the steps over which noise averages out.
On a loss of curvature β that is 1/(ηβ): the paper's schedule η = 1/(β√T₂) makes it √T₂, and in the bound itself, which
counts every step's noise in full, it is 1. Restriction multiplies progress by

    gain_n(ρ) = α² (E + (dν₂² + τ²)/n) / (αE + (kν₂² + τ²)/n),        τ² ≤ (1 − q₂) C₂²/B,

so a random support (α = ρ) never gains, and none does where noise is small. That takes the loss to bend equally in all
coordinates. Where it is flat noise costs nothing, and leaving it out gains nothing; and it tends to be flat where records
have small gradients. How much of the records' gradients lies outside a support can be seen: their Poisson samples add
that share of (1 − q)C²/B to the scores there. "Restrict" counts only that share b of the noise as saved, dν₂²(1 − b) in
place of kν₂², and needs a gain of 5% at n = √T₂ at the lower end of an interval wide enough to hold for all supports
together. "Stay dense" needs less than 5% for every support at n = 1, kν₂² and the favourable ends; as it must hold for each
of them, it needs no wider intervals. E is of the gradient as it moved under the warm-up's own learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tptopk.privacy.plan import Plan, active_of
from tptopk.privacy.refusal import Refusal, check_number
from tptopk.supports.scores import SCORES
from tptopk.supports.warmup import PARTS, WarmUp

Array = NDArray[np.float64]
RATIOS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05, 0.02, 0.01)
FEWEST_STEPS = 8  # two a part
LEVEL = 0.95
MARGIN = 0.05  # a gain of less is no reason to change anything


class Interval(NamedTuple):
    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Candidate:
    """One support: so many coordinates, ranked by one score."""

    score: str
    active_ratio: float  # k/d
    active: int  # k
    energy: float  # E(S), without bias; may be negative
    kept: Interval  # α, at the stated level
    outside: float  # share of the records' own gradients that lies outside, at least
    gain: Interval  # progress over that of dense training: at n = √T₂, at worst and at best


@dataclass(frozen=True)
class Advice:
    """What a warm-up says about restriction, and how sure that is."""

    verdict: str  # "restrict", "stay dense" or "cannot tell"
    reasons: tuple[str, ...]
    active_ratio: float | None  # where the verdict is to restrict
    score: str | None
    learning_rate: tuple[float, float] | None  # factor on phase 2's rate, at n = √T₂ and n = 1
    candidates: tuple[Candidate, ...]
    misranking: dict[str, Interval]  # by score; 0.5 is a coin
    signal: Interval  # E(everything): the energy of the mean gradient
    step_energy: tuple[float, float]  # bracket of the mean energy of a step's gradient, sampling taken off
    sampling_energy: float  # what Poisson sampling adds to a step at most
    noise_energy: float  # dν₂²
    coordinates: int
    warmup_steps: int
    steps: int  # T₂
    level: float

    def as_values(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **asdict(self),
            "signal": self.signal._asdict(),
            "misranking": {score: interval._asdict() for score, interval in self.misranking.items()},
            "candidates": [
                {
                    **asdict(c),
                    "lost": 1 - c.kept.estimate,
                    "noise_saved": 1 - c.active_ratio,
                    "kept": c.kept._asdict(),
                    "gain": c.gain._asdict(),
                }
                for c in self.candidates
            ],
        }


class Spread(NamedTuple):
    """Var Σ_p w_p ĝ_p = noise·Σw² + mixed + slope·Σ w² G_p², for the estimate ĝ_p of G_p²."""

    noise: float
    mixed: float
    slope: float

    def std(self, coordinates: Array | float, energy: Array | float) -> Array:
        """For weights of at most 1 with Σw² = `coordinates` and Σ w² G_p² = `energy`."""
        return np.sqrt(self.noise * coordinates + self.mixed + self.slope * np.maximum(energy, 0.0))


def advise(
    warmup: WarmUp, *, plan: Plan | None = None, ratios: Sequence[float] | None = None, level: float = LEVEL
) -> Advice:
    """Signal kept, reliability of the ranking and a recommendation for the phase that follows the warm-up.

    `plan` is the one that is to follow, the warm-up's own unless given: σ₂, q₂ and T₂ are read from it and never
    changed. `ratios` are the active ratios to look at, `RATIOS` unless given. Formal guarantees: a function of private gradients and public numbers alone, so it costs nothing.
    """
    plan = plan or warmup.plan
    check_level(level)
    if len(plan.phases) < 2:
        raise Refusal(f"advice is about the phase after a warm-up, and this plan of {plan.method} has one phase alone")
    if not warmup.complete or warmup.steps < FEWEST_STEPS:
        raise Refusal(
            f"the warm-up has {warmup.steps} of {warmup.plan.phases[0].steps} steps; advice needs all of them, and at "
            f"least {FEWEST_STEPS}"
        )
    total = warmup.total
    counts = looked_at(ratios, total)
    energies, scored, weighted, whole = _energies(warmup, counts)
    spread = _spread(warmup, whole)
    sure = NormalDist().inv_cdf((1 + level) / 2)
    surer = NormalDist().inv_cdf(
        1 - (1 - level) / max(1, len(SCORES) * sum(k < total for k in counts))
    )  # all at once, one side
    phase = _Phase.of(plan, warmup, total)
    deviation = float(spread.std(total, whole))
    signal = Interval(whole, whole - sure * deviation, whole + sure * deviation)
    candidates = []
    added = _sampling_energy(warmup.plan)
    score_energy = sum(float(value.double().sum()) for value in warmup.scores().values())
    score_error = warmup.noise_std**2 * math.sqrt(2 / warmup.steps)  # times √coordinates
    transient = max(0.0, score_energy - whole - added)  # more than sampling can add: signal that did not last
    for score, of_score in energies.items():
        for k, energy, inside in zip(counts, of_score, scored[score], strict=True):
            spared = ((score_energy - inside) - (whole - energy) - transient) / added if added > 0 else 0.0
            doubt = score_error * math.sqrt(total - k) / added if added > 0 else 0.0
            errors = float(spread.std(k, energy)), float(spread.std(total - k, whole - energy)), doubt
            kept = _share(energy, whole, k, total, spread, sure)
            gain = Interval(
                phase.gain(kept.estimate, whole, k, math.sqrt(phase.steps)),
                phase.sure_gain(energy, whole - energy, spared, k, errors, surer),
                phase.gain(kept.high, signal.low, k, 1, sampled=False),
            )
            outside = min(1 - k / total, max(0.0, spared - surer * doubt))
            candidates.append(Candidate(score, k / total, k, energy, kept, outside, gain))
    wrong = {}
    for score, value in weighted.items():
        right = _ratio(value, whole, lambda a: spread.std(total * (1 / 3 - a + a**2), whole), sure)
        wrong[score] = Interval(1 - right.estimate, 1 - right.high, 1 - right.low)
    unsure = sure * score_error * math.sqrt(total)
    verdict, chosen, reasons = _verdict(candidates, signal, phase, total)
    return Advice(
        verdict=verdict,
        reasons=tuple(reasons),
        active_ratio=chosen.active_ratio if chosen else None,
        score=chosen.score if chosen else None,
        learning_rate=phase.learning_rate(chosen.kept.estimate, whole, chosen.active) if chosen else None,
        candidates=tuple(candidates),
        misranking=wrong,
        signal=signal,
        step_energy=(max(0.0, whole, score_energy - added - unsure), max(0.0, whole, score_energy + unsure)),
        sampling_energy=added,
        noise_energy=total * phase.variance,
        coordinates=total,
        warmup_steps=warmup.steps,
        steps=phase.steps,
        level=level,
    )


def check_level(level: float) -> None:
    check_number("level", level, above=0.5, below=1)


def looked_at(ratios: Sequence[float] | None, total: int) -> list[int]:
    """k for each of the ratios, or for each of `RATIOS` that leaves one; refuses those that are none."""
    if ratios is None:
        return [active_of(ratio, total) for ratio in RATIOS if ratio * total >= 1]
    for ratio in ratios:
        check_number("ratio", ratio, above=0, most=1)
    return [active_of(ratio, total) for ratio in ratios]


@torch.no_grad()
def _energies(
    warmup: WarmUp, counts: Sequence[int]
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float], float]:
    """By score: E(S) and Σ_S a_p for every k, and Σ_p ĝ_p·(share of coordinates ranked below p); and E(everything)."""
    folds = list(combinations(range(PARTS), 2))
    means = [_flat(warmup.mean(part)) for part in range(PARTS)]
    energies = {score: [0.0] * len(counts) for score in SCORES}
    scored = {score: [0.0] * len(counts) for score in SCORES}
    weighted = dict.fromkeys(SCORES, 0.0)
    whole = 0.0
    for pair in folds:
        product = (means[pair[0]] * means[pair[1]]).double() / len(folds)
        whole += float(product.sum())
        judged = _flat(warmup.scores(pair)).double() / len(folds)
        raw = warmup.scores(part for part in range(PARTS) if part not in pair)
        for score, rank in SCORES.items():
            order = torch.sort(_flat(rank(raw)), descending=True, stable=True).indices  # ties in flat order, as top_k
            running, sampled = product[order].cumsum(0), judged[order].cumsum(0)
            for place, k in enumerate(counts):
                energies[score][place] += float(running[k - 1])
                scored[score][place] += float(sampled[k - 1])
            weighted[score] += float(running.mean())  # = Σ_p ĝ_p (d − rank_p + 1)/d
    return energies, scored, weighted, whole


def _flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1).cpu() for value in values.values()])


def _sampling_energy(plan: Plan, phase: int = 0) -> float:
    """(1 − q)C²/B: the most that Poisson sampling can add to the expected squared norm of one step."""
    numbers = plan.phases[phase]
    return (1 - numbers.sample_rate) * numbers.clip_norm**2 / plan.expected_batch_size(numbers)


def _spread(warmup: WarmUp, energy: float) -> Spread:
    """The noise's own part is known; the part of the samples along the gradient is measured, and bounded."""
    parts = [(warmup.noise_std**2 / count, _sampling_energy(warmup.plan) / count) for count in warmup.counts]
    noise = sum(v * w for (v, _), (w, _) in combinations(parts, 2)) / 36
    mixed = sum(v * t + w * s + s * t for (v, s), (w, t) in combinations(parts, 2)) / 36
    along = _variance_along(warmup, energy)
    return Spread(noise, mixed, sum(v + along / count for (v, _), count in zip(parts, warmup.counts, strict=True)) / 4)


def _variance_along(warmup: WarmUp, energy: float) -> float:
    """An upper estimate of the variance of a step's sample along the mean gradient, at most (1 − q)C²/B.

    From successive differences of the private gradients along the sum of those before them, in the warm-up's second
    half, less ν₁². That sum points along the gradient but in part, so the rest is divided by its squared cosine.
    """
    most, noise = _sampling_energy(warmup.plan), warmup.noise_std**2
    late = np.diff(np.asarray(warmup.along[warmup.steps // 2 :]))
    if len(late) < 4 or energy <= 0:
        return most
    seen = 0.5 * float(np.mean(late**2)) * (1 + 2 * math.sqrt(3 / len(late)))  # differences overlap: 3/n, not 2/n
    cosine = energy / (energy + warmup.total * noise / (0.75 * warmup.steps))
    return min(most, max(0.0, seen - noise) / cosine)


def _share(energy: float, whole: float, k: int, total: int, spread: Spread, sure: float) -> Interval:
    """α with its interval; everything is everything, however little that is."""
    if k == total:
        return Interval(1.0, 1.0, 1.0)

    def std(a: Array) -> Array:
        inside, outside = (1 - a) ** 2, a**2
        lost = max(whole - energy, 0.0)
        return spread.std(inside * k + outside * (total - k), inside * max(energy, 0.0) + outside * lost)

    return _ratio(energy, whole, std, sure)


def _ratio(part: float, whole: float, std: Callable[[Array], Array], sure: float) -> Interval:
    """All a in [0, 1] for which part − a·whole is within `sure` standard deviations of zero (Fieller's interval)."""
    shares = np.linspace(0, 1, 1001)
    errors = sure * std(shares)
    accepted = shares[np.abs(part - shares * whole) <= errors]
    estimate = min(1.0, max(0.0, part / whole)) if whole > 0 else 0.5
    if whole <= errors[-1] or not len(accepted):
        return Interval(estimate, 0.0, 1.0)
    return Interval(estimate, min(estimate, float(accepted[0])), max(estimate, float(accepted[-1])))


class _Phase(NamedTuple):
    """The numbers of the phase that is to follow."""

    steps: int
    variance: float  # ν₂²
    sampling: float  # the most that τ²/B can be
    total: int
    shrink: float  # how much another clip norm may change the signal's energy, down and up
    grow: float

    @classmethod
    def of(cls, plan: Plan, warmup: WarmUp, total: int) -> _Phase:
        numbers = plan.phases[1]
        change = (numbers.clip_norm / warmup.plan.phases[0].clip_norm) ** 2
        return cls(
            sum(phase.steps for phase in plan.phases[1:]),
            plan.noise_std(numbers) ** 2,
            _sampling_energy(plan, 1),
            total,
            min(1.0, change),
            max(1.0, change),
        )

    def gain(self, kept: float, signal: float, k: float, n: float, *, sampled: bool = True) -> float:
        """Progress on k coordinates over progress on all, noise averaging out over n steps."""
        if kept <= 0:
            return 0.0
        signal = max(signal, 0.0) * (self.grow if sampled else self.shrink)
        sampling = self.sampling if sampled else 0.0
        dense = signal + (self.total * self.variance + sampling) / n
        return kept**2 * dense / (kept * signal + (k * self.variance + sampling) / n)

    def sure_gain(
        self, kept: float, lost: float, spared: float, k: int, errors: tuple[float, float, float], sure: float
    ) -> float:
        """A lower end of the gain at n = √T₂ for E inside and outside and the share of noise spared, three independent estimates.

        The logarithm of the gain falls by so much for an error of one in each; errors add up by their squares.
        """
        if k == self.total or kept <= sure * errors[0]:
            return float(k == self.total)

        def log_gain(kept: float, lost: float, spared: float) -> float:
            lost, spared = max(lost, 0.0), min(max(spared, 0.0), 1 - k / self.total)
            share = kept / (kept + lost)
            return math.log(self.gain(share, kept + lost, (1 - spared) * self.total, math.sqrt(self.steps)))

        here = log_gain(kept, lost, spared)
        worse = (
            log_gain(kept - errors[0], lost, spared),
            log_gain(kept, max(lost, 0.0) + errors[1], spared),
            log_gain(kept, lost, spared - errors[2]),
        )
        return math.exp(here - sure * math.sqrt(sum(max(0.0, here - w) ** 2 for w in worse)))

    def learning_rate(self, kept: float, signal: float, k: int) -> tuple[float, float]:
        """The best rate on k coordinates over the best on all, at n = √T₂ and at n = 1."""
        rates = [self.gain(kept, signal, k, n) / kept for n in (math.sqrt(self.steps), 1)]
        return min(rates), max(rates)


def _verdict(
    candidates: Sequence[Candidate], signal: Interval, phase: _Phase, total: int
) -> tuple[str, Candidate | None, list[str]]:
    sparse = [c for c in candidates if c.active < total]
    noise = total * phase.variance
    if signal.low <= 0:
        return (
            "cannot tell",
            None,
            [
                f"The warm-up's mean gradient has an energy of {signal.estimate:.2g}, between {signal.low:.2g} and "
                f"{signal.high:.2g}: no signal can be told from noise, so no ranking can be judged.",
                "A longer warm-up, or one with a larger share of the budget, would tell more; it is paid for like any run.",
            ],
        )
    reasons = [
        f"The mean gradient's energy is {signal.estimate:.2g} ({signal.low:.2g} to {signal.high:.2g}); dense noise adds "
        f"{noise:.2g} to every step that follows, and {noise / math.sqrt(phase.steps):.2g} to the mean of √T₂ = {math.sqrt(phase.steps):.0f} of them."
    ]
    if not sparse:
        return "cannot tell", None, [*reasons, "No ratio below 1 was asked about."]
    sure = [c for c in sparse if c.gain.low > 1 + MARGIN]
    if sure:
        best = max(sure, key=lambda c: c.gain.low)
        reasons.append(
            f"The best {best.active_ratio:.3g} of the coordinates by the {best.score} score keep {best.kept.estimate:.0%} of "
            f"the signal ({best.kept.low:.0%} to {best.kept.high:.0%}) and save {1 - best.active_ratio:.0%} of the noise: "
            f"progress is at least {best.gain.low:.2f} times that of dense training, with errors of all estimates counted."
        )
        reasons.append(
            f"At least {best.outside:.0%} of the records' own gradients lie in the other coordinates, so the loss is not flat there and "
            "their noise does harm."
        )
        return "restrict", best, reasons
    most = max(sparse, key=lambda c: c.gain.high)
    if most.gain.high < 1 + MARGIN:
        reasons.append(
            f"No support gains {MARGIN:.0%}: the most favourable, {most.active_ratio:.3g} of the coordinates by the {most.score} score, "
            f"keeps {most.kept.estimate:.0%} of the signal ({most.kept.low:.0%} to {most.kept.high:.0%}), and progress would be at most "
            f"{most.gain.high:.2f} times that of dense training with its learning rate chosen well."
        )
        return "stay dense", None, reasons
    best = max(sparse, key=lambda c: c.gain.estimate)
    reasons.append(
        f"The likeliest to gain, {best.active_ratio:.3g} of the coordinates by the {best.score} score, keeps {best.kept.estimate:.0%} of the "
        f"signal ({best.kept.low:.0%} to {best.kept.high:.0%}); against dense training its progress is between {best.gain.low:.2f} and "
        f"{best.gain.high:.2f}, depending on the truth within the intervals and on how far noise averages out."
    )
    if best.outside < (1 - best.active_ratio) / 2:
        share = f"No more than {best.outside:.0%}" if best.outside >= 0.005 else "Nothing"
        reasons.append(
            f"{share} of the records' own gradients could be shown to lie outside it: the loss may be flat there, "
            "and then the noise of those coordinates costs nothing."
        )
    reasons.append("Unless speed, memory or communication matter, dense training is the safer choice.")
    return "cannot tell", None, reasons
