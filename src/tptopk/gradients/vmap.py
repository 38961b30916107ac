"""Per-example gradients of any model that torch.func can batch: slower and hungrier than rules, but general."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from tptopk.gradients.contributions import Contribution, Dense
from tptopk.gradients.examples import Batch, PerExampleLoss
from tptopk.supports.support import trainable


class _Loss(nn.Module):
    """The loss as a module around the model, so that the model's parameters can be replaced in one call."""

    def __init__(self, model: nn.Module, loss: PerExampleLoss) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self._loss(self.model, batch)


def vmap_contributions(model: nn.Module, loss: PerExampleLoss, batch: Batch) -> dict[str, Contribution]:
    """Parameter name → its per-example gradients. Random layers draw anew for each example."""
    whole = _Loss(model, loss)

    def one(parameters: dict[str, Tensor], example: Batch) -> Tensor:
        alone = tree_map(lambda leaf: leaf[None] if isinstance(leaf, Tensor) else leaf, example)
        losses: Tensor = functional_call(whole, {f"model.{name}": p for name, p in parameters.items()}, (alone,))
        return losses.sum()

    parameters = {name: p.detach() for name, p in trainable(model).items()}
    axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, batch)
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no batching rule, or a wrong one
        gradients = vmap(grad(one), in_dims=(None, axes), randomness="different")(parameters, batch)
    return {name: Dense(torch.as_tensor(g)) for name, g in gradients.items()}
