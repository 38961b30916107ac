"""Triton kernels for CUDA, each one pass over memory where PyTorch takes several.

`write_products` makes a convolution's per-example gradients from its windows where they lie, in tf32, and squares them;
`pick` takes the active coordinates out of gradients and squares them; `round_to_tf32` scales and rounds. The PyTorch paths
of `products.py` and `precision.py` are their references, and serve wherever Triton is not.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor


def usable(values: Tensor) -> bool:
    return values.is_cuda and _installed()


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@torch.library.custom_op("tptopk::write_products", mutates_args=())
def write_products(
    g: Tensor,
    base: Tensor,
    positions: Tensor,
    columns: Tensor,
    mask: Tensor | None,
    keep: bool,
    strides: list[int],
) -> tuple[Tensor, Tensor]:
    """[B, tiles] squared norms of Σ_t g[b, t] ⊗ x[b, t], and [B, p·d] those gradients themselves if they are to be kept.

    x[b, t, j] lies `positions[t] + columns[j]` elements after the start of base[b], whose strides must be `strides`.
    With a mask, p·d booleans, zero is written where it is false. (Writing the active coordinates alone, side by side,
    takes more than twice as long as writing all: picking them out afterwards is quicker.)
    """
    if list(base.stride()) != strides:
        raise RuntimeError("the inputs lie in memory otherwise than their offsets say")
    (batch, count, p), d = g.shape, len(columns)
    rows, tiles = _tiling(p, d)
    squares = torch.empty(batch, tiles, device=g.device)
    values = torch.empty(batch, p * d if keep else 0, device=g.device)
    _kernels().write[(tiles * batch,)](
        g, base, positions, columns, None if mask is None else mask.view(torch.uint8), values, squares,
        tiles, count, p, d, *g.stride(), base.stride(0), MASKED=mask is not None, KEEP=keep,
        T_TILE=32, P_TILE=rows, D_TILE=ACROSS, num_warps=8 if p > 64 else 4, num_stages=2 if p > 64 else 1,
    )  # fmt: skip
    return squares, values


@write_products.register_fake
def _(
    g: Tensor,
    base: Tensor,
    positions: Tensor,
    columns: Tensor,
    mask: Tensor | None,
    keep: bool,
    strides: list[int],
) -> tuple[Tensor, Tensor]:
    p, d = g.shape[2], len(columns)
    return g.new_empty(len(g), _tiling(p, d)[1]), g.new_empty(len(g), p * d if keep else 0)


def _tiling(p: int, d: int) -> tuple[int, int]:
    """Rows of a tile of a matrix p × d, and how many tiles it has."""
    rows = 32 if p <= 32 else 64 if p <= 64 else 128
    return rows, -(-p // rows) * -(-d // ACROSS)


@torch.library.custom_op("tptopk::pick", mutates_args=("picked", "squares"))
def pick(values: Tensor, indices: Tensor, picked: Tensor, squares: Tensor) -> None:
    """Writes values[:, indices] to `picked` [B, k], if it has room for them, and their squares' sums to `squares` [B, tiles]."""
    (batch, width), k = values.shape, len(indices)
    tiles = squares.shape[1]
    _kernels().pick[(tiles * batch,)](
        values, indices, picked, squares, tiles, width, k, KEEP=picked.shape[1] > 0, TILE=PICK_TILE
    )


