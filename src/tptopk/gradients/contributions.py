"""Per-example gradients of one parameter, in the form that costs least to clip.

Life of a contribution: `restrict` to the support, `squared_norms`, then `weighted_sum` with the clip factors. An
example whose gradient is not finite gets the factor 0 and is left out by selection: 0 × NaN would be NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from tptopk.supports.support import Support

CHUNK = 4096  # coordinates added up in float32 before float64 takes over


class Contribution(Protocol):
    def restrict(self, support: Support, name: str) -> None:
        """Leave out the inactive coordinates of parameter `name`, by selection."""

    def squared_norms(self) -> Tensor:
        """[B] in float64; not finite where an example's gradient is not."""

    def weighted_sum(self, weights: Tensor, left_out: Tensor | None) -> Tensor:
        """Σ_b weights[b] · gradient[b]; `left_out` [B] marks examples that must not count whatever they hold."""

    def dense(self) -> Tensor:
        """[B, *shape]"""


@contextmanager
def float32_matmul(precision: str) -> Iterator[None]:
    """Matrix products at `highest` (inputs as they are) or `high` (inputs may be rounded to tf32 on a GPU)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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


class Dense:
    """Gradients written out, [B, *shape]; once restricted, only their active coordinates, [B, k]."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.float()
        self.shape = values.shape[1:]
        self.active: Tensor | None = None  # flat indices of the coordinates kept

    def restrict(self, support: Support, name: str) -> None:
        self.active = support.indices(name)
        self.values = self.values.reshape(len(self.values), -1).index_select(1, self.active)

    def squared_norms(self) -> Tensor:
        return squared_norms_of(self.values)

    def weighted_sum(self, weights: Tensor, left_out: Tensor | None) -> Tensor:
        values = self.values.reshape(len(weights), -1)  # [B, k]
        if left_out is not None:
            values = values.masked_fill(left_out[:, None], 0.0)
        total = weights @ values
        if self.active is None:
            return total.view(self.shape)
        return total.new_zeros(self.shape.numel()).index_copy_(0, self.active, total).view(self.shape)

    def dense(self) -> Tensor:
        if self.active is None:
            return self.values
        flat = self.values.new_zeros(len(self.values), self.shape.numel()).index_copy_(1, self.active, self.values)
        return flat.view(-1, *self.shape)


