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
        self.values = self.values.masked_fill(~mask, 0.0)

    def squared_norms(self) -> Tensor:
        return squared_norms_of(self.values)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        values = self.values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).reshape(len(weights), -1)  # [B, p]
        # On CUDA without a matrix product, which may be set to round its inputs (tf32) after the norms were taken.
        total = (values * weights[:, None]).sum(0) if values.is_cuda else weights @ values
        return total.view(self.values.shape[1:])

    def dense(self) -> Tensor:
        return self.values


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
