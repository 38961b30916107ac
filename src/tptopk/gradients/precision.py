"""Number formats: what may be rounded while gradients are computed, and by how much less is clipped for it.

========  =====================================================================  ================
name      matrix products and convolutions                                       clipped to
========  =====================================================================  ================
``fp32``  in float32, also where a GPU would round by itself                     C
``tf32``  on a GPU with inputs rounded to 11 bits; elsewhere as ``fp32``         C / (1 + 0.002)
``bf16``  forward and backward in bfloat16, gradients of weights as ``tf32``     C / (1 + 0.02)
========  =====================================================================  ================

Norms and sums are float32 or better in each. Where a sum has a rounded input its norm is taken of the rounded numbers
(`to_tf32`, `in_two`), so that the slack has to cover only what does not cancel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tptopk.gradients.examples import Batch, PerExampleLoss, tensors_of
from tptopk.privacy.refusal import Refusal, nearest

SLACK = {"fp32": 0.0, "tf32": 2e-3, "bf16": 2e-2}


def check_precision(precision: str) -> None:
    if precision not in SLACK:
        raise Refusal(f"unknown precision {precision!r}{nearest(str(precision), SLACK)}")


def clip_within(clip_norm: float, precision: str, device: torch.device) -> float:
    """The norm to clip to, so that what was rounded still has norm at most `clip_norm`."""
    return clip_norm / (1 + (0.0 if precision == "tf32" and device.type != "cuda" else SLACK[precision]))


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
            return loss(model, batch).float()

    return reduced


def may_round(values: Tensor) -> bool:
    """Whether matrix products of these values have their inputs rounded to tf32."""
    return values.is_cuda and torch.get_float32_matmul_precision() != "highest"


def to_tf32(values: Tensor) -> Tensor:
    """Rounded to the nearest number of 11 significant bits; what is not finite stays so."""
    bits = values.view(torch.int32)
    rounded = torch.bitwise_and(bits + 0x1000, ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values)


def in_two(values: Tensor) -> tuple[Tensor, Tensor]:
    """Two tf32 tensors whose sum is the float32 tensor, but for its last bit."""
    high = to_tf32(values)
    return high, values - high
