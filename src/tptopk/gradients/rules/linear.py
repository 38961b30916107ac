"""y = x Wᵀ + b at any number of positions: ∂W_b = Σ_t g_bt ⊗ x_bt, ∂b_b = Σ_t g_bt."""

from __future__ import annotations

from typing import cast

from torch import nn

from tptopk.gradients.contributions import Contribution, Dense
from tptopk.gradients.products import Products, Windows
from tptopk.gradients.rules import Call, rule_for


@rule_for(nn.Linear)
def linear(call: Call) -> dict[str, Contribution]:
    gradient = call.output_gradient
    if gradient is None:
        return {}
    layer = cast(nn.Linear, call.module)
    x = call.input.flatten(1, -2) if call.input.dim() > 2 else call.input.unsqueeze(1)  # [B, T, in]
    g = gradient.flatten(1, -2) if gradient.dim() > 2 else gradient.unsqueeze(1)  # [B, T, out]
    x = x if x.stride(2) == 1 else x.contiguous()
    windows = Windows(x, ((x.shape[1],), (x.stride(1),)), ((x.shape[2],), (1,)))
    found: dict[str, Contribution] = {"weight": Products(g, windows, (layer.out_features, layer.in_features))}
    if layer.bias is not None:
        found["bias"] = Dense(g.sum(1))
    return found
