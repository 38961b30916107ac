"""Measuring a model on data that the guarantee does not cover: a test set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tptopk.gradients.examples import per_example, takes_output_and_target
from tptopk.privacy.refusal import Refusal
from tptopk.training.sampling import Collate, Records, micro_batches


class StrangeLabels(Refusal):
    """Labels of a test set, which is outside the guarantee; of training records nothing may be said."""

    def __init__(self, strange: int, records: int, classes: int) -> None:
        super().__init__(
            f"{strange} of {records} test records have a label that is no class: the model has {classes} classes, numbered from 0 to "
            f"{classes - 1}"
        )


def _strange(output: Tensor, targets: Tensor, loss: object) -> int:
    """How many records have a label that is no class; where a record has many labels, `ignore_index` marks padding."""
    if targets.is_floating_point() or output.dim() != targets.dim() + 1:
        return 0
    known = (targets >= 0) & (targets < output.shape[1])
    if targets.dim() > 1:
        known |= targets == getattr(loss, "ignore_index", -100)
    return int((~known).reshape(len(targets), -1).any(1).sum())


@torch.no_grad()
def refuse_strange_labels(
    model: nn.Module, records: Records, loss: Callable[..., Tensor], device: torch.device, batch_size: int = 1000
) -> None:
    """Refuse a test set with labels that are no classes of the model, which is run on the first record alone."""
    if not takes_output_and_target(loss):
        return
    first = next(micro_batches(records, torch.zeros(1, dtype=torch.long), 1, device))
    if first[1].is_floating_point():
        return
    output = model(first[0])
    strange = 0
    for batch in micro_batches(records, torch.arange(len(records)), batch_size, torch.device("cpu")):
        strange += _strange(output, batch[1], loss)
    if strange:
        raise StrangeLabels(strange, len(records), output.shape[1])


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Any,
    loss: Callable[..., Tensor],
    *,
    collate: Collate | None = None,
    device: torch.device | None = None,
    batch_size: int = 1000,
) -> dict[str, float]:
    """Mean loss, and accuracy where the loss is one on (class scores, class numbers). Leaves the model in evaluation mode.

    A label that is no class is refused: it has no loss and no right answer, and would count as a loss of zero.
    """
    records = Records(dataset, collate)
    losses = per_example(loss)
    device = device or next(model.parameters()).device
    model.eval()
    classified = takes_output_and_target(loss)
    total = correct = 0.0
    strange = 0
    for batch in micro_batches(records, torch.arange(len(records)), batch_size, device):
        total += float(losses(model, batch).sum())
        classified = classified and not batch[1].is_floating_point()
        if classified:
            output = model(batch[0])
            strange += _strange(output, batch[1], loss)
            hits = (output.argmax(1) == batch[1]).float()
            correct += float(hits.reshape(len(hits), -1).mean(1).sum())
    if strange:
        raise StrangeLabels(strange, len(records), output.shape[1])
    found = {"loss": total / len(records)}
    if classified:
        found["accuracy"] = correct / len(records)
    return found
