"""The frozen plan that owns every number a guarantee depends on.

Sampler, mechanism and ledger read sample rates, steps, noise multipliers, clipping norms and divisors here
and nowhere else.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from tptopk.privacy import accounting
from tptopk.privacy.accounting import ACCOUNTANTS, Segment
from tptopk.privacy.description import plain
from tptopk.privacy.methods import Method, method_named
from tptopk.privacy.refusal import PrivacyWarning as PrivacyWarning
from tptopk.privacy.refusal import (
    Refusal,
    SlowCalibration,
    check_count,
    check_number,
    nearest,
    refuse_unknown_keywords,
)

ADJACENCY = "zero-out"
SMALLEST_CLIP_NORM = 1e-8  # far above where float32 squares of coordinates vanish from a norm


@dataclass(frozen=True, kw_only=True)
class Phase:
    """`steps` equal steps: sample at `sample_rate`, clip to `clip_norm`, add noise of `noise_multiplier`·`clip_norm`."""

    steps: int
    sample_rate: float
    noise_multiplier: float
    clip_norm: float
    name: str = ""

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_number("sample_rate", self.sample_rate, above=0, most=1)
        ordinary = self.noise_multiplier == 0 and math.isinf(self.clip_norm)  # the non-private method's phase
        if not ordinary:
            check_number("noise_multiplier", self.noise_multiplier, above=0)
            check_number("clip_norm", self.clip_norm, least=SMALLEST_CLIP_NORM)
        _check_word("a phase's name", self.name, least=0)

    @property
    def segment(self) -> Segment:
        return Segment(self.noise_multiplier, self.sample_rate, self.steps)

    @property
    def steps_per_epoch(self) -> int:
        return max(1, round(1 / self.sample_rate))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All public numbers of one private run.

    `dataset_size` is declared public by whoever writes the plan; the divisor of every step is the expected batch
    size, `sample_rate · dataset_size`, a public constant. With N public, neighbouring datasets have equal size and
    differ by one record being replaced with one that contributes nothing (zero-out adjacency), which costs what
    adding or removing a record costs. `queries` are Gaussian queries outside training (a private preprocessing
    step, say), one `Phase` each; they are composed with the training phases and charged first.
    """

    phases: tuple[Phase, ...]
    delta: float
    dataset_size: int
    method: str = "dp-sgd"
    active_ratio: float = 1.0
    accountant: str = "pld"
    adjacency: str = ADJACENCY
    queries: tuple[Phase, ...] = ()
    target_epsilon: float | None = None
    unit: str = "record"  # what is protected; other than a record, all records that share an id are one

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self.phases))
        object.__setattr__(self, "queries", tuple(self.queries))
        method = method_named(self.method)
        check_number("delta", self.delta, above=0, below=1)
        check_count("dataset_size", self.dataset_size)
        check_number("active_ratio", self.active_ratio, above=0, most=1)
        if self.target_epsilon is not None:
            check_number("target_epsilon", self.target_epsilon, above=0)
        _check_unit(self.unit)
        _check_accountant(self.accountant)
        if self.adjacency != ADJACENCY:
            raise Refusal(
                f"adjacency is {self.adjacency!r}; only {ADJACENCY!r} is accounted for (the dataset's size is "
                "public and one record may be replaced by one that contributes nothing)"
            )
        if len(self.phases) < (2 if method.warmup else 1):
            raise Refusal(
                f"{method.name} needs at least {2 if method.warmup else 1} phases; the plan has {len(self.phases)}"
            )
        for phase in (*self.phases, *self.queries):
            if (phase.noise_multiplier > 0) != method.private:
                raise Refusal(
                    f"noise_multiplier is {phase.noise_multiplier} in a plan for {method.name}; it must be "
                    + ("above 0" if method.private else "0, with an infinite clip_norm")
                )
        if self.delta_too_large:
            warnings.warn(
                f"delta = {self.delta:g} is at or above 1/dataset_size = {1 / self.dataset_size:g}: such a guarantee allows "
                "publishing a random record outright; choose delta well below it",
                PrivacyWarning,
                stacklevel=3,
            )

    @property
    def spec(self) -> Method:
        return method_named(self.method)

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def sample_rate(self) -> float:
        """The rate of every phase, for loops that sample at one rate throughout; refused where phases differ."""
        rates = {phase.sample_rate for phase in self.phases}
        if len(rates) > 1:
            raise Refusal(
                f"the plan's phases sample at {' and '.join(f'{rate:g}' for rate in sorted(rates))}; this loop samples at one rate"
            )
        return rates.pop()

    @property
    def delta_too_large(self) -> bool:
        """Whether δ allows publishing a random record outright."""
        return self.spec.private and self.delta * self.dataset_size >= 1

    def expected_batch_size(self, phase: Phase | None = None) -> float:
        """The public constant that every sum of this phase is divided by; without a phase of all, which must be equal."""
        return (self.sample_rate if phase is None else phase.sample_rate) * self.dataset_size

    def noise_std(self, phase: Phase) -> float:
        """ν = σC/B: the standard deviation of the noise on one coordinate of the averaged gradient."""
        if not self.spec.private:
            return 0.0
        return phase.noise_multiplier * phase.clip_norm / self.expected_batch_size(phase)

    def active_coordinates(self, total: int) -> int:
        """k = ⌊ρd⌋; refused where nothing would be left."""
        return active_of(self.active_ratio, total)

    def epsilon(self, *, delta: float | None = None, accountant: str | None = None) -> float:
        """ε of the whole plan: an upper bound, a pure function of the plan."""
        if not self.spec.private:
            return math.inf
        delta = self.delta if delta is None else delta
        check_number("delta", delta, above=0, below=1)
        return accounting.epsilon(self.segments(), delta, accountant or self.accountant)

    def segments(self, charged: Mapping[int, int] | None = None, *, queries: bool = True) -> list[Segment]:
        """What an accountant composes: the queries, and all steps, or of each phase so many as `charged` says."""
        counts = {index: phase.steps for index, phase in enumerate(self.phases)} if charged is None else charged
        spent = [self.phases[index].segment._replace(steps=count) for index, count in sorted(counts.items()) if count]
        return [*(query.segment for query in self.queries if queries), *spent]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite clip norm is written as null."""
        values = asdict(self)
        for phase in (*values["phases"], *values["queries"]):
            phase["clip_norm"] = phase["clip_norm"] if math.isfinite(phase["clip_norm"]) else None
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`; anything that is not a plan is refused."""
        try:
            unknown = set(values) - {field.name for field in fields(cls)}
            if unknown:
                raise Refusal(f"a plan has no field {sorted(unknown)[0]!r}")
            phases = {
                key: tuple(
                    Phase(**{**p, "clip_norm": math.inf if p["clip_norm"] is None else p["clip_norm"]})
                    for p in values.get(key, ())
                )
                for key in ("phases", "queries")
            }
            return cls(**{**values, **phases})
        except (KeyError, TypeError, AttributeError) as error:
            raise Refusal(f"not a plan: {error}") from error

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    @refuse_unknown_keywords
    def calibrate(
        cls,
        method: str,
        *,
        epsilon: float,
        delta: float,
        batch_size: int,
        dataset_size: int,
        epochs: float | None = None,
        steps: int | None = None,
        active_ratio: float = 0.4,
        warmup: float = 0.3,
        warmup_budget: float | None = 0.3,
        clip_norm: float | Sequence[float] = 1.0,
        accountant: str = "pld",
        queries: Sequence[Phase] = (),
        unit: str = "record",
    ) -> Plan:
        """The plan of a method whose whole cost is ε: never more, and at most 0.1% less.

        For methods with a warm-up, `warmup` is its share of the steps, and σ₁ is set so that the warm-up alone
        costs `warmup_budget`·ε; then σ₂ so that everything composed costs ε. `warmup_budget=None` takes one σ for
        both phases. `clip_norm` is one number or (C₁, C₂). Methods without a warm-up do not read `warmup` and
        `warmup_budget`; dense methods do not read `active_ratio`. `queries` are composed in and keep their noise.
        `unit` names what is protected, if that is not one record: `dataset_size` and `batch_size` then count units.
        """
        spec = method_named(method)
        counts, clips = check_calibration(
            method, epsilon=epsilon, delta=delta, batch_size=batch_size, dataset_size=dataset_size, epochs=epochs, steps=steps,
            active_ratio=active_ratio, warmup=warmup, warmup_budget=warmup_budget, clip_norm=clip_norm, accountant=accountant,
            unit=unit,
        )  # fmt: skip
        names = ["warm-up", "sparse"] if spec.warmup else ["training"]
        started = time.monotonic()
        sigmas = _calibrated_noise(
            spec,
            [Segment(0.0, batch_size / dataset_size, count) for count in counts],
            [query.segment for query in queries],
            epsilon,
            delta,
            warmup_budget,
            accountant,
        )
        if time.monotonic() - started > 20:
            warnings.warn(
                f"calibration took {time.monotonic() - started:.0f} s; accountant='rdp' is much faster and "
                "costs about 8% more noise",
                SlowCalibration,
                stacklevel=3,
            )
        return cls(
            phases=tuple(
                Phase(
                    steps=count,
                    sample_rate=batch_size / dataset_size,
                    noise_multiplier=sigma,
                    clip_norm=clip if spec.private else math.inf,
                    name=name,
                )
                for count, sigma, clip, name in zip(counts, sigmas, clips, names, strict=True)
            ),
            delta=delta,
            dataset_size=dataset_size,
            method=method,
            accountant=accountant,
            queries=tuple(queries),
            active_ratio=active_ratio if spec.sparse else 1.0,
            target_epsilon=epsilon if spec.private else None,
            unit=unit,
        )


