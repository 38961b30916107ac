"""The one entry: a batch and a support in, a clipped sum out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tptopk.gradients.capture import Capture
from tptopk.gradients.contributions import EXAMPLES, Budget, Contribution, Dense, squared_norms_of, weighted
from tptopk.gradients.examples import (
    Batch,
    PerExampleLoss,
    batch_length,
    checked_losses,
    per_example,
    rows_of,
    tensors_of,
)
from tptopk.gradients.precision import (
    STABILITY,
    automatic_factors,
    check_clipping,
    check_precision,
    clip_factors,
    computing_in,
    forward_in,
    slack,
)
from tptopk.gradients.reference import reference_clipped_sum
from tptopk.gradients.vmap import vmap_contributions
from tptopk.privacy.plan import SMALLEST_CLIP_NORM
from tptopk.privacy.refusal import Refusal, check_number, nearest
from tptopk.supports.support import Support, trainable

SMALL = 2**14  # coordinates of a parameter whose written gradients are put side by side with others
ENGINES = ("capture", "vmap", "reference")


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """Σ_i clip(m ⊙ g_i, C) over the examples of a batch, zero outside the support. Not private yet.

    `flat` holds the trainable parameters' values laid end to end, in the model's order; in float64 where sums were added up,
    since in float32 a long sum loses more than an example's share.
    """

    flat: Tensor
    shapes: Mapping[str, torch.Size]
    clip_norm: float

    @property
    def values(self) -> dict[str, Tensor]:
        return split(self.flat, self.shapes)

    def sensitivity(self) -> float:
        """How far one example more or less can move the sum, in l2 norm, whatever the support."""
        return self.clip_norm

    def __add__(self, other: ClippedSum) -> ClippedSum:
        if other.clip_norm != self.clip_norm:
            raise ValueError("sums clipped at different norms do not add up to a sum of known sensitivity")
        return ClippedSum(self.flat.double() + other.flat.double(), self.shapes, self.clip_norm)


def split(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Views of a flat tensor in the parameters' shapes."""
    parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in trainable(model).items()}


def clipped_sum(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Batch,
    support: Support,
    clip_norm: float,
    *,
    engine: str = "capture",
    precision: str = "fp32",
    memory_limit: int | None = None,
    clipping: str = "flat",
) -> ClippedSum:
    """Mask, then clip, then sum: Σ_i (m ⊙ g_i) · min(1, C / ‖m ⊙ g_i‖₂).

    Formal guarantees: each example adds a vector of norm at most C, up to float32 rounding, whatever the support,
    the model or the example.

    ==========================================  =====================================================
    edge case                                   what happens
    ==========================================  =====================================================
    no example                                  a sum of zeros; the model is not run
    an example's masked gradient is not finite  the example adds zero, by selection
    an example's masked gradient is zero        it adds zero
    an inactive coordinate is not finite        it does not matter
    empty support                               zeros
    ==========================================  =====================================================

    `engine` is ``capture`` (rules per layer; refuses what it cannot do right), ``vmap`` (any model that torch.func
    can batch) or ``reference`` (one example at a time). `probe.choose_engine` finds the fastest that is right.
    `clipping` is ``flat``, or ``auto-s``, which scales by C / (‖m ⊙ g_i‖₂ + 0.01) instead (automatic clipping).
    `precision` is ``fp32``, ``tf32`` or ``bf16`` (`gradients/precision.py`).
    `memory_limit` bounds, in bytes, the per-example gradients kept from the norms to the sum; by default a layer's are
    kept where they take at most eight times (on a CPU four) as much as its input and output. What is not kept is computed again.
    """
    check_number("clip_norm", clip_norm, least=SMALLEST_CLIP_NORM)
    check_precision(precision)
    check_clipping(clipping)
    if engine not in ENGINES:
        raise Refusal(f"unknown engine {engine!r}{nearest(str(engine), ENGINES)}")
    losses = forward_in(per_example(loss), precision)
    if batch_length(batch) == 0:
        return zero_sum(model, clip_norm)
    _refuse_other_devices(model, batch)
    device = tensors_of(batch)[0].device
    with computing_in(precision, device):
        if engine == "reference":
            values = reference_clipped_sum(
                model, losses, batch, support, clip_norm, STABILITY if clipping == "auto-s" else None
            )
            return ClippedSum(torch.cat([v.flatten() for v in values.values()]), shapes_of(model), clip_norm)
        clip = Clip(support, clipping)
        gather(model, losses, batch, engine, clip, memory_limit)
        weights, finite = clip.weights(batch_length(batch), clip_norm, slack(precision, device), device)
        return ClippedSum(clip.sum(weights, left_out(finite)), shapes_of(model), clip_norm)


