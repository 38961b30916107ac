"""Number formats: what may be rounded while gradients are computed, and by how much less is clipped for it.

========  =====================================================================  ================
name      matrix products and convolutions                                       clipped to
========  =====================================================================  ================
``fp32``  in float32, also where a GPU would round by itself                     C
``tf32``  on a GPU with inputs rounded to 11 bits; elsewhere as ``fp32``         C / (1 + 0.002)
``bf16``  forward and backward in bfloat16, gradients of weights as ``tf32``     C / (1 + 0.02)
========  =====================================================================  ================

Norms and sums are float32 or better in each. Where a sum has rounded inputs its norm is taken of the rounded numbers;
where scaling them to the clip rounds again and the slack does not cover it, more is clipped (`clip_factors`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from tptopk.gradients import kernels
from tptopk.gradients.examples import Batch, MeanOverRows, PerExampleLoss, tensors_of
from tptopk.privacy.refusal import Refusal, nearest

STABILITY = 0.01  # γ of automatic clipping
CLIPPINGS = ("flat", "auto-s")
SMALLEST_FACTOR = 2.0**-100
SLACK = {"fp32": 0.0, "tf32": 2e-3, "bf16": 2e-2}


def check_clipping(clipping: str) -> None:
    if clipping not in CLIPPINGS:
        raise Refusal(f"unknown clipping {clipping!r}{nearest(str(clipping), CLIPPINGS)}")


def check_precision(precision: str) -> None:
    if precision not in SLACK:
        raise Refusal(f"unknown precision {precision!r}{nearest(str(precision), SLACK)}")


def slack(precision: str, device: torch.device) -> float:
    return 0.0 if precision == "tf32" and device.type != "cuda" else SLACK[precision]


def clip_factors(norms: Tensor, roundings: Tensor | float, clip_norm: float, slack: float) -> Tensor:
    """[B] factors after which a gradient of norm N, moved by up to r when it is scaled, has norm at most C.

    C / max(N (1 + slack), N + r), and at most 1. Zero where the norm is not finite, or 2¹⁰⁰ times C.
    """
    return _usable((clip_norm / torch.maximum(norms * (1 + slack), norms + roundings)).clamp(max=1.0), norms)


def automatic_factors(norms: Tensor, roundings: Tensor | float, clip_norm: float, slack: float) -> Tensor:
    """AUTO-S: every gradient is brought to a norm a little below C, C / (N + γ), instead of only the long ones.

    As `clip_factors` with N enlarged by what may be rounded, so that no example moves the sum by more than C.
    """
    return _usable(clip_norm / (torch.maximum(norms * (1 + slack), norms + roundings) + STABILITY), norms)


def _usable(factors: Tensor, norms: Tensor) -> Tensor:
    """Zero where the norm is not finite, or where float32 would round the factor up, as it does to its smallest numbers."""
    return torch.where(torch.isfinite(norms) & (factors >= SMALLEST_FACTOR), factors, 0.0)


@contextmanager
def computing_in(precision: str, device: torch.device) -> Iterator[None]:
    """torch's settings for a precision; somebody else's autocast must not round what is clipped and summed."""
    exact = precision == "fp32" or device.type != "cuda"
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


def forward_in(loss: PerExampleLoss, precision: str) -> PerExampleLoss:
    """The loss with its forward pass, and so its backward pass, in bfloat16 where the precision says so."""
    if precision != "bf16":
        return loss

    def reduced(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(tensors_of(batch)[0].device.type, dtype=torch.bfloat16):
            return inner(model, batch).float()

    inner = loss.of_a_row if isinstance(loss, MeanOverRows) else loss
    return MeanOverRows(reduced) if isinstance(loss, MeanOverRows) else reduced


def may_round(values: Tensor) -> bool:
    """Whether matrix products of these values have their inputs rounded to tf32."""
    return values.is_cuda and torch.get_float32_matmul_precision() != "highest"


def to_tf32(values: Tensor) -> Tensor:
    """Rounded to the nearest number of 11 significant bits; what is not finite stays so."""
    if kernels.usable(values):
        return cast(Tensor, kernels.round_to_tf32(values, None))
    bits = values.view(torch.int32)
    rounded = torch.bitwise_and(bits + 0x1000, ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values)


def scaled(values: Tensor, weights: Tensor, *, rounded: bool) -> Tensor:
    """[B, …] each example times its weight [B], rounded to tf32 if asked."""
    if not rounded:
        return values * weights.view(-1, *[1] * (values.dim() - 1))
    if kernels.usable(values):
        return cast(Tensor, kernels.round_to_tf32(values, weights))
    return to_tf32(values * weights.view(-1, *[1] * (values.dim() - 1)))


def in_two(values: Tensor) -> tuple[Tensor, Tensor]:
    """Two tf32 tensors whose sum is the float32 tensor, but for its last bit."""
    high = to_tf32(values)
    return high, values - high
