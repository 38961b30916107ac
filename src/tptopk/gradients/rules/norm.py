"""Normalisations with an affine part: with x̂ the normalised input, ∂weight_b = Σ g·x̂ and ∂bias_b = Σ g."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from tptopk.gradients.contributions import Contribution, Dense
from tptopk.gradients.rules import Call, rule_for


def _affine(call: Call, normalised: Tensor, shared: tuple[int, ...]) -> dict[str, Contribution]:
    """`shared` are the axes, without the batch, over which all positions share one weight."""
    g = call.output_gradient
    found: dict[str, Contribution] = {}
    if g is None:
        return found
    if getattr(call.module, "weight", None) is not None:
        product = g * normalised
        found["weight"] = Dense(product.sum(shared) if shared else product)
    if getattr(call.module, "bias", None) is not None:
        found["bias"] = Dense(g.sum(shared) if shared else g.clone())
    return found


@rule_for(nn.LayerNorm)
def layer_norm(call: Call) -> dict[str, Contribution]:
    layer, x = cast(nn.LayerNorm, call.module), call.input
    normalised = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    return _affine(call, normalised, tuple(range(1, x.dim() - len(layer.normalized_shape))))


@rule_for(nn.RMSNorm)
def rms_norm(call: Call) -> dict[str, Contribution]:
    layer, x = cast(nn.RMSNorm, call.module), call.input
    normalised = F.rms_norm(x, list(layer.normalized_shape), eps=layer.eps)
    return _affine(call, normalised, tuple(range(1, x.dim() - len(layer.normalized_shape))))


@rule_for(nn.GroupNorm)
def group_norm(call: Call) -> dict[str, Contribution]:
    layer, x = cast(nn.GroupNorm, call.module), call.input
    return _affine(call, F.group_norm(x, layer.num_groups, eps=layer.eps), tuple(range(2, x.dim())))


def _running_statistics(module: nn.Module) -> str | None:
    return "it keeps running statistics" if getattr(module, "track_running_stats", False) else None


@rule_for(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, objection=_running_statistics)
def instance_norm(call: Call) -> dict[str, Contribution]:
    layer, x = cast(nn.InstanceNorm2d, call.module), call.input
    return _affine(call, F.instance_norm(x, eps=layer.eps), tuple(range(2, x.dim())))
