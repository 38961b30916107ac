"""Per-example gradients of one parameter, in the form that costs least to clip.

Life of a contribution: `restrict` to the support, `squared_norms`, then `weighted_sum` with the clip factors.
Values that are not finite are replaced by selection before they are weighted: 0 × NaN would be NaN.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Contribution(Protocol):
    def restrict(self, mask: Tensor) -> None:
        """Set inactive coordinates to zero, by selection."""

    def squared_norms(self) -> Tensor:
        """[B] in float64; not finite where an example's gradient is not."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_b weights[b] · gradient[b], where an example of weight 0 contributes nothing whatever it holds."""

    def dense(self) -> Tensor:
        """[B, *shape]"""


def squared_norms_of(values: Tensor) -> Tensor:
    """[B] squared norms of [B, …], added up in float64: float32 sums over 40 million coordinates come out 2% short."""
    norms: Tensor = torch.linalg.vector_norm(values.reshape(len(values), -1), dim=1, dtype=torch.float64)
    return norms.square()


class Dense:
    """Gradients written out: [B, *shape], owned and changed in place."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.float()

    def restrict(self, mask: Tensor) -> None:
        self.values.masked_fill_(~mask, 0.0)

    def squared_norms(self) -> Tensor:
        return squared_norms_of(self.values)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        values = self.values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).reshape(len(weights), -1)  # [B, p]
        # On CUDA without a matrix product, which may be set to round its inputs (tf32) after the norms were taken.
        total = (values * weights[:, None]).sum(0) if values.is_cuda else weights @ values
        return total.view(self.values.shape[1:])

    def dense(self) -> Tensor:
        return self.values


class Products:
    """Gradients of a matrix known by their factors: Σ_t g_t ⊗ x_t over the positions t at which the matrix was used.

    Three exact ways to their norms, chosen by cost (p × d the matrix, T positions, M the mask):

    ============  ==========================================  =======================================  =============
    way           when                                        ‖·‖²                                     operations
    ============  ==========================================  =======================================  =============
    closed form   one position                                Σ_ij g_i² M_ij x_j²                      2pd an example
    ghost         M full or rows × columns, few positions     Σ_ts ⟨g_t, g_s⟩⟨x_t, x_s⟩                2T²(p + d)
    written out   otherwise                                   of the [p, d] gradient, kept for reuse   2Tpd
    ============  ==========================================  =======================================  =============

    Without a gradient written out, the clipped sum is one matrix product over all examples and positions. Ghost
    products are added up in float64: they cancel, and in float32 a norm could come out too small.
    """

    def __init__(self, gradients: Tensor, inputs: Tensor, shape: tuple[int, ...]) -> None:
        """`gradients` [B, T, p], `inputs` [B, T, d]; `shape` is the parameter's own."""
        self.g, self.x, self.shape = gradients.float(), inputs.float(), shape
        self.mask: Tensor | None = None
        self.written: Dense | None = None

    def restrict(self, mask: Tensor) -> None:
        mask = mask.reshape(self.g.shape[2], self.x.shape[2])
        rows, columns = mask.any(1), mask.any(0)
        if not rows.all():
            self.g = self.g.masked_fill(~rows, 0.0)  # by selection: what is not finite there must not matter
        if not columns.all():
            self.x = self.x.masked_fill(~columns, 0.0)
        self.mask = None if bool((mask == torch.outer(rows, columns)).all()) else mask

    @property
    def way(self) -> str:
        positions, p, d = self.g.shape[1], self.g.shape[2], self.x.shape[2]
        if positions == 1:
            return "closed form"
        return "ghost" if self.mask is None and 2 * positions * (p + d) <= p * d else "written out"

    def squared_norms(self) -> Tensor:
        if self.way == "ghost":
            g, x = self.g.double(), self.x.double()
            return ((g @ g.transpose(1, 2)) * (x @ x.transpose(1, 2))).sum((1, 2)).clamp(min=0.0)
        if self.way == "written out":
            self.written = Dense(self.dense())
            return self.written.squared_norms()
        g, x = self.g[:, 0], self.x[:, 0]  # [B, p], [B, d]
        g_scale, x_scale = (v.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) for v in (g, x))
        g, x = (g / g_scale).square(), (x / x_scale).square()  # in [0, 1]: no square is lost to underflow
        total = (
            g.double().sum(1) * x.double().sum(1)
            if self.mask is None
            else ((g @ self.mask.float()) * x).double().sum(1)
        )
        return total * (g_scale.double() * x_scale.double()).square()[:, 0]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.written is not None:
            return self.written.weighted_sum(weights).view(self.shape)
        counted = (weights > 0)[:, None, None]
        g = torch.where(counted, self.g * weights[:, None, None], 0.0).flatten(0, 1)
        x = torch.where(counted, self.x, 0.0).flatten(0, 1)
        total = g.T @ x
        return (total if self.mask is None else total.masked_fill(~self.mask, 0.0)).view(self.shape)

    def dense(self) -> Tensor:
        values = torch.bmm(self.g.transpose(1, 2), self.x)
        values = values if self.mask is None else values.masked_fill_(~self.mask, 0.0)
        return values.view(len(values), *self.shape)


class Rows:
    """Gradients of a table of which each example touches few rows: memory grows with what is touched, not with B × table."""

    def __init__(self, example: Tensor, row: Tensor, values: Tensor, batch: int, rows: int) -> None:
        """Occurrence n adds values[n] to row[n] of example[n]'s gradient; repeats of a pair are summed here."""
        pairs, position = torch.unique(example * rows + row, return_inverse=True)
        self.example, self.row = pairs // rows, pairs % rows
        self.values = values.new_zeros(len(pairs), values.shape[1]).index_add_(0, position, values)  # [n, D]
        self.batch, self.rows = batch, rows

    def restrict(self, mask: Tensor) -> None:
        self.values = self.values.masked_fill(~mask[self.row], 0.0)

    def squared_norms(self) -> Tensor:
        squares = squared_norms_of(self.values)
        return squares.new_zeros(self.batch).index_add_(0, self.example, squares)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        values = self.values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * weights[self.example, None]
        return values.new_zeros(self.rows, values.shape[1]).index_add_(0, self.row, values)

    def dense(self) -> Tensor:
        values = self.values.new_zeros(self.batch, self.rows, self.values.shape[1])
        values[self.example, self.row] = self.values
        return values
