"""The one entry: a batch and a support in, a clipped sum out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tptopk.gradients.capture import Capture
from tptopk.gradients.contributions import Contribution, float32_matmul
from tptopk.gradients.examples import Batch, PerExampleLoss, batch_length, checked_losses, per_example
from tptopk.gradients.reference import reference_clipped_sum
from tptopk.gradients.vmap import vmap_contributions
from tptopk.privacy.plan import SMALLEST_CLIP_NORM
from tptopk.privacy.refusal import Refusal, check_number, nearest
from tptopk.supports.support import Support, trainable

ENGINES = ("capture", "vmap", "reference")


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """Σ_i clip(m ⊙ g_i, C) over the examples of a batch, zero outside the support. Not private yet."""

    values: Mapping[str, Tensor]
    clip_norm: float

    def sensitivity(self) -> float:
        """How far one example more or less can move the sum, in l2 norm, whatever the support."""
        return self.clip_norm

    def __add__(self, other: ClippedSum) -> ClippedSum:
        if other.clip_norm != self.clip_norm:
            raise ValueError("sums clipped at different norms do not add up to a sum of known sensitivity")
        return ClippedSum({name: value + other.values[name] for name, value in self.values.items()}, self.clip_norm)


def clipped_sum(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Batch,
    support: Support,
    clip_norm: float,
    *,
    engine: str = "capture",
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
    """
    check_number("clip_norm", clip_norm, least=SMALLEST_CLIP_NORM)
    if engine not in ENGINES:
        raise Refusal(f"unknown engine {engine!r}{nearest(str(engine), ENGINES)}")
    losses = per_example(loss)
    if batch_length(batch) == 0:
        return zero_sum(model, clip_norm)
    # Somebody else's autocast must not round what is clipped and summed; `in_precision` has its own around the forward.
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        if engine == "reference":
            return ClippedSum(reference_clipped_sum(model, losses, batch, support, clip_norm), clip_norm)
        return _clip(model, per_example_gradients(model, losses, batch, engine), support, clip_norm)


def per_example_gradients(model: nn.Module, loss: PerExampleLoss, batch: Batch, engine: str) -> dict[str, Contribution]:
    """Parameter name → what each example of the batch contributes to it, unclipped."""
    if engine == "vmap":
        return vmap_contributions(model, loss, batch)
    with Capture(model, batch_length(batch)) as capture, torch.enable_grad():
        total = checked_losses(loss, model, batch).sum()
    capture.differentiate(total)
    with torch.no_grad():
        return capture.contributions()


def zero_sum(model: nn.Module, clip_norm: float) -> ClippedSum:
    return ClippedSum({n: torch.zeros_like(p, dtype=torch.float32) for n, p in trainable(model).items()}, clip_norm)


@torch.no_grad()
def _clip(
    model: nn.Module, contributions: Mapping[str, Contribution], support: Support, clip_norm: float
) -> ClippedSum:
    active = {name: c for name, c in contributions.items() if support.sizes[name]}
    for name, contribution in active.items():
        if not support.covers(name):
            contribution.restrict(support, name)
    values: dict[str, Tensor] = {}
    if active:
        with float32_matmul("highest"):
            norms = torch.stack([c.squared_norms() for c in active.values()]).sum(0).sqrt()  # [B]
        finite = torch.isfinite(norms)
        weights = torch.where(finite, (clip_norm / norms).clamp(max=1.0), torch.zeros_like(norms))
        left_out = None if bool(finite.all()) else ~finite
        with float32_matmul("highest"):  # norms were taken of gradients as they are, so no input may be rounded now
            values = {name: c.weighted_sum(weights.float(), left_out) for name, c in active.items()}
    zeros = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in trainable(model).items() if n not in values}
    values = {name: values[name] if name in values else zeros[name] for name in trainable(model)}
    return ClippedSum(values, clip_norm)