class Products:
    """Gradients of a matrix known by their factors: Σ_t g_t ⊗ x_t over the positions t at which the matrix was used.

    Three exact ways to their norms, chosen by cost (p × d the matrix, T positions, M the mask):

    ============  ==========================================  =======================================  ===============
    way           when                                        ‖·‖²                                     an example costs
    ============  ==========================================  =======================================  ===============
    closed form   one position                                Σ_ij g_i² M_ij x_j²                      2pd (dense p + d)
    ghost         M full or rows × columns, few positions     Σ_ts ⟨g_t, g_s⟩⟨x_t, x_s⟩                2T²(p + d)
    written out   otherwise                                   of the [p, d] gradient, kept for reuse   2Tpd
    ============  ==========================================  =======================================  ===============

    Without a gradient written out, the clipped sum is one matrix product over all examples and positions. Ghost
    products are added up in float64: they cancel, and in float32 a norm could come out too small.
    """

    def __init__(self, gradients: Tensor, inputs: Tensor | Callable[[], Tensor], shape: tuple[int, ...]) -> None:
        """`gradients` [B, T, p], `inputs` [B, T, d] or a function that makes them; `shape` is the parameter's own.

        Inputs that are made (a convolution's windows, many times its input) live only while they are used.
        """
        self.g, self._inputs, self.shape = gradients.float(), inputs, torch.Size(shape)
        self.mask: Tensor | None = None  # [p, d] of ones and zeros; None where all of what is left is active
        self.written: Dense | None = None
        self._rows: Tensor | None = None
        self._columns: Tensor | None = None
        self._support: tuple[Support, str] | None = None

    def _raw(self) -> Tensor:
        return self._inputs().float() if callable(self._inputs) else self._inputs.float()

    def _factors(self) -> tuple[Tensor, Tensor]:
        """g [B, T, p] and x [B, T, d], zero in rows and columns without an active coordinate.

        By selection: what is not finite there must not matter. Gradients that are written out need none of it,
        because their active coordinates are picked one by one.
        """
        g, x = self.g, self._raw()
        g = g if self._rows is None else g.masked_fill(~self._rows, 0.0)
        return g, x if self._columns is None else x.masked_fill(~self._columns, 0.0)

    def restrict(self, support: Support, name: str) -> None:
        self._rows, self._columns, is_product = support.rows_and_columns(name)
        self._support = support, name
        if not is_product:
            self.mask = support.as_numbers(name)

    @property
    def way(self) -> str:
        positions, p, d = self.g.shape[1], self.g.shape[2], self.shape[1:].numel()
        if positions == 1:
            return "closed form"
        return "ghost" if self.mask is None and 2 * positions * (p + d) <= p * d else "written out"

    def squared_norms(self) -> Tensor:
        if self.way == "ghost":
            g, x = (factor.double() for factor in self._factors())
            return ((g @ g.transpose(1, 2)) * (x @ x.transpose(1, 2))).sum((1, 2)).clamp(min=0.0)
        if self.way == "written out":
            self.written = Dense(self._outer())
            if self._support is not None:
                self.written.restrict(*self._support)
            self.g = self.g[:, :0]  # no longer needed
            return self.written.squared_norms()
        g, x = (factor[:, 0] for factor in self._factors())  # [B, p], [B, d]
        if self.mask is None:
            return squared_norms_of(g) * squared_norms_of(x)
        g_scale, x_scale = (v.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) for v in (g, x))
        products = ((g / g_scale).square() @ self.mask) * (x / x_scale).square()  # [B, d], no square underflows
        return products.double().sum(1) * (g_scale.double() * x_scale.double()).square()[:, 0]

    def weighted_sum(self, weights: Tensor, left_out: Tensor | None) -> Tensor:
        if self.written is not None:
            return self.written.weighted_sum(weights, left_out).view(self.shape)
        g, x = self._factors()
        g = g * weights[:, None, None]
        if left_out is not None:
            g, x = (v.masked_fill(left_out[:, None, None], 0.0) for v in (g, x))
        total = g.flatten(0, 1).T @ x.flatten(0, 1)
        return (total if self.mask is None else total.mul_(self.mask)).view(self.shape)

    def _outer(self) -> Tensor:
        """[B, p, d]. A convolution's may round as cuDNN's own would (tf32): it is clipped as it comes out."""
        as_cudnn = callable(self._inputs) and self.g.is_cuda and torch.backends.cudnn.allow_tf32
        with float32_matmul("high" if as_cudnn else torch.get_float32_matmul_precision()):
            return torch.bmm(self.g.transpose(1, 2), self._raw())

    def dense(self) -> Tensor:
        values = self._outer().view(len(self.g), *self.shape)
        return values if self._support is None else self._support[0].keep(self._support[1], values)


class Rows:
    """Gradients of a table of which each example touches few rows: memory grows with what is touched, not with B × table."""

    def __init__(self, example: Tensor, row: Tensor, values: Tensor, batch: int, rows: int) -> None:
        """Occurrence n adds values[n] to row[n] of example[n]'s gradient; repeats of a pair are summed here."""
        pairs, position = torch.unique(example * rows + row, return_inverse=True)
        self.example, self.row = pairs // rows, pairs % rows
        self.values = values.new_zeros(len(pairs), values.shape[1]).index_add_(0, position, values)  # [n, D]
        self.batch, self.rows = batch, rows

    def restrict(self, support: Support, name: str) -> None:
        self.values = self.values.masked_fill(~support[name][self.row], 0.0)

    def squared_norms(self) -> Tensor:
        squares = squared_norms_of(self.values)
        return squares.new_zeros(self.batch).index_add_(0, self.example, squares)

    def weighted_sum(self, weights: Tensor, left_out: Tensor | None) -> Tensor:
        values = self.values * weights[self.example, None]
        if left_out is not None:
            values = values.masked_fill(left_out[self.example, None], 0.0)
        return values.new_zeros(self.rows, values.shape[1]).index_add_(0, self.row, values)

    def dense(self) -> Tensor:
        values = self.values.new_zeros(self.batch, self.rows, self.values.shape[1])
        values[self.example, self.row] = self.values
        return values
