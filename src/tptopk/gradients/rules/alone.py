"""For layers without a formula: run the layer again on each example alone, batched by vmap, and differentiate.

The gradient of ⟨output, its gradient⟩ with respect to the layer's parameters is the example's own gradient. The
layer must be deterministic, since it is run a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map

from tptopk.gradients.contributions import Contribution, Dense
from tptopk.gradients.rules import Call


def gradients_alone(
    call: Call, inputs: tuple[Any, ...], axes: tuple[Any, ...], shared: dict[str, Any], output_axes: list[int]
) -> dict[str, Contribution]:
    """`inputs` carry the batch on `axes` (None: the same for all); `shared` are keyword arguments without one."""
    if all(g is None for g in call.gradients):
        return {}
    parameters = {name: p.detach() for name, p in call.module.named_parameters()}
    inputs = tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, inputs
    )
    weights = [None if g is None else g.detach().float() for g in call.gradients]
    weight_axes = [None if g is None else axis for g, axis in zip(weights, output_axes, strict=True)]

    def restored(leaf: Any, axis: int | None) -> Any:
        return leaf.unsqueeze(axis) if isinstance(leaf, Tensor) and axis is not None else leaf

    def product(parameters: dict[str, Tensor], inputs: tuple[Any, ...], weights: list[Tensor | None]) -> Tensor:
        alone = tuple(
            tree_map(lambda leaf, axis=axis: restored(leaf, axis), x) for x, axis in zip(inputs, axes, strict=True)
        )
        outputs = [o for o in tree_flatten(functional_call(call.module, parameters, alone, shared))[0] if o is not None]
        return torch.stack(
            [
                (o * restored(w, axis)).sum()
                for o, w, axis in zip(outputs, weights, weight_axes, strict=True)
                if w is not None
            ]
        ).sum()

    input_axes = tuple(
        tree_map(lambda leaf, axis=axis: axis if isinstance(leaf, Tensor) else None, x)
        for x, axis in zip(inputs, axes, strict=True)
    )
    with _plain_kernels(), _flat_weights_kept(call.module):
        found = vmap(grad(product), in_dims=(None, input_axes, weight_axes))(parameters, inputs, weights)
    return {name: Dense(g) for name, g in found.items()}


@contextmanager
def _flat_weights_kept(module: nn.Module) -> Iterator[None]:
    """A recurrent layer keeps a second list of its weights, which a functional call leaves pointing elsewhere."""
    before = list(module._flat_weights) if isinstance(module, nn.RNNBase) else None
    try:
        yield
    finally:
        if before is not None:
            cast(nn.RNNBase, module)._flat_weights = before


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Fused recurrent and attention kernels have no batching rule, or a wrong one; the plain ones do."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.backends.cudnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
