"""The loss of a model that computes its own, as one number an example.

A model of transformers averages its loss over the batch: a sequence classifier over examples, a language model over all tokens
of all examples, so that a long example counts more and changes how much the others count. Privacy needs the loss that each
example has by itself, which is what the model says of a batch of that one example: its tokens' mean. Rather than trusting
names, every reading below is tried on made-up examples, and one is used only if it gives each of them the number that the
model itself gives it alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tptopk.gradients.examples import Batch, PerExampleLoss, batch_length, per_example, take
from tptopk.gradients.made_up import EXAMPLES, working_maker
from tptopk.gradients.probe import choose_engine
from tptopk.privacy.refusal import Refusal

Labels = Mapping[str, Tensor]
# (the model's output, labels) → [B]; a KeyError or ValueError where it does not fit
Reading = Callable[[Any, Labels], Tensor]


def class_of_each(output: Any, labels: Labels) -> Tensor:
    """Cross-entropy of one class an example, or the mean of it over the example's own tokens that have a class."""
    logits, targets = output["logits"], labels["labels"]  # [B, …, C], [B, …]
    if targets.is_floating_point() or logits.shape[:-1] != targets.shape:
        raise ValueError("no class for each")
    return _cross_entropy(logits, targets)


def next_token(output: Any, labels: Labels) -> Tensor:
    """The same, where the output at a token foretells the one after it."""
    logits, targets = output["logits"], labels["labels"]  # [B, T, V], [B, T]
    if logits.dim() != 3 or logits.shape[:-1] != targets.shape:
        raise ValueError("no tokens")
    return _cross_entropy(logits[:, :-1], targets[:, 1:])


def first_and_last(output: Any, labels: Labels) -> Tensor:
    """Where an answer begins and where it ends."""
    ends = [_cross_entropy(output[f"{end}_logits"], labels[f"{end}_positions"]) for end in ("start", "end")]
    return (ends[0] + ends[1]) / 2


def yes_or_no(output: Any, labels: Labels) -> Tensor:
    """Several labels an example, each of which may hold."""
    logits, targets = _alike(output["logits"], labels["labels"])
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)


def squares(output: Any, labels: Labels) -> Tensor:
    """Regression."""
    values, targets = _alike(output["logits"], labels["labels"])
    return (values - targets).square().mean(1)


READINGS: tuple[Reading, ...] = (class_of_each, next_token, first_and_last, yes_or_no, squares)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over an example's targets that are classes. One that is none (−100, or a bad record's) counts as zero."""
    known = (targets >= 0) & (targets < logits.shape[-1])
    losses = F.cross_entropy(
        logits.float().flatten(0, -2), torch.where(known, targets, 0).flatten().long(), reduction="none"
    ).view(targets.shape)
    shares = (
        known.float() / known.flatten(1).sum(1).clamp(min=1).view(-1, *[1] * (known.dim() - 1))
        if known.dim() > 1
        else known
    )
    return (losses * shares).flatten(1).sum(1) if losses.dim() > 1 else losses * shares


def _alike(values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Both as [B, numbers]."""
    if values[0].numel() != targets[0].numel():
        raise ValueError("not as many outputs as labels")
    return values.flatten(1), targets.reshape(len(targets), -1).to(values.dtype)


class OwnLoss:
    """A model's own loss by one of the readings, [B].

    `positions` says to give every example its own position numbers. By itself a model makes them once for the batch, and what is
    looked up once for all has no gradient an example.
    """

    def __init__(self, reading: Reading, label_names: Sequence[str], *, positions: bool) -> None:
        self._reading, self._label_names, self._positions = reading, label_names, positions

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name not in self._label_names}
        if self._positions:
            ids = inputs["input_ids"]
            inputs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self._reading(model(**inputs), {name: batch[name] for name in self._label_names if name in batch})


def settled_loss(
    model: nn.Module, given: Callable[..., Tensor] | None, one: Batch, label_names: Sequence[str], engine: str
) -> tuple[PerExampleLoss, str]:
    """The loss to train by and an engine that is right for it; of several readings one that the fastest engine follows."""
    losses = [per_example(given)] if given is not None else own_losses(model, one, label_names)
    if engine == "auto":
        for loss in losses:
            try:
                return loss, choose_engine(model, loss, one, "capture")
            except Refusal as refusal:
                problem = refusal
        if not str(problem).startswith("no engine"):
            raise problem
    try:
        return losses[0], choose_engine(model, losses[0], one, engine)
    except Refusal as refusal:
        if ".item()" not in str(refusal):
            raise
        raise Refusal(
            f"{refusal}\nvmap cannot look into an attention mask: build the model with attn_implementation='eager' and try again"
        ) from refusal


def own_losses(model: nn.Module, one: Batch, label_names: Sequence[str]) -> list[PerExampleLoss]:
    """The readings that give every made-up example the loss that the model gives it alone; first those without positions."""
    names = [name for name in label_names if isinstance(one, Mapping) and name in one]
    if not names:
        raise Refusal(
            f"a batch of the train_dataset holds none of the labels {list(label_names)}; add them to the records, or give loss=, a "
            "function of (model, batch) that returns [B]"
        )
    positions = (
        "input_ids" in one
        and "position_ids" not in one
        and "position_ids" in inspect.signature(model.forward).parameters
    )
    with _evaluating(model), torch.no_grad():
        batch = working_maker(model, _of_each_alone, one)(0, EXAMPLES)
        alone = _of_each_alone(model, batch)
        readings = [
            OwnLoss(reading, names, positions=given)
            for given in ([False, True] if positions else [False])
            for reading in READINGS
        ]
        found: list[PerExampleLoss] = [loss for loss in readings if _agrees(loss, model, batch, alone)]
    if not found:
        raise Refusal(
            f"the loss that {type(model).__name__} computes is none that is known here as one number an example; give loss=, a function of "
            "(model, batch) that returns [B]"
        )
    return found


def _of_each_alone(model: nn.Module, batch: Batch) -> Tensor:
    """What the model itself says of each example in a batch of its own, [B]."""
    losses = []
    for i in range(batch_length(batch)):
        output = model(**take(batch, slice(i, i + 1)))
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if loss is None:
            raise Refusal(
                f"{type(model).__name__} computes no loss of its own from {sorted(batch)}; give loss=, a function of (model, batch) that "
                "returns [B]"
            )
        losses.append(loss.float().reshape(()))
    return torch.stack(losses)


def _agrees(loss: OwnLoss, model: nn.Module, batch: Batch, alone: Tensor) -> bool:
    try:
        found = loss(model, batch)
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError):  # it does not fit this model's output
        return False
    return found.shape == alone.shape and torch.allclose(found, alone, rtol=1e-4, atol=1e-7)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, so that two passes can be compared."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