class Clip:
    """Takes in contributions as backward brings them; then their clip factors and their weighted sum.

    Small ones (biases, norms) are put side by side and treated as one: a network has many, each a dozen launches.
    """

    def __init__(self, support: Support, clipping: str = "flat") -> None:
        self._factors = automatic_factors if clipping == "auto-s" else None
        self.support, self.budget = support, Budget(None)
        self._active: dict[str, Contribution] = {}
        self._small: dict[str, Tensor] = {}  # [B, k] each
        self._squares: list[Tensor] = []
        self._roundings: list[Tensor] = []
        self._bundle: Tensor | None = None

    @torch.no_grad()
    def receive(self, name: str, contribution: Contribution) -> None:
        if not self.support.sizes[name]:
            return
        if not self.support.covers(name):
            contribution.restrict(self.support, name)
        if isinstance(contribution, Dense) and self.support.sizes[name] <= SMALL:
            self._small[name] = contribution.values.reshape(len(contribution.values), -1)
            return
        self._squares.append(contribution.squared_norms(self.budget))
        if contribution.rounding is not None:
            self._roundings.append(contribution.rounding)
        self._active[name] = contribution

    @torch.no_grad()
    def weights(self, batch: int, clip_norm: float, slack: float, device: torch.device) -> tuple[Tensor, Tensor]:
        """[B] the factor of each example, zero where its gradient is not finite; and [B] whether it is."""
        if self._small:
            self._bundle = torch.cat(list(self._small.values()), dim=1)
            self._small = dict.fromkeys(self._small, self._bundle)
            self._squares.append(squared_norms_of(self._bundle))
        if not self._squares:
            return torch.zeros(batch, device=device), torch.ones(batch, dtype=torch.bool, device=device)
        norms = torch.stack(self._squares).sum(0).sqrt()
        roundings = torch.stack(self._roundings).sum(0).sqrt() if self._roundings else 0.0
        factors = (self._factors or clip_factors)(norms, roundings, clip_norm, slack)
        return factors.float(), torch.isfinite(norms)

    @torch.no_grad()
    def sum(self, weights: Tensor, left_out: Tensor | None) -> Tensor:
        """Σ_i weights[i] · gradient[i], the parameters laid end to end in the support's order, which is the model's."""
        shapes = {name: mask.shape for name, mask in self.support.masks.items()}
        wide = len(weights) > EXAMPLES
        flat = torch.zeros(self.support.total, device=weights.device, dtype=torch.float64 if wide else torch.float32)
        for name, part in split(flat, shapes).items():
            if name in self._active:
                part.copy_(self._active.pop(name).weighted_sum(weights, left_out))
        if self._bundle is not None:
            values = self._bundle if left_out is None else self._bundle.masked_fill(left_out[:, None], 0.0)
            flat.index_copy_(0, self.support.flat_indices_of(tuple(self._small)), weighted(weights, values))
        return flat


def gather(
    model: nn.Module, loss: PerExampleLoss, batch: Batch, engine: str, clip: Clip, memory_limit: int | None
) -> None:
    """Run the model forward and backward, and bring every parameter's contribution to `clip`."""
    if engine == "vmap":
        for name, contribution in vmap_contributions(model, loss, batch).items():
            clip.receive(name, contribution)
        return
    with Capture(model, batch_length(batch), rows_of(loss, batch)) as capture, torch.enable_grad():
        total = checked_losses(loss, model, batch).sum()
    clip.budget = Budget(memory_limit)
    capture.differentiate(total, clip.receive)


def per_example_gradients(model: nn.Module, loss: PerExampleLoss, batch: Batch, engine: str) -> dict[str, Contribution]:
    """Parameter name → what each example of the batch contributes to it, unclipped."""
    if engine == "vmap":
        return vmap_contributions(model, loss, batch)
    with Capture(model, batch_length(batch), rows_of(loss, batch)) as capture, torch.enable_grad():
        total = checked_losses(loss, model, batch).sum()
    capture.differentiate(total)
    with torch.no_grad():
        return capture.contributions()


def left_out(finite: Tensor) -> Tensor | None:
    """What to leave out by selection, which must not round the others otherwise: on a CPU it does not (a test), on a GPU it is always done."""
    return ~finite if finite.is_cuda or not bool(finite.all()) else None


def zero_sum(model: nn.Module, clip_norm: float) -> ClippedSum:
    shapes = shapes_of(model)
    device = next(iter(trainable(model).values())).device
    return ClippedSum(torch.zeros(sum(s.numel() for s in shapes.values()), device=device), shapes, clip_norm)


def _refuse_other_devices(model: nn.Module, batch: Batch) -> None:
    places = {p.device for p in model.parameters()}
    if len(places) > 1:
        raise Refusal(f"the model lies on several devices ({', '.join(sorted(map(str, places)))}); move it to one")
    found = {t.device for t in tensors_of(batch)} - places
    if found and places:
        raise Refusal(f"the model is on {places.pop()} and the batch on {found.pop()}; move one to the other")
