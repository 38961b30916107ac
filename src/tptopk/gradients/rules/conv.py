"""Convolutions of one, two and three dimensions: every window of the (padded) input against its output gradient.

∂W_b[o, c, κ] = Σ_s g_b[o, s] · x_b[c, s·stride + κ·dilation]. Windows are a strided view of the padded input, not
a copy.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tptopk.gradients.contributions import Contribution, Dense, Products
from tptopk.gradients.rules import Call, rule_for

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@rule_for(nn.Conv1d, nn.Conv2d, nn.Conv3d, methods=("forward", "_conv_forward"))
def convolution(call: Call) -> dict[str, Contribution]:
    g = call.output_gradient
    if g is None:
        return {}
    layer = cast(Convolution, call.module)
    batch, groups = g.shape[0], layer.groups
    positions = g.shape[2:]

    def view() -> Tensor:  # made when it is needed: it repeats every input once for each element of the kernel
        return windows(padded(call.input, layer), layer, positions).reshape(batch, groups, -1, positions.numel())

    g = g.reshape(batch, groups, -1, positions.numel())  # [B, G, C_out/G, S]
    found: dict[str, Contribution] = {}
    if groups == 1:
        found["weight"] = Products(
            g[:, 0].transpose(1, 2), lambda: view()[:, 0].transpose(1, 2), tuple(layer.weight.shape)
        )
    else:
        found["weight"] = Dense(torch.matmul(g, view().transpose(2, 3)).view(batch, *layer.weight.shape))
    if layer.bias is not None:
        found["bias"] = Dense(g.sum(3).view(batch, -1))
    return found


def padded(x: Tensor, layer: Convolution) -> Tensor:
    """The input as the layer's kernel sees it, with its padding written out."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)


def windows(x: Tensor, layer: Convolution, positions: torch.Size) -> Tensor:
    """[B, C, *kernel, *positions]: a view of x [B, C, *space] that repeats elements instead of copying them."""
    steps = x.stride()[2:]
    sizes = (*x.shape[:2], *layer.kernel_size, *positions)
    strides = (
        *x.stride()[:2],
        *(s * d for s, d in zip(steps, layer.dilation, strict=True)),
        *(s * d for s, d in zip(steps, layer.stride, strict=True)),
    )
    return x.as_strided(sizes, strides, x.storage_offset())
