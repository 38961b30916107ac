"""What `fit` settles before anything is charged or opened: records, losses, engine and the size of a physical batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tptopk.gradients.examples import MeanOverRows, PerExampleLoss, per_example
from tptopk.gradients.memory import parse_bytes
from tptopk.gradients.probe import choose_engine, refuse_mixing_in_batches, refuse_unsuitable
from tptopk.privacy.plan import Plan, PrivacyWarning
from tptopk.privacy.refusal import Refusal
from tptopk.training.checks import largest_batch, most_examples
from tptopk.training.rows import RowRecords, Views
from tptopk.training.sampling import Collate, Records, micro_batches


def records_and_losses(
    train_set: Any,
    collate: Collate | None,
    loss: Callable[..., Tensor],
    plan: Plan,
    views: Views | None,
    unit: Any,
    most_rows: int | None,
) -> tuple[Records, PerExampleLoss]:
    """The examples that take part, each of one row or several, and the loss of each."""
    if (unit is None) != (plan.unit == "record"):
        raise Refusal(
            f"the plan protects one {plan.unit}; "
            + ("give unit=, an id for each record" if unit is None else "say Plan.calibrate(unit=…)")
        )
    records = Records(train_set, collate)
    if views is None and unit is None and most_rows is None:
        return records, per_example(loss)
    records.refuse_mixing_collate()
    rows = RowRecords(train_set, collate, views, unit, most_rows)
    rows.refuse_mixing_views()
    return rows, MeanOverRows(loss)


@dataclass(frozen=True)
class Computing:
    """How gradients are computed."""

    engine: str
    most: int  # examples in memory at once


def settled(
    model: nn.Module,
    records: Records,
    losses: PerExampleLoss,
    loss: Callable[..., Tensor],
    plan: Plan,
    device: torch.device,
    *,
    engine: str,
    precision: str,
    micro_batch_size: int | None,
    memory_limit: int | str | None,
) -> Computing:
    """Try everything on made-up examples; what cannot be private is refused here."""
    limit = parse_bytes(memory_limit) if memory_limit is not None else None
    records.refuse_mixing_collate()
    one = next(micro_batches(records, torch.zeros(1, dtype=torch.long), 1, device))
    if not plan.spec.private:
        refuse_unsuitable(model)
        warnings.warn(
            "method 'non-private': no clipping, no noise. This model is NOT private", PrivacyWarning, stacklevel=4
        )
        return Computing("ordinary", micro_batch_size or 512)
    engine = choose_engine(model, losses, one, engine)
    records.refuse_mixing_by_length(model, per_example(loss), device)
    if math.isinf(plan.epsilon()):
        raise Refusal("the plan's noise is so small that its ε is infinite")
    most = micro_batch_size or most_examples(device)
    if micro_batch_size is None or limit is not None:
        most = min(most, largest_batch(model, losses, one, plan, engine, precision, limit))
    usual = max(plan.expected_batch_size(phase) for phase in plan.phases)
    refuse_mixing_in_batches(model, losses, one, min(most, math.ceil(usual)))
    return Computing(engine, most)
