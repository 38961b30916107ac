"""The truth: one example at a time, plain autograd. Slow, and read by every test of a faster way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tptopk.gradients.examples import Batch, PerExampleLoss, batch_length, checked_losses, take
from tptopk.supports.support import Support, trainable


def reference_clipped_sum(
    model: nn.Module,
    loss: PerExampleLoss,
    batch: Batch,
    support: Support,
    clip_norm: float,
    stability: float | None = None,
) -> dict[str, Tensor]:
    """Σ_i (m ⊙ g_i) · min(1, C / ‖m ⊙ g_i‖), examples with a gradient that is not finite left out.

    With a stability γ the factor is C / (‖m ⊙ g_i‖ + γ) instead. Added up in float64: in float32 a long sum loses small terms, or
    not, as another example decides.
    """
    parameters = trainable(model)
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    for i in range(batch_length(batch)):
        gradient = example_gradient(model, loss, take(batch, slice(i, i + 1)), support)
        norm = torch.stack([g.double().norm() for g in gradient.values()]).norm()
        if not torch.isfinite(norm):
            continue
        factor = min(1.0, clip_norm / float(norm)) if norm > 0 else 1.0
        if stability is not None:
            factor = clip_norm / (float(norm) + stability)
        for name, g in gradient.items():
            total[name] += factor * g
    return {name: added.float() for name, added in total.items()}


def example_gradient(model: nn.Module, loss: PerExampleLoss, example: Batch, support: Support) -> dict[str, Tensor]:
    """The gradient of one example (a batch of length 1), zero outside the support."""
    parameters = trainable(model)
    with torch.enable_grad():
        value = checked_losses(loss, model, example).sum()
    gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    masked = {}
    for (name, parameter), g in zip(parameters.items(), gradients, strict=True):
        dense = torch.zeros_like(parameter) if g is None else g.to_dense() if g.is_sparse else g
        masked[name] = torch.where(support[name], dense.float(), 0.0)
    return masked
