"""Gradients of a matrix known by their factors: Σ_t g_t ⊗ x_t over the positions t at which a layer used the matrix.

Ways to their norms, each exact, and what follows for the clipped sum (p × d the matrix, k of it active, T positions):

============  =====================================  ====================  ===========================================
way           when                                   the norms cost        then the clipped sum
============  =====================================  ====================  ===========================================
closed form   T = 1                                  p + d, masked 2pd     one matrix product over all examples
ghost         rows × columns active, T ≤ pd/2(p+d)   2T²(p + d)            one matrix product over all examples, positions
kept          otherwise, while the budget lasts      2Tpd                  the k written numbers, added up
recomputed    when it does not                       2Tpd                  one matrix product over all examples, positions
============  =====================================  ====================  ===========================================

A norm that comes out too small breaks the clip, so each way guards against it. Kept gradients are clipped as they
were written, whatever was rounded on the way. A sum that is made anew from g and x multiplies numbers that were
rounded before the norm was taken. Scaling them rounds again, and positions can cancel, so that what a rounding
adds is not bounded by the norm: `rounding` says how much it can be, or the scaled g goes in as two parts and nothing
is lost. At one position nothing cancels: rounding the scaled g and, under a mask, the squares of g moves the norm by
at most 2⁻¹⁰, which the slack of the clip covers. Ghost products cancel as well: in float32 mode they are added up in float64; in tf32 mode the norm is raised by the
most that rounding can have taken from it.

In float32 too a sum that is made anew is exact only to its largest terms: Σ_t g_t ⊗ x_t may be zero and its terms may be as
large as they like, and what float32 loses of them is not bounded by the norm. Where the terms are more than `CANCELS`
times their total, `rounding` says how much that can be. Kept gradients need none of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from tptopk.gradients import kernels
from tptopk.gradients.contributions import Budget, Dense, added_up, squared_norms_of
from tptopk.gradients.examples import beside
from tptopk.gradients.precision import in_two, may_round, scaled, to_tf32
from tptopk.supports.support import Shifting, Support

Axes = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides


@dataclass
class Windows:
    """The numbers x[b, t, j] that a matrix met, as they lie in memory: nothing is copied until it must be.

    Position t and column j are each several axes (a convolution's rows and columns; its channels, kernel rows and
    kernel columns) of a view that repeats elements of `base` [B, …].
    """

    base: Tensor
    positions: Axes
    columns: Axes

    @property
    def count(self) -> int:
        return math.prod(self.positions[0])

    @property
    def width(self) -> int:
        return math.prod(self.columns[0])

    @property
    def repeats(self) -> int:
        """In how many windows of one example an element can be."""
        return min(self.count, math.prod(self.columns[0][1:]))

    def written(self) -> Tensor:
        """[B, T, d]"""
        batch, base = len(self.base), self.base
        sizes = (batch, *self.columns[0], *self.positions[0])
        strides = (base.stride(0), *self.columns[1], *self.positions[1])
        if self.columns[1] == (1,):  # rows of a matrix: no window overlaps another
            return base.as_strided((batch, self.count, self.width), (base.stride(0), *self.positions[1], 1))
        view = base.as_strided(sizes, strides)
        if self._in_short_runs() and not view.is_contiguous():
            positions, columns = self.offsets()
            view = base.view(batch, -1).index_select(1, (columns[:, None] + positions).flatten())
        return view.reshape(batch, self.width, self.count).transpose(1, 2)

    def _in_short_runs(self) -> bool:
        """Whether a CPU copies so few neighbours at a time that fetching each number by its place is faster."""
        short = self.positions[0][-1] < SHORT or self.positions[1][-1] != 1
        return short and self.base.device.type == "cpu" and self.base.is_contiguous() and not get_proxy_mode()

    def folded(self, rows: int) -> Windows:
        """Every `rows` entries of the base become one, with that many times the positions."""
        sizes, strides = self.positions
        if self.columns[1] == (1,):  # its positions are one axis
            base = self.base.contiguous()
            base = base.reshape(-1, rows * base.shape[1], base.shape[2])
            return Windows(base, ((base.shape[1],), (base.stride(1),)), self.columns)
        base = self.base.view(-1, rows, *self.base.shape[1:])
        return Windows(base, ((rows, *sizes), (base.stride(1), *strides)), self.columns)

    def offsets(self) -> tuple[Tensor, Tensor]:
        """x[b, t, j] lies positions[t] + columns[j] elements after the start of base[b]."""
        return _offsets(self.positions, self.base.device), _offsets(self.columns, self.base.device)


@cache  # never dropped: recorded graphs read these tensors
def _offsets(axes: Axes, device: torch.device) -> Tensor:
    found = torch.zeros(1, dtype=torch.int32, device=device)
    for size, stride in zip(*axes, strict=True):
        found = (found[:, None] + stride * torch.arange(size, dtype=torch.int32, device=device)).flatten()
    return found


class Products:
    """Per-example gradients Σ_t g_t ⊗ x_t of one matrix."""

    def __init__(
        self,
        gradients: Tensor,
        inputs: Windows,
        shape: tuple[int, ...],
        library_sum: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """`gradients` [B, T, p]; `shape` is the parameter's own.

        `library_sum(g [B, T, p], base)` adds up g_t ⊗ x_t over examples and positions by the layer's own kernel.
        """
        self.g, self.x, self.shape = gradients, inputs, torch.Size(shape)
        self._library_sum = library_sum
        self._support: Support | None = None  # None where every coordinate is active
        self._name = ""
        self._rows: Tensor | None = None  # indices of rows and columns with an active coordinate; None: all
        self._columns: Tensor | None = None
        self._picked_before = False  # whether g and x hold active rows and columns alone
        self._is_product = True  # whether all that rows and columns cross is active
        self._kept: Dense | None = None
        self.rounding: Tensor | None = None  # [B] the most, squared, that rounding can add to an unclipped gradient
        self._factored: tuple[Tensor, Tensor] | None = None  # g [B, T, p'], x [B, T, d'] of active rows and columns

    def folded(self, rows: int) -> Products:
        positions, height = self.g.shape[1:]

        def library_sum(g: Tensor, base: Tensor) -> Tensor:
            assert self._library_sum is not None
            return self._library_sum(g.reshape(-1, positions, height), base.flatten(0, 1))

        g = self.g.reshape(-1, rows * positions, height)
        return Products(g, self.x.folded(rows), self.shape, library_sum if self._library_sum else None)

    def restrict(self, support: Support, name: str) -> None:
        self._support, self._name = support, name
        self._rows, self._columns, self._is_product = support.rows_and_columns(name)

    @property
    def way(self) -> str:
        """`written out` is then kept or recomputed."""
        if self.x.count == 1:
            return "closed form"
        p, d = self._height, self._width
        cheap = self._is_product and 2 * self.x.count * (p + d) <= p * d
        return "ghost" if cheap and not self._has_kernel else "written out"

    @property
    def _height(self) -> int:
        return self.g.shape[2] if self._rows is None else len(self._rows)

    @property
    def _width(self) -> int:
        return self.x.width if self._columns is None else len(self._columns)

    @property
    def _active(self) -> int:
        return self.shape.numel() if self._support is None else self._support.sizes[self._name]

    @property
    def _has_kernel(self) -> bool:
        """Windows that overlap are costly to copy, and the kernel reads them in place."""
        return may_round(self.g) and self.x.columns[1] != (1,) and kernels.usable(self.g)

    def squared_norms(self, budget: Budget) -> Tensor:
        if self.way == "closed form":
            return self._closed_form()
        if self.way == "ghost":
            return self._ghost()
        if self._is_product and self.x.columns[1] == (1,):
            self._shrink()
        own = self.g.numel() + self.x.base.numel()
        worth = WORTH_KEEPING["cuda" if self.g.is_cuda else "cpu"]
        if len(self.g) * self._active <= worth * own and budget.take(len(self.g) * self._active):
            norms, self._kept = self._written(keep=True)
            self._forget()
            return norms
        if may_round(self.g):
            self.g, self.x.base = to_tf32(self.g), to_tf32(self.x.base)
        squares = self._written(keep=False)[0]
        g, x = (
            torch.linalg.vector_norm(v, dim=tuple(range(1, v.dim())), dtype=torch.float64)
            for v in (self.g, self.x.base)
        )
        self.rounding = self._cancelling(squares, self.x.repeats * (1.01 * g * x).square())  # Cauchy and Schwarz
        return _in_range(squares, g, x)

    def _cancelling(self, squares: Tensor, most: Tensor) -> Tensor:
        """[B] what rounding can add, squared: each addition at most 2⁻²⁴ of what stands there, over an example's own positions
        and a block of a library's sum on either side, once in the norm and once in the sum. `most` is (Σ_t ‖g_t‖‖x_t‖)²."""
        additions = 2 * (self.x.count + BLOCK)
        return torch.where(most <= CANCELS**2 * squares, 0.0, (additions * 2.0**-24) ** 2 * most)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """g [B, T, p'] and x [B, T, d'] in active rows and columns only: what is not finite elsewhere must not matter."""
        return self._picked(self.g, self.x.written())

    def _picked(self, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._picked_before:
            return g, x
        g = g if self._rows is None else g.index_select(2, self._rows)
        return g, x if self._columns is None else x.index_select(2, self._columns)

    def _shrink(self) -> None:
        """Go on with the active rows and columns alone: a smaller matrix, of which all is active."""
        g, x = self._factors()
        x = x.contiguous()
        self.g, self.x = g, Windows(x, ((x.shape[1],), (x.stride(1),)), ((x.shape[2],), (1,)))
        self._picked_before = True

    def _forget(self) -> None:
        """Let go of what is no longer needed, now that gradients are kept or factors taken."""
        self.g = self.x.base = self.g.new_empty(0)

    def _closed_form(self) -> Tensor:
        """‖(g ⊗ x) ∘ M‖² = Σ_ij g_i² M_ij x_j²."""
        g, x = self._factors()
        self._factored = (to_tf32(g), to_tf32(x)) if may_round(g) else (g, x)
        self._forget()
        g, x = (factor[:, 0] for factor in self._factored)
        # What float32 squares lose of one factor may count beside a large other: at most 2⁻¹²⁶ for each number.
        if self._is_product or self._support is None:
            of_g, of_x = (squared_norms_of(v) + 2.0**-126 * v.shape[1] for v in (g, x))
            return of_g * of_x
        mask = self._support.as_numbers(self._name)  # [p', d'] of ones and zeros
        g_scale, x_scale = (v.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) for v in (g, x))
        products = ((g / g_scale).square() @ mask) * (x / x_scale).square()  # [B, d']
        scale = g_scale.double() * x_scale.double()
        squares = (products.double().sum(1) + 2.0**-125 * mask.numel()) * scale.square()[:, 0]
        return _in_range(squares, g_scale[:, 0], x_scale[:, 0])

    def _ghost(self) -> Tensor:
        """‖Σ_t g_t ⊗ x_t‖² = Σ_ts ⟨g_t, g_s⟩⟨x_t, x_s⟩."""
        g, x = self._factors()
        self._forget()
        if not may_round(g):
            self._factored = g, x
            gg, xx = (f.double() @ f.double().transpose(1, 2) for f in (g, x))
            inner, most = ghost(gg, xx)
            self.rounding = self._cancelling(inner.clamp(min=0.0), most)
            own = (f.diagonal(dim1=1, dim2=2).amax(1).sqrt() for f in (gg, xx))
            return _in_range(inner.clamp(min=0.0), *own)
        self._factored = g, x = to_tf32(g), to_tf32(x)
        gg, xx = (f @ f.transpose(1, 2) for f in (g, x))
        inner, most = kernels.ghost(gg, xx) if kernels.usable(g) else ghost(gg, xx)
        # Entries of gg and xx are sums of products in float32, of at least four to an addition.
        off = (g.shape[2] + x.shape[2]) / 4 * 2.0**-23 + 2.0**-20
        self.rounding = 2.0**-22 * most
        return inner.clamp(min=0.0) + off * most

    def _written(self, keep: bool) -> tuple[Tensor, Dense | None]:
        """Squared norms of the gradients written out; and their active coordinates [B, k], if they are kept."""
        picked = self._support is not None and not isinstance(self._support, Shifting)
        if self._has_kernel and not (keep and picked):
            squares, values = self._by_kernel(self.g, self.x, keep, self._support)
            return squares.double().sum(1), self._of_active(values) if keep else None
        batch = len(self.g)
        kept = self.g.new_empty(batch, self._active if keep else 0)
        squares = self.g.new_empty(batch, kernels.pick_tiles(self._active))
        norms = []
        few = get_proxy_mode() or self._has_kernel
        room = PIECE["few" if few else "cuda" if self.g.is_cuda else "cpu"]
        step = max(1, room // self._numbers_of_one())
        for piece in (slice(start, start + step) for start in range(0, batch, step)):
            values, active_alone = self._piece(self.g[piece], replace(self.x, base=self.x.base[piece]))
            if not active_alone and self._support is not None:
                if kernels.usable(values) and picked:
                    kernels.pick(values, self._support.indices(self._name), kept[piece], squares[piece])
                    continue
                values = self._support.pick(self._name, values)
            norms.append(squared_norms_of(values))
            if keep:
                kept[piece] = values
        return torch.cat(norms) if norms else squares.double().sum(1), self._of_active(kept) if keep else None

    def _numbers_of_one(self) -> int:
        """What one example writes on the way: its gradient, and its windows unless the kernel reads them in place."""
        return (self.g.shape[2] + (0 if self._has_kernel else self.x.count)) * self.x.width

    def _piece(self, g: Tensor, x: Windows) -> tuple[Tensor, bool]:
        """[b, n] some examples' gradients, and whether they hold active coordinates alone."""
        if self._has_kernel:
            return self._by_kernel(g, x, True, None)[1], False
        inputs = x.written()
        if self._support is None or self._is_product:
            g, inputs = self._picked(g, inputs)
            return torch.bmm(g.transpose(1, 2), inputs).flatten(1), True
        return torch.bmm(g.transpose(1, 2), inputs).flatten(1), False

    def _by_kernel(self, g: Tensor, x: Windows, keep: bool, support: Support | None) -> tuple[Tensor, Tensor]:
        mask = None if support is None else support[self._name].reshape(-1)
        squares, values = kernels.write_products(g, x.base, *x.offsets(), mask, keep, list(x.base.stride()))
        return squares, values

    def _of_active(self, values: Tensor) -> Dense:
        return Dense.of_active(values, self.shape, self._support, self._name)

    def weighted_sum(self, weights: Tensor, left_out: Tensor | None) -> Tensor:
        if self._kept is not None:
            return self._kept.weighted_sum(weights, left_out)
        if self._factored is not None:
            g, x = self._factored
            if left_out is not None:
                g, x = (v.masked_fill(left_out[:, None, None], 0.0) for v in (g, x))
            g = scaled(g, weights, rounded=may_round(g))
            total = added_up(len(g), lambda piece: g[piece].flatten(0, 1).T @ x[piece].flatten(0, 1))
            total = self._spread(total)
        else:
            g, x = self.g * weights[:, None, None], self.x.base
            if left_out is not None:
                g, x = g.masked_fill(left_out[:, None, None], 0.0), x.masked_fill(beside(left_out, x), 0.0)
            parts = in_two(g) if may_round(g) else (g,)
            sums = (added_up(len(g), lambda piece: self._whole_sum(part[piece], x[piece])) for part in parts)  # noqa: B023
            total = torch.stack(list(sums)).sum(0)
            total = self._spread(total) if self._picked_before else total.view(self.shape)
        if self._support is None or (self._is_product and self._factored is not None):
            return total
        return self._support.keep(self._name, total)

    def _whole_sum(self, g: Tensor, base: Tensor) -> Tensor:
        if self._library_sum is not None:
            return self._library_sum(g, base)
        return g.flatten(0, 1).T @ Windows(base, self.x.positions, self.x.columns).written().flatten(0, 1)

    def _spread(self, total: Tensor) -> Tensor:
        """Put rows and columns that were picked back into their places."""
        rows, columns = self.shape[0], self.shape[1:].numel()
        if self._columns is not None:
            total = total.new_zeros(len(total), columns).index_copy_(1, self._columns, total)
        if self._rows is not None:
            total = total.new_zeros(rows, columns).index_copy_(0, self._rows, total)
        return total.view(self.shape)

    def dense(self) -> Tensor:
        values = torch.bmm(self.g.transpose(1, 2), self.x.written()).view(len(self.g), *self.shape)
        return values if self._support is None else self._support.keep(self._name, values)


SHORT = 16  # neighbours
CANCELS = 256.0  # times its total that the terms of a gradient may be before rounding them counts
# norm of a factor from which on its example counts as not finite: about where float32 squares overflow
LARGEST = 2.0**64
BLOCK = 512  # products that a library adds up in one go, or somewhat fewer
# Written gradients are kept up to this many times the size of the layer's own input and output.
WORTH_KEEPING = {"cuda": 8, "cpu": 4}
# Numbers written out at once: what a cache can hold; few and large pieces where a program is traced, which has to be short, and
# for the kernel, which is slower in small ones.
PIECE = {"cpu": 2**21, "cuda": 2**23, "few": 2**26}


def ghost(gg: Tensor, xx: Tensor) -> tuple[Tensor, Tensor]:
    """[B] Σ_ts gg_ts xx_ts and (Σ_t √(gg_tt xx_tt))², which is (Σ_t ‖g_t‖‖x_t‖)², both in float64."""
    gg, xx = gg.double(), xx.double()
    lengths = (gg.diagonal(dim1=1, dim2=2) * xx.diagonal(dim1=1, dim2=2)).clamp(min=0.0).sqrt()
    return (gg * xx).sum((1, 2)), lengths.sum(1).square()


def _in_range(squares: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Squared norms, infinite where a factor is of a size beside which float32 loses what is scaled to the clip."""
    return torch.where((g < LARGEST) & (x < LARGEST), squares, torch.inf)
