"""Per-example gradients of one parameter, in the form that costs least to clip.

Life of a contribution: `restrict` to the support, `squared_norms`, then `weighted_sum` with the clip factors. An
example whose gradient is not finite gets the factor 0 and is left out by selection: 0 × NaN would be NaN.
`products.py` has the form that most layers take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tptopk.supports.support import Support

CHUNK = 4096  # coordinates added up in float32 before float64 takes over
EXAMPLES = 128  # examples added up in float32 before float64 takes over


class Budget:
    """Bytes of per-example gradients that may still be kept, from the norms to the clipped sum, to be used again."""

    def __init__(self, limit: int | None) -> None:
        self._left = limit

    def take(self, numbers: int) -> bool:
        """Take room for that many float32 numbers, if there is room."""
        if self._left is None:
            return True
        fits = 4 * numbers <= self._left
        self._left -= 4 * numbers if fits else 0
        return fits


class Contribution(Protocol):
    rounding: Tensor | None  # [B] the most, squared, that rounding can still add to an unclipped gradient

    def folded(self, rows: int) -> Contribution:
        """Every `rows` examples in a row become one, whose gradient is the sum of theirs."""

    def restrict(self, support: Support, name: str) -> None:
        """Leave out the inactive coordinates of parameter `name`, by selection."""

    def squared_norms(self, budget: Budget) -> Tensor:
        """[B] in float64; not finite where an example's gradient is not. May keep gradients that fit the budget."""

    def weighted_sum(self, weights: Tensor, left_out: Tensor | None) -> Tensor:
        """Σ_b weights[b] · gradient[b]; `left_out` [B] marks examples that must not count whatever they hold."""

    def dense(self) -> Tensor:
        """[B, *shape]"""


def squared_norms_of(values: Tensor) -> Tensor:
    """[B] squared norms of [B, …]: float32 within a chunk, float64 across chunks.

    Float32 sums over 40 million coordinates come out 2% short, and a norm that is too small breaks the clip.
    """
    flat = values.reshape(len(values), -1)
    whole = flat.shape[1] // CHUNK * CHUNK
    rest: Tensor = torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square()
    if not whole:
        return rest
    chunks: Tensor = torch.linalg.vector_norm(flat[:, :whole].reshape(len(flat), -1, CHUNK), dim=2)
    return chunks.double().square().sum(1) + rest


def added_up(batch: int, part: Callable[[slice], Tensor]) -> Tensor:
    """Σ of `part` over slices of a batch, in float64 from the second on."""
    if batch <= EXAMPLES:
        return part(slice(None))
    total = part(slice(0, EXAMPLES)).double()
    for start in range(EXAMPLES, batch, EXAMPLES):
        total += part(slice(start, start + EXAMPLES))
    return total


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Σ_b weights[b] · values[b], as `added_up` does it, in two calls."""
    whole = len(weights) // EXAMPLES * EXAMPLES
    if len(weights) <= EXAMPLES:
        return weights @ values
    blocks = torch.bmm(weights[:whole].view(-1, 1, EXAMPLES), values[:whole].view(-1, EXAMPLES, values.shape[1]))
    return blocks[:, 0].sum(0, dtype=torch.float64) + weights[whole:] @ values[whole:]


class Dense:
    """Gradients written out, [B, *shape]; once restricted, only their active coordinates, [B, k]."""

    rounding: Tensor | None = None

    def __init__(self, values: Tensor) -> None:
        self.values = values.float()
        self.shape = values.shape[1:]
        self.active: Tensor | None = None  # flat indices of the coordinates kept

    @classmethod
    def of_active(cls, values: Tensor, shape: tuple[int, ...], support: Support | None, name: str) -> Dense:
        """Gradients of which only the active coordinates were ever written, [B, k]; without a support all of them."""
        found = cls(values)
        found.shape, found.active = torch.Size(shape), None if support is None else support.indices(name)
        return found

    def folded(self, rows: int) -> Dense:
        return Dense(self.values.view(-1, rows, *self.values.shape[1:]).sum(1))

    def restrict(self, support: Support, name: str) -> None:
        self.active = support.indices(name)
        self.values = support.pick(name, self.values.reshape(len(self.values), -1))

    def squared_norms(self, budget: Budget) -> Tensor:
        return squared_norms_of(self.values)

    def weighted_sum(self, weights: Tensor, left_out: Tensor | None) -> Tensor:
        values = self.values.reshape(len(weights), -1)  # [B, k]
        if left_out is not None:
            values = values.masked_fill(left_out[:, None], 0.0)
        total = weighted(weights, values)
        if self.active is None:
            return total.view(self.shape)
        return total.new_zeros(self.shape.numel()).index_copy_(0, self.active, total).view(self.shape)

    def dense(self) -> Tensor:
        if self.active is None:
            return self.values
        flat = self.values.new_zeros(len(self.values), self.shape.numel()).index_copy_(1, self.active, self.values)
        return flat.view(-1, *self.shape)


class Rows:
    """Gradients of a table of which each example touches few rows: memory grows with what is touched, not with B × table."""

    rounding: Tensor | None = None

    def __init__(self, example: Tensor, row: Tensor, values: Tensor, batch: int, rows: int) -> None:
        """Occurrence n adds values[n] to row[n] of example[n]'s gradient."""
        self.example, self.row, self.values, self.batch, self.rows = example, row, values, batch, rows

    def folded(self, rows: int) -> Rows:
        return Rows(self.example // rows, self.row, self.values, self.batch // rows, self.rows)

    def restrict(self, support: Support, name: str) -> None:
        self.values = self.values.masked_fill(~support[name][self.row], 0.0)

    def squared_norms(self, budget: Budget) -> Tensor:
        """Also adds up what an example has of one row: its gradient there, which is then scaled as it was measured.

        In the order in which it stands, whatever other examples hold: where terms cancel, another order is another sum.
        """
        pairs, order = torch.sort(self.example * self.rows + self.row, stable=True)
        first = torch.ones_like(pairs, dtype=torch.bool)
        first[1:] = pairs[1:] != pairs[:-1]
        group = first.cumsum(0) - 1
        summed = torch.zeros_like(self.values).index_add_(0, group, self.values[order])
        pair = torch.zeros_like(pairs).index_copy_(0, group, pairs)  # groups past the last hold zeros
        self.example, self.row, self.values = pair // self.rows, pair % self.rows, summed
        return squared_norms_of(summed).new_zeros(self.batch).index_add_(0, self.example, squared_norms_of(summed))

    def weighted_sum(self, weights: Tensor, left_out: Tensor | None) -> Tensor:
        values = self.values * weights[self.example, None]
        if left_out is not None:
            values = values.masked_fill(left_out[self.example, None], 0.0)
        wide = torch.float64 if len(weights) > EXAMPLES else torch.float32
        return values.new_zeros(self.rows, values.shape[1], dtype=wide).index_add_(0, self.row, values.to(wide))

    def dense(self) -> Tensor:
        values = self.values.new_zeros(self.batch * self.rows, self.values.shape[1])
        values.index_add_(0, self.example * self.rows + self.row, self.values)
        return values.view(self.batch, self.rows, -1)
