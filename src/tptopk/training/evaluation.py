"""Measuring a model on data that the guarantee does not cover: a test set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tptopk.gradients.examples import per_example, takes_output_and_target
from tptopk.training.sampling import Collate, Records, micro_batches


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
    """Mean loss, and accuracy where the loss is one on (class scores, class numbers). Leaves the model in evaluation mode."""
    records = Records(dataset, collate)
    losses = per_example(loss)
    device = device or next(model.parameters()).device
    model.eval()
    classified = takes_output_and_target(loss)
    total = correct = 0.0
    for batch in micro_batches(records, torch.arange(len(records)), batch_size, device):
        total += float(losses(model, batch).sum())
        classified = classified and not batch[1].is_floating_point()
        if classified:
            hits = (model(batch[0]).argmax(1) == batch[1]).float()
            correct += float(hits.reshape(len(hits), -1).mean(1).sum())
    found = {"loss": total / len(records)}
    if classified:
        found["accuracy"] = correct / len(records)
    return found
