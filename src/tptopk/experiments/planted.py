"""Made-up records planted in a real training run, and what the trained model gives away about them.

The data grows by N records, which the plan declares like any others. A fair coin says of each whether it takes part; one
that does not has a label that is no class, and contributes nothing. From the released model an attacker then guesses
the coins: a record with a low loss was probably there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as F

from tptopk.experiments.audit import Audit
from tptopk.experiments.lower_bounds import one_run_bound
from tptopk.privacy import accounting
from tptopk.privacy.accounting import Segment
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.refusal import Refusal, check_count, check_number
from tptopk.training.run import Run

NO_CLASS = -1


@dataclass(frozen=True)
class Planted:
    """The records that were planted, and the coins: in memory alone, never in the run's folder."""

    inputs: Tensor
    labels: Tensor
    included: Tensor


def plant(training: tuple[Tensor, Tensor], count: int) -> tuple[tuple[Tensor, Tensor], Planted]:
    """The training set with `count` records planted after its own."""
    inputs, labels = training
    generator = torch.Generator()
    generator.seed()  # from the operating system: whoever knew the coins could not be fooled by them
    made, targets, included = canary_records(inputs, labels, count, generator)
    shown = torch.where(included, targets, NO_CLASS)
    return (torch.cat([inputs, made]), torch.cat([labels, shown])), Planted(made, targets, included)


@torch.no_grad()
def audit_planted(run: Run, planted: Planted) -> Audit:
    """Guess which records were planted, by their loss under the released model; half of them, the surest ones."""
    device = next(run.model.parameters()).device
    losses = torch.cat(
        [
            F.cross_entropy(run.model(x.to(device)), y.to(device), reduction="none").cpu()
            for x, y in zip(torch.split(planted.inputs, 1000), torch.split(planted.labels, 1000), strict=True)
        ]
    )
    scores = -losses.double().numpy()
    return one_run_audit(
        guesses_by_rank(scores, max(2, len(scores) // 2)),
        planted.included.numpy(),
        claimed=run.epsilon,
        delta=run.delta,
        scores=scores,
        name=f"this run, {len(scores)} planted records",
    )


def canary_records(
    inputs: Tensor, labels: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """`count` records to plant: uniformly random inputs and labels, and [count] fair coins that say which are included.

    Inputs have the shape, the type and the range of those given (whole numbers, such as token ids, stay whole);
    labels are drawn from 0 to the largest. Range and classes are read off the data: give data for which they are public.
    """
    check_count("count", count)
    if not len(inputs) or not len(labels):
        raise Refusal("canaries need at least one record to be shaped after")
    shape, low, high = (count, *inputs.shape[1:]), inputs.min(), inputs.max()
    if inputs.is_floating_point():
        made = low + (high - low) * torch.rand(shape, generator=generator, dtype=inputs.dtype)
    else:
        made = torch.randint(int(low), int(high) + 1, shape, generator=generator).to(inputs.dtype)
    targets = torch.randint(0, int(labels.max()) + 1, (count, *labels.shape[1:]), generator=generator)
    included = torch.rand(count, generator=generator) < 0.5
    return made, targets.to(labels.dtype), included


def guesses_by_rank(scores: ArrayLike, count: int) -> NDArray[np.int64]:
    """+1 (included) for the highest half of `count` scores, −1 (not) for the lowest half, 0 (no guess) between.

    Fix `count` before looking at the coins.
    """
    scores = np.asarray(scores, dtype=float)
    check_count("count", count)
    if count > len(scores):
        raise Refusal(f"{count} guesses on {len(scores)} canaries; make at most one each")
    order = np.argsort(scores, kind="stable")
    guesses = np.zeros(len(scores), dtype=np.int64)
    guesses[order[: count // 2]] = -1
    guesses[order[len(scores) - (count - count // 2) :]] = 1
    return guesses


def one_run_audit(
    guesses: ArrayLike,
    included: ArrayLike,
    *,
    claimed: float,
    delta: float,
    error_rate: float = 0.05,
    scores: ArrayLike | None = None,
    name: str = "one run",
) -> Audit:
    """The audit of one training run: m canaries, each included by its own fair coin, and guesses of the coins.

    `guesses` are +1 (included), −1 (not) or 0 (no guess), made from the run's output without knowing the coins;
    `scores`, where given, are only shown.

    Formal guarantees: an (ε, δ)-DP run under add/remove or zero-out adjacency has as many correct guesses with
    probability `one_run_p_value` at most, however they were made and however the canaries act on each other; the
    bound is the largest ε that this rules out.
    """
    guessed, coins = np.sign(np.asarray(guesses)), np.asarray(included, dtype=bool)
    if guessed.shape != coins.shape or guessed.ndim != 1 or not len(coins):
        raise Refusal(f"{guessed.shape} guesses for {coins.shape} coins; give one each")
    check_number("error_rate", error_rate, above=0, below=0.5)
    made, right = int((guessed != 0).sum()), int((guessed == np.where(coins, 1, -1)).sum())
    bounds = {"one run": one_run_bound(len(coins), made, right, delta, error_rate)}
    shown = guessed.astype(float) if scores is None else np.asarray(scores, dtype=float)
    return Audit(
        name,
        claimed,
        delta,
        bounds,
        bounds,
        len(coins),
        error_rate,
        error_rate,
        f"{right} of {made} guesses right",
        None,
        shown[coins],
        shown[~coins],
    )


def one_step_plan(epsilon: float, delta: float) -> Plan:
    """One step on every record whose noise is calibrated to ε."""
    noise = accounting.noise_for(epsilon, delta, "pld", Segment(0.0, 1.0, 1))
    return Plan(
        phases=(Phase(steps=1, sample_rate=1.0, noise_multiplier=noise, clip_norm=1.0),), delta=delta, dataset_size=1000
    )


def audit_values(found: Audit) -> dict[str, Any]:
    """An audit in plain values for JSON, without its samples."""
    return {
        "name": found.name,
        "claimed": found.claimed,
        "delta": found.delta,
        "at_least": dict(found.bounds),
        "observations": found.observations,
        "error_rate": found.error_rate,
        "score": found.score,
        "verdict": found.verdict,
        "verdict_error_rate": found.verdict_rate,
    }