def active_of(ratio: float, total: int) -> int:
    """k = ⌊ρd⌋, exact for ratios such as .29 that binary fractions miss by a hair; k = 0 is refused."""
    k = math.floor(ratio * total + 1e-9)
    if k == 0:
        digits = 2 - math.floor(math.log10(1 / total))
        least = math.ceil(10**digits / total) / 10**digits  # three digits, rounded up
        raise Refusal(
            f"an active ratio of {ratio:g} leaves k = 0 of d = {total} coordinates; it must be at least {least:.3g}"
        )
    return k


def check_calibration(
    method: str,
    *,
    epsilon: float,
    delta: float,
    batch_size: int,
    dataset_size: int,
    epochs: float | None,
    steps: int | None,
    active_ratio: float,
    warmup: float,
    warmup_budget: float | None,
    clip_norm: float | Sequence[float],
    accountant: str,
    unit: str,
) -> tuple[list[int], list[float]]:
    """The steps and the clipping norm of each phase; refuses at once what `Plan.calibrate` would take its time to find no noise for."""
    spec = method_named(method)
    check_number("epsilon", epsilon, above=0)
    check_number("delta", delta, above=0, below=1)
    check_number("active_ratio", active_ratio, above=0, most=1)
    _check_accountant(accountant)
    _check_unit(unit)
    check_count("dataset_size", dataset_size)
    check_count("batch_size", batch_size)
    if batch_size > dataset_size:
        raise Refusal(f"batch_size is {batch_size}, more than dataset_size {dataset_size}")
    total = _total_steps(epochs, steps, batch_size / dataset_size)
    counts = [total]
    if spec.warmup:
        check_number("warmup", warmup, above=0, below=1)
        if warmup_budget is not None:
            check_number("warmup_budget", warmup_budget, above=0, below=1)
        first = round(warmup * total)
        if not 0 < first < total:
            raise Refusal(
                f"warmup = {warmup:g} of {total} steps leaves {first} for the warm-up and {total - first} for "
                "the rest; both need at least one"
            )
        counts = [first, total - first]
    clips = list(clip_norm) if isinstance(clip_norm, Sequence) else [clip_norm] * len(counts)
    if len(clips) != len(counts):
        raise Refusal(f"clip_norm has {len(clips)} values; {method} has {len(counts)} phase(s)")
    for clip in clips:
        check_number("clip_norm", clip, least=SMALLEST_CLIP_NORM)
    return counts, clips


