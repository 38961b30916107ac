"""Batches and losses: a batch is any tree of tensors led by the example axis, a loss gives one number an example."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

from tptopk.privacy.refusal import Refusal

Batch: TypeAlias = Any  # a tensor, or a tuple, list or dict of batches
PerExampleLoss: TypeAlias = Callable[[nn.Module, Batch], Tensor]  # (model, batch) → [B]


def tensors_of(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]


def batch_length(batch: Batch) -> int:
    """B, the length of the example axis that all tensors of a batch share."""
    tensors = tensors_of(batch)
    if not tensors or any(t.dim() == 0 or len(t) != len(tensors[0]) for t in tensors):
        raise Refusal(
            "a batch must hold tensors that all start with the example axis; got shapes "
            + str([tuple(t.shape) for t in tensors])
        )
    return len(tensors[0])


def refuse_foreign_leaves(batch: Batch) -> None:
    """Refuse batches that hold anything but tensors: what cannot be sliced by example may mix examples."""
    for leaf in tree_flatten(batch)[0]:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise Refusal(f"a batch holds a {type(leaf).__name__}; all of it must be tensors led by the example axis")


def take(batch: Batch, examples: slice | Tensor) -> Batch:
    """Some examples of a batch, in a batch of the same structure."""
    return tree_map(lambda leaf: leaf[examples] if isinstance(leaf, Tensor) else leaf, batch)


def beside(examples: Tensor, values: Tensor) -> Tensor:
    """[B] as [B, 1, …, 1], to stand beside values [B, …]."""
    return examples.view(-1, *[1] * (values.dim() - 1))


def move(batch: Batch, device: torch.device) -> Batch:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def takes_output_and_target(loss: object) -> bool:
    """Whether a loss is called on (output, target), as torch's own are, rather than on (model, batch)."""
    if isinstance(loss, nn.Module):
        return hasattr(loss, "reduction")
    try:
        return "reduction" in inspect.signature(loss).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def per_example(loss: Callable[..., Tensor]) -> PerExampleLoss:
    """Read a loss as one number an example.

    A loss with a `reduction` (`torch.nn.functional.cross_entropy`, `torch.nn.CrossEntropyLoss()`) is applied to
    `model(inputs)` and the targets of a pair `(inputs, targets)`, without reduction, averaged over any axes past the
    first. Anything else is called as `loss(model, batch)` and must return [B].
    """
    if not callable(loss):
        raise Refusal(f"loss is {loss!r}; it must be a torch loss or a function loss(model, batch) that returns [B]")
    if not takes_output_and_target(loss):
        return loss
    if isinstance(loss, nn.Module):
        unreduced = copy.copy(loss)
        unreduced.__dict__["reduction"] = "none"

        def apply(output: Tensor, target: Tensor) -> Tensor:
            return unreduced(output, target)  # type: ignore[no-any-return]
    else:

        def apply(output: Tensor, target: Tensor) -> Tensor:
            return loss(output, target, reduction="none")

    def on_pair(model: nn.Module, batch: Batch) -> Tensor:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise Refusal(
                "a torch loss needs batches of (inputs, targets); for others pass loss=f with f(model, batch) → [B]"
            )
        output, target = model(batch[0]), batch[1]
        known = None
        if not target.is_floating_point() and output.dim() == target.dim() + 1:
            # a label that is no class is a bad record: zero, not a crash
            known = (target >= 0) & (target < output.shape[1])
            target = torch.where(known, target, 0)
        if output.is_floating_point() and output.dim():  # a bad record, on whose output some losses raise: a zero, too
            bad = torch.isnan(output)[..., None].flatten(1).any(1)
            output = torch.where(beside(bad, output), 0.5, output)
        bad_target = _bad_targets(loss, output, target)  # on which the loss would raise: a zero as well
        if bad_target is not None:
            target = torch.where(beside(bad_target, target), 0, target)
        losses = apply(output, target)
        without_classes = (*target.shape[:1], *target.shape[2:])
        if losses.shape not in (target.shape, without_classes):
            raise Refusal(
                f"output {tuple(output.shape)} and target {tuple(target.shape)} give losses of shape {tuple(losses.shape)}: they were "
                "broadcast, and every example would be compared with every other; make their shapes agree"
            )
        if known is not None:
            losses = torch.where(known, losses, 0.0)
        if bad_target is not None:
            losses = torch.where(beside(bad_target, losses), 0.0, losses)
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses

    return on_pair


def _bad_targets(loss: Callable[..., Tensor], output: Tensor, target: Tensor) -> Tensor | None:
    """[B] the records whose targets this loss of torch's raises an error for; None if it raises none."""
    plain = getattr(loss, "func", loss)  # of a partial
    if plain is F.binary_cross_entropy or isinstance(loss, nn.BCELoss):
        right = (target >= 0) & (target <= 1)  # neither holds of NaN
    elif plain is F.multilabel_margin_loss or isinstance(loss, nn.MultiLabelMarginLoss):
        right = (target >= -1) & (target < output.shape[-1])
    else:
        return None
    return ~right[..., None].flatten(1).all(1)


class MeanOverRows:
    """The loss of an example that is several rows: views of one image, records of one patient.

    A batch is (rows, weights): tensors [B, R, …] and [B, R] numbers. Its loss is Σ_r weights[b, r] · loss of row r, so that
    the gradients of an example's rows are averaged before they are clipped as one.
    """

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.of_a_row = per_example(loss)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        rows, weights = batch
        losses = self.of_a_row(model, tree_map(lambda leaf: leaf.flatten(0, 1), rows))  # [B · R]
        return cast(Tensor, (losses.view(weights.shape) * weights).sum(1))

    def rows(self, batch: Batch) -> int:
        return int(batch[1].shape[1])


def rows_of(loss: PerExampleLoss, batch: Batch) -> int:
    """How many rows of the model's batch belong to each example."""
    return loss.rows(batch) if isinstance(loss, MeanOverRows) else 1


def checked_losses(loss: PerExampleLoss, model: nn.Module, batch: Batch) -> Tensor:
    """The losses [B] of a batch; anything that is not one number an example is refused.

    Autocast may remember weights that an earlier pass rounded, and a recording would keep reading them: they are dropped.
    """
    torch.clear_autocast_cache()
    losses = loss(model, batch)
    expected = batch_length(batch)
    if not isinstance(losses, Tensor) or losses.shape != (expected,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise Refusal(
            f"the loss must give one number an example, shape ({expected},); it gave {got}. "
            "Clipping needs each example's own gradient: do not average over the batch"
        )
    return losses