def pick_tiles(k: int) -> int:
    return -(-k // PICK_TILE)


@torch.library.custom_op("tptopk::round_to_tf32", mutates_args=())
def round_to_tf32(values: Tensor, weights: Tensor | None) -> Tensor:
    """values [B, …] times weights [B], if given, rounded to 11 significant bits; contiguous."""
    values = values.contiguous()
    rounded = torch.empty_like(values)
    each = values.numel() // max(1, len(values))
    if each:
        tiles = -(-each // ROUND_TILE)
        _kernels().round[(tiles * len(values),)](
            values, weights, rounded, tiles, each, WEIGHTED=weights is not None, TILE=ROUND_TILE
        )
    return rounded


@round_to_tf32.register_fake
def _(values: Tensor, weights: Tensor | None) -> Tensor:
    return values.new_empty(values.shape)


@torch.library.custom_op("tptopk::ghost", mutates_args=())
def ghost(gg: Tensor, xx: Tensor) -> tuple[Tensor, Tensor]:
    """`products.ghost` in one pass."""
    batch, count, _ = gg.shape
    inner, most = (torch.empty(batch, dtype=torch.float64, device=gg.device) for _ in range(2))
    _kernels().ghost[(batch,)](gg.contiguous(), xx.contiguous(), inner, most, count, TILE=1024)
    return inner, most


@ghost.register_fake
def _(gg: Tensor, xx: Tensor) -> tuple[Tensor, Tensor]:
    return gg.new_empty(len(gg), dtype=torch.float64), gg.new_empty(len(gg), dtype=torch.float64)


ACROSS, PICK_TILE, ROUND_TILE = 128, 1024, 4096


@cache
def _kernels() -> SimpleNamespace:
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # Triton reads the kernel's names from the module

    @triton.jit  # type: ignore[untyped-decorator]
    def write(  # type: ignore[no-untyped-def]
        g, base, positions, columns, mask, values, squares, tiles, count, p, d, g_b, g_t, g_p, x_b,
        MASKED: tl.constexpr, KEEP: tl.constexpr, T_TILE: tl.constexpr, P_TILE: tl.constexpr, D_TILE: tl.constexpr,
    ):  # fmt: skip
        tile, b = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
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
        place = i[:, None] * d + j[None, :]
        counts = inside
        if MASKED:
            counts = tl.load(mask + place, mask=inside, other=0) != 0
        total = tl.where(counts, total, 0.0)
        if KEEP:
            tl.store(values + b * p * d + place, total, mask=inside)
        tl.store(squares + b * tiles + tile, tl.sum(total * total))

    @triton.jit  # type: ignore[untyped-decorator]
    def pick(values, indices, picked, squares, tiles, width, k, KEEP: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        tile, b = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
        n = tile * TILE + tl.arange(0, TILE)
        place = tl.load(indices + n, mask=n < k, other=0)
        value = tl.load(values + b * width + place, mask=n < k, other=0.0)
        if KEEP:
            tl.store(picked + b * k + n, value, mask=n < k)
        tl.store(squares + b * tiles + tile, tl.sum(value * value))

    @triton.jit  # type: ignore[untyped-decorator]
    def round(values, weights, rounded, tiles, each, WEIGHTED: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        tile, b = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
        n = tile * TILE + tl.arange(0, TILE)
        value = tl.load(values + b * each + n, mask=n < each, other=0.0)
        if WEIGHTED:
            value = value * tl.load(weights + b)
        bits = (value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        finite = tl.abs(value) < float("inf")  # false for NaN too
        tl.store(rounded + b * each + n, tl.where(finite, bits.to(tl.float32, bitcast=True), value), mask=n < each)

    @triton.jit  # type: ignore[untyped-decorator]
    def ghost(gg, xx, inner, most, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        b = tl.program_id(0).to(tl.int64)
        products = tl.zeros((TILE,), dtype=tl.float64)
        lengths = tl.zeros((TILE,), dtype=tl.float64)
        for start in range(0, count * count, TILE):
            n = start + tl.arange(0, TILE)
            left = tl.load(gg + b * count * count + n, mask=n < count * count, other=0.0).to(tl.float64)
            right = tl.load(xx + b * count * count + n, mask=n < count * count, other=0.0).to(tl.float64)
            products += left * right
            diagonal = (n % (count + 1)) == 0
            lengths += tl.where(diagonal, tl.sqrt(tl.maximum(left * right, 0.0)), 0.0)
        length = tl.sum(lengths)
        tl.store(inner + b, tl.sum(products))
        tl.store(most + b, length * length)

    return SimpleNamespace(write=write, pick=pick, round=round, ghost=ghost)