def _check_accountant(accountant: str) -> None:
    if accountant not in ACCOUNTANTS:
        raise Refusal(f"unknown accountant {accountant!r}{nearest(str(accountant), ACCOUNTANTS)}")


def _check_unit(unit: str) -> None:
    _check_word("unit", unit, least=1)


def _check_word(what: str, word: object, least: int) -> None:
    """Words of a plan stand in statements: none may look like more than a word there."""
    if not isinstance(word, str) or word != plain(word) or not least <= len(word) <= 40:
        raise Refusal(
            f"{what} is {word!r}; it must be a short word, such as 'patient' or 'warm-up', without Markdown's characters"
        )


def _total_steps(epochs: float | None, steps: int | None, sample_rate: float) -> int:
    if (epochs is None) == (steps is None):
        raise Refusal("give either epochs or steps, and not both")
    if steps is not None:
        check_count("steps", steps)
        return steps
    assert epochs is not None
    check_number("epochs", epochs, above=0)
    return max(1, round(epochs / sample_rate))


def _calibrated_noise(
    spec: Method,
    segments: list[Segment],
    queries: list[Segment],
    epsilon: float,
    delta: float,
    warmup_budget: float | None,
    accountant: str,
) -> list[float]:
    if not spec.private:
        return [0.0] * len(segments)
    if len(segments) == 1 or warmup_budget is None:
        whole = segments[0]._replace(steps=sum(s.steps for s in segments))
        return [accounting.noise_for(epsilon, delta, accountant, whole, queries)] * len(segments)
    try:
        first = accounting.noise_for(warmup_budget * epsilon, delta, accountant, segments[0])
    except Refusal as refusal:
        raise Refusal(
            f"the warm-up's share of ε, {warmup_budget:g} × {epsilon:g}, cannot be met: {refusal}; change warmup_budget, or give both "
            "phases one noise level with warmup_budget=None"
        ) from refusal
    warmed = [*queries, segments[0]._replace(noise_multiplier=first)]
    return [first, accounting.noise_for(epsilon, delta, accountant, segments[1], warmed)]
