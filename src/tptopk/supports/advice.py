"""When do fewer coordinates suffice? An answer from a private warm-up, at no further privacy cost.

`energy` estimates the share α of the signal that a support keeps, and `gain` how much more progress the next phase makes
on it. "Restrict" needs a gain of 5% at n = √T₂ at the lower end of an interval wide enough to hold for all supports
together, and counts only that noise as saved whose harm can be shown. "Stay dense" needs less than 5% for every support at
n = 1, kν₂² and the favourable ends, of supports ranked by the whole warm-up; as it must hold for each of them, it needs no wider
intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from tptopk.privacy.plan import Plan, active_of
from tptopk.privacy.refusal import Refusal, check_number
from tptopk.supports.energy import (
    Interval,
    energies,
    fieller,
    sampling_energy,
    share_kept,
    share_kept_by_all,
    variance_of,
)
from tptopk.supports.gain import Following
from tptopk.supports.scores import SCORES
from tptopk.supports.warmup import WarmUp

RATIOS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05, 0.02, 0.01)
FEWEST_STEPS = 8  # two a part
LEVEL = 0.95
MARGIN = 0.05  # a gain of less is no reason to change anything


@dataclass(frozen=True)
class Candidate:
    """One support: so many coordinates, ranked by one score."""

    score: str
    active_ratio: float  # k/d
    active: int  # k
    energy: float  # E(S), without bias; may be negative
    kept: Interval  # α at the stated level: ranked by half the warm-up, the upper end by all of it
    harm_left: float  # share of the noise's harm that stays, as the scores' energy beside the signal lies
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
    step_energy: tuple[float, float]  # bracket of the mean energy of a step's gradient, what sampling adds subtracted
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


def advise(
    warmup: WarmUp, *, plan: Plan | None = None, ratios: Sequence[float] | None = None, level: float = LEVEL
) -> Advice:
    """Signal kept, reliability of the ranking and a recommendation for the phase that follows the warm-up.

    `plan` is the one that is to follow, the warm-up's own unless given: σ₂, q₂ and T₂ are read from it and never
    changed. `ratios` are the active ratios to look at, `RATIOS` unless given.

    Formal guarantees: a function of private gradients and public numbers alone, so it costs nothing.
    """
    plan = plan or warmup.plan
    check_level(level)
    if len(plan.phases) < 2:
        raise Refusal(f"advice is about the phase after a warm-up, and this plan of {plan.method} has one phase alone")
    if warmup.steps < FEWEST_STEPS:
        raise Refusal(
            f"the warm-up has {warmup.steps} of {warmup.plan.phases[0].steps} steps; advice needs at least {FEWEST_STEPS}"
        )
    total = warmup.total
    counts = looked_at(ratios, total)
    found = energies(warmup, counts)
    whole = found.whole
    variance = variance_of(warmup, whole)
    sure = NormalDist().inv_cdf((1 + level) / 2)
    supports = len(SCORES) * sum(k < total for k in counts)
    surer = NormalDist().inv_cdf(1 - (1 - level) / max(1, supports))  # all at once, one side
    phase = Following.of(plan, warmup, total)
    deviation = float(variance.std(total, whole))
    signal = Interval(whole, whole - sure * deviation, whole + sure * deviation)
    candidates = []
    added = sampling_energy(warmup.plan)
    score_energy = sum(float(value.double().sum()) for value in warmup.scores().values())
    score_error = warmup.noise_std**2 * math.sqrt(2 / warmup.steps)  # times √coordinates
    restless = score_energy - whole
    transient = max(0.0, restless - added)  # more than sampling can add: signal that did not last
    for score, of_score in found.kept.items():
        for k, energy, inside, grown in zip(counts, of_score, found.scored[score], found.grown[score], strict=True):
            spared = ((score_energy - inside) - (whole - energy) - transient) / added if added > 0 else 0.0
            doubt = score_error * math.sqrt(total - k) / added if added > 0 else 0.0
            errors = float(variance.std(k, energy)), float(variance.std(total - k, whole - energy)), doubt
            kept = share_kept(energy, whole, k, total, variance, sure)
            kept = share_kept_by_all(kept, grown, whole, k, total, variance, sure)
            left = min(1.0, max(k / total, (inside - energy) / restless)) if restless > 0 else 1.0
            gain = Interval(
                phase.gain(kept.estimate, whole, left * total, math.sqrt(phase.steps)),
                phase.sure_gain(energy, whole - energy, spared, k, errors, surer),
                phase.gain(kept.high, signal.low, k, 1, sampled=False),
            )
            outside = min(1 - k / total, max(0.0, spared - surer * doubt))
            candidates.append(Candidate(score, k / total, k, energy, kept, left, outside, gain))
    wrong = {}
    for score, value in found.ranked.items():
        right = fieller(value, whole, lambda a: variance.std(total * (1 / 3 - a + a**2), whole), sure)
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
    """k for each ratio, or for each of `RATIOS` for which k ≥ 1; a ratio outside (0, 1] is refused."""
    if ratios is None:
        return [active_of(ratio, total) for ratio in RATIOS if ratio * total >= 1]
    for ratio in ratios:
        check_number("ratio", ratio, above=0, most=1)
    return [active_of(ratio, total) for ratio in ratios]


def _verdict(
    candidates: Sequence[Candidate], signal: Interval, phase: Following, total: int
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
        f"signal ({best.kept.low:.0%} to {best.kept.high:.0%}) and by the scores' energy {best.harm_left:.0%} of the noise's harm: about "
        f"{best.gain.estimate:.2f} times the progress of dense training, and between {best.gain.low:.2f} and {best.gain.high:.2f}, depending "
        "on the truth within the intervals, on where the loss bends, and on how far noise averages out."
    )
    if best.outside < (1 - best.active_ratio) / 2:
        share = f"No more than {best.outside:.0%}" if best.outside >= 0.005 else "Nothing"
        reasons.append(
            f"{share} of the records' own gradients could be shown to lie outside it: the loss may be flat there, "
            "and then the noise of those coordinates costs nothing."
        )
    reasons.append("Unless what is sent between machines matters, dense training is the safer choice.")
    return "cannot tell", None, reasons
