"""Made-up records planted in a real training run, and what the trained model gives away about them.

The data grows by N records, which the plan declares like any others. A fair coin says of each whether it takes part; one
that does not has a label that is no class, and contributes nothing. From the released model an attacker then guesses
the coins: a record with a low loss was probably there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tptopk.experiments.audit import Audit, canary_records, guesses_by_rank, one_run_audit
from tptopk.privacy import accounting
from tptopk.privacy.accounting import Segment
from tptopk.privacy.plan import Phase, Plan
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
def audit_planted(run: Run, planted: Planted, *, error_rate: float = 0.05) -> Audit:
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
        error_rate=error_rate,
        scores=scores,
        name=f"this run, {len(scores)} planted records",
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
