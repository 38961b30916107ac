"""Normalisations with an affine part: with x̂ the normalised input, ∂weight_b = Σ g·x̂ and ∂bias_b = Σ g."""

from __future__ import annotations

from typing import cast

import torch
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
    """torch's own backward pass, told that every example is a group of channels of its own in one large example."""
    layer, x, g = cast(nn.GroupNorm, call.module), call.input, call.output_gradient
    if g is None:
        return {}
    batch, channels, groups = len(x), x.shape[1], layer.num_groups
    x, g = x.reshape(1, batch * channels, -1).contiguous(), g.reshape(1, batch * channels, -1).contiguous()
    variance, mean = torch.var_mean(x.view(1, batch * groups, -1), dim=2, correction=0)
    ones = x.new_ones(batch * channels)
    _, weight, bias = torch.ops.aten.native_group_norm_backward(
        g,
        x,
        mean,
        (variance + layer.eps).rsqrt(),
        ones,
        1,
        batch * channels,
        x.shape[2],
        batch * groups,
        (False, True, True),
    )
    return {"weight": Dense(weight.view(batch, channels)), "bias": Dense(bias.view(batch, channels))}


def _running_statistics(module: nn.Module) -> str | None:
    return "it keeps running statistics" if getattr(module, "track_running_stats", False) else None


@rule_for(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, objection=_running_statistics)
def instance_norm(call: Call) -> dict[str, Contribution]:
    layer, x = cast(nn.InstanceNorm2d, call.module), call.input
    return _affine(call, F.instance_norm(x, eps=layer.eps), tuple(range(2, x.dim())))
