"""A Triton kernel for CUDA: per-example gradients of a convolution, their active coordinates and squared norms in one pass.

It reads windows where they lie instead of copying them, multiplies in tf32, and writes only what is to be kept. The
PyTorch path of `products.py` is its reference, and serves wherever Triton is not.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor


def usable(values: Tensor) -> bool:
    return values.is_cuda and importlib.util.find_spec("triton") is not None


@torch.library.custom_op("tptopk::write_products", mutates_args=())
def write_products(
    g: Tensor, base: Tensor, positions: Tensor, columns: Tensor, places: Tensor | None, keep: int, strides: list[int]
) -> tuple[Tensor, Tensor]:
    """[B, tiles] squared norms of Σ_t g[b, t] ⊗ x[b, t] on the active coordinates, and [B, keep] those coordinates.

    x[b, t, j] lies `positions[t] + columns[j]` elements after the start of base[b], whose strides must be `strides`;
    `places` [p, d] numbers the active coordinates from 0 and holds −1 elsewhere; None means that all are active.
    """
    if list(base.stride()) != strides:
        raise RuntimeError("the inputs lie in memory otherwise than their offsets say")
    (batch, count, p), d = g.shape, len(columns)
    rows, across, warps = (32, 128, 4) if p <= 32 else (64, 128, 4) if p <= 64 else (128, 128, 8)
    tiles = -(-p // rows) * -(-d // across)
    squares = torch.empty(batch, tiles, device=g.device)
    values = torch.empty(batch, keep, device=g.device)
    _kernel()[(tiles, batch)](
        g, base, positions, columns, places, values, squares, count, p, d, keep, *g.stride(), base.stride(0),
        MASKED=places is not None, KEEP=keep > 0, T_TILE=32, P_TILE=rows, D_TILE=across, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return squares, values


@write_products.register_fake
def _(
    g: Tensor, base: Tensor, positions: Tensor, columns: Tensor, places: Tensor | None, keep: int, strides: list[int]
) -> tuple[Tensor, Tensor]:
    p, d = g.shape[2], len(columns)
    rows = 32 if p <= 32 else 64 if p <= 64 else 128
    return g.new_empty(len(g), -(-p // rows) * -(-d // 128)), g.new_empty(len(g), keep)


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # Triton reads the kernel's names from the module

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]
        g, base, positions, columns, places, values, squares, count, p, d, keep, g_b, g_t, g_p, x_b,
        MASKED: tl.constexpr, KEEP: tl.constexpr, T_TILE: tl.constexpr, P_TILE: tl.constexpr, D_TILE: tl.constexpr,
    ):  # fmt: skip
        tile, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
        across = tl.cdiv(d, D_TILE)
        i = (tile // across) * P_TILE + tl.arange(0, P_TILE)
        j = (tile % across) * D_TILE + tl.arange(0, D_TILE)
        column = tl.load(columns + j, mask=j < d, other=0)
        total = tl.zeros((P_TILE, D_TILE), dtype=tl.float32)
        for start in range(0, count, T_TILE):
            t = start + tl.arange(0, T_TILE)
            position = tl.load(positions + t, mask=t < count, other=0)
            left = tl.load(
                g + b * g_b + i[:, None] * g_p + t[None, :] * g_t,
                mask=(i[:, None] < p) & (t[None, :] < count),
                other=0.0,
            )
            right = tl.load(
                base + b * x_b + column[:, None] + position[None, :],
                mask=(j[:, None] < d) & (t[None, :] < count),
                other=0.0,
            )
            total = tl.dot(left, tl.trans(right), total, input_precision="tf32")
        inside = (i[:, None] < p) & (j[None, :] < d)
        if MASKED:
            place = tl.load(places + i[:, None] * d + j[None, :], mask=inside, other=-1)
            total = tl.where(place >= 0, total, 0.0)
            if KEEP:
                tl.store(values + b * keep + place, total, mask=place >= 0)
        else:
            total = tl.where(inside, total, 0.0)
            if KEEP:
                tl.store(values + b * keep + i[:, None] * d + j[None, :], total, mask=inside)
        tl.store(squares + b * tl.num_programs(0) + tile, tl.sum(total * total))

    return kernel
