"""Convolutions of one, two and three dimensions: every window of the (padded) input against its output gradient.

∂W_b[o, c, κ] = Σ_s g_b[o, s] · x_b[c, s·stride + κ·dilation]. Windows are a strided view of the padded input, not
a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tptopk.gradients.contributions import Contribution, Dense
from tptopk.gradients.products import Products, Windows
from tptopk.gradients.rules import Call, rule_for

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@rule_for(nn.Conv1d, nn.Conv2d, nn.Conv3d, methods=("forward", "_conv_forward"))
def convolution(call: Call) -> dict[str, Contribution]:
    g = call.output_gradient
    if g is None:
        return {}
    layer = cast(Convolution, call.module)
    x, positions = padded(call.input, layer), g.shape[2:]
    found: dict[str, Contribution] = {}
    if layer.groups == 1:
        found["weight"] = Products(
            g.flatten(2).transpose(1, 2),
            windows(x, layer, positions),
            tuple(layer.weight.shape),
            _library_sum(layer, positions),
        )
    else:
        separate = windows(
            x.reshape(len(x) * layer.groups, -1, *x.shape[2:]), layer, positions
        ).written()  # [B·G, T, d]
        apart = g.reshape(len(g) * layer.groups, -1, positions.numel())  # [B·G, C_out/G, T]
        found["weight"] = Dense(torch.bmm(apart, separate).view(len(g), *layer.weight.shape))
    if layer.bias is not None:
        found["bias"] = Dense(g.flatten(2).sum(2))
    return found


def _library_sum(layer: Convolution, positions: torch.Size) -> Callable[[Tensor, Tensor], Tensor]:
    """The convolution's own weight gradient, summed over examples."""
    weight, stride, dilation = layer.weight.detach(), layer.stride, layer.dilation

    def add_up(g: Tensor, x: Tensor) -> Tensor:
        zeros = [0] * len(positions)
        output = g.transpose(1, 2).reshape(len(g), -1, *positions)
        whole = torch.ops.aten.convolution_backward(
            output, x, weight, None, stride, zeros, dilation, False, zeros, 1, (False, True, False)
        )
        return cast(Tensor, whole[1])

    return add_up


def padded(x: Tensor, layer: Convolution) -> Tensor:
    """The input as the layer's kernel sees it, with its padding written out."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode).contiguous()


def windows(x: Tensor, layer: Convolution, positions: torch.Size) -> Windows:
    """Every position's window of x [B, C, *space], with C · kernel columns."""
    steps = x.stride()[2:]
    return Windows(
        x,
        (tuple(positions), tuple(s * n for s, n in zip(steps, layer.stride, strict=True))),
        (
            (x.shape[1], *layer.kernel_size),
            (x.stride(1), *(s * n for s, n in zip(steps, layer.dilation, strict=True))),
        ),
    )
