"""Which engine is right for a model: tried on made-up examples, before anything is charged.

The probe has the shapes and types of the data and none of its values, so its outcome says nothing about any
record. It runs the model, at weights moved a little off where they stand, to find out what no reading of the source
could tell: that every parameter reaches the loss, only through calls that were recorded; that an example's loss
stays the same whatever the other examples are and however many; that running the model leaves no trace in it; and
that the engine's gradient of every single example is the reference's. It puts weights and buffers back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tptopk.gradients.capture import Capture, NotCaptured
from tptopk.gradients.clipping import ENGINES, per_example_gradients
from tptopk.gradients.examples import (
    Batch,
    PerExampleLoss,
    checked_losses,
    per_example,
    refuse_foreign_leaves,
    rows_of,
    take,
)
from tptopk.gradients.made_up import EXAMPLES, Maker, on_cpu, put_back, working_maker
from tptopk.gradients.mixing import (
    deterministic,
    held_fixed,
    in_other_sizes,
    padded,
    refuse_mixing,
    refuse_mixing_among,
)
from tptopk.gradients.reference import example_gradient
from tptopk.gradients.traces import FirstBatch, refuse_traces, saved_contents
from tptopk.privacy.refusal import Refusal, nearest
from tptopk.supports.support import Support, trainable

TOLERANCE = 1e-3  # relative; a missing or doubled term is off by far more


def choose_engine(model: nn.Module, loss: Callable[..., Tensor], like: Batch, engine: str = "auto") -> str:
    """The first of capture and vmap that is right for this model, or the forced one if it is."""
    if engine not in (*ENGINES, "auto"):
        raise Refusal(f"unknown engine {engine!r}{nearest(str(engine), [*ENGINES, 'auto'])}")
    refuse_unsuitable(model)
    refuse_foreign_leaves(like)
    losses = per_example(loss)
    with put_back(model), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        first = FirstBatch(model)
        make = working_maker(model, losses, like)
        _refuse_unused(model, losses, make)  # its call also fills caches that are filled once
        first.refuse(losses, make(0, EXAMPLES), make(1, EXAMPLES))
        with torch.enable_grad():
            refuse_traces(model, losses, make)
        refuse_mixing(model, losses, make, on_cpu(model))
        reasons = []
        for candidate in ("capture", "vmap") if engine == "auto" else (engine,):
            try:
                if candidate == "capture":
                    _check_capture(model, losses, make(0, EXAMPLES))
                _check_against_reference(model, losses, make, candidate)
                return candidate
            except Refusal:
                raise
            except Exception as error:
                reasons.append(f"{candidate}: {(str(error).splitlines() or [type(error).__name__])[0]}")
    hint = "" if engine == "reference" else "\nengine='reference' works for any model, one example at a time, slowly"
    raise Refusal("no engine gives right per-example gradients for this model.\n  " + "\n  ".join(reasons) + hint)


def refuse_mixing_in_batches(model: nn.Module, loss: Callable[..., Tensor], like: Batch, examples: int) -> None:
    """Refuse a loss that compares examples once there are as many as a batch will have, or as many of these as memory holds."""
    losses = per_example(loss)
    with put_back(model), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        make, before = working_maker(model, losses, like), saved_contents(model)
        while examples > 2 * EXAMPLES:
            try:
                refuse_mixing_among(model, losses, make, examples)
                break
            except torch.OutOfMemoryError:
                examples //= 2
        if saved_contents(model) != before:
            raise Refusal(
                f"the model changes when it is run on {examples} examples: it would carry data past the mechanism"
            )


def refuse_unsuitable(model: nn.Module) -> None:
    """Refuse what no engine could make private."""
    for name, module in model.named_modules():
        where = f"layer {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        instance_norm = isinstance(module, nn.modules.instancenorm._InstanceNorm)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not instance_norm:
            raise Refusal(
                f"{where} mixes the examples of a batch and keeps statistics of them, so no per-example guarantee can hold. "
                "Replace it by GroupNorm: model = tptopk.fix(model); for the command line, return tptopk.fix(model) from your function"
            )
        if any(type(hook).__name__ == "WeightNorm" for hook in module._forward_pre_hooks.values()):
            raise Refusal(
                f"{where} makes its weight anew at every call and keeps it (torch.nn.utils.weight_norm); use "
                "torch.nn.utils.parametrizations.weight_norm"
            )
        if getattr(module, "track_running_stats", False):
            raise Refusal(
                f"{where} keeps running statistics of the data outside the mechanism; set track_running_stats=False"
            )
        if getattr(module, "max_norm", None) is not None:
            raise Refusal(
                f"{where} rewrites the rows that occur in the data (max_norm), outside the mechanism; set max_norm=None"
            )
    if not trainable(model):
        raise Refusal("the model has no parameter with requires_grad=True; there is nothing to train")
    for name, p in trainable(model).items():
        if p.dtype != torch.float32:
            raise Refusal(
                f"parameter {name} is {p.dtype}; keep parameters in float32 and choose precision='bf16' for speed"
            )


def _refuse_unused(model: nn.Module, loss: PerExampleLoss, make: Maker) -> None:
    """Every parameter is used."""
    with torch.enable_grad():
        losses = loss(model, make(0, EXAMPLES))
    if not losses.requires_grad:
        raise Refusal("the loss does not depend on any trainable parameter")
    uses = _uses(losses)
    for name, p in trainable(model).items():
        if id(p) not in uses:
            raise Refusal(
                f"parameter {name} has no gradient: the loss does not use it (or only through a reentrant checkpoint). "
                "Set requires_grad=False on it, or use_reentrant=False"
            )


def same_in_both(model: nn.Module, loss: PerExampleLoss, batch: Batch, other: Batch) -> bool:
    """Whether the first example has one loss and one gradient in two batches that differ beside it.

    The loss alone would not tell: at initial weights it is often log 2, whatever the input.
    """

    def first(batch: Batch) -> tuple[Tensor, Tensor]:
        value = held_fixed(loss, model, batch)[0]
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        dense = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(parameters, found, strict=True)]
        return value.detach(), torch.cat([g.flatten() for g in dense])

    parameters = list(trainable(model).values())
    with put_back(model), deterministic(model, loss, batch), torch.enable_grad():
        (here, gradient), (there, another) = first(batch), first(other)
    near = (gradient - another).norm() <= TOLERANCE * gradient.norm() + 1e-6
    return bool(near) and torch.allclose(here, there, rtol=1e-4, atol=1e-5)


def _check_capture(model: nn.Module, loss: PerExampleLoss, batch: Batch) -> None:
    """Every use of a parameter in the graph is one recorded call, and recorded calls keep examples apart."""
    with Capture(model, EXAMPLES, rows_of(loss, batch)) as capture, torch.enable_grad():
        losses = checked_losses(loss, model, batch)
    uses, recorded = _uses(losses), dict[int, int]()
    for call in capture.calls:
        whole = capture.rules[
            call.module
        ].whole  # such a layer uses its parameters as often as it likes inside one call
        for p in call.module.parameters(recurse=whole):
            recorded[id(p)] = uses.get(id(p), 0) if whole else recorded.get(id(p), 0) + 1
    for name, p in trainable(model).items():
        if uses.get(id(p), 0) != recorded.get(id(p), 0):
            raise NotCaptured(
                f"parameter {name} is used {uses.get(id(p), 0)} times, of which {recorded.get(id(p), 0)} in calls "
                "of its own layer: it is used as a bare tensor, or inside a checkpoint"
            )
    _check_rows(capture, losses, torch.arange(EXAMPLES) == 0, rows_of(loss, batch))
    tried = [(batch, bit) for bit in range((EXAMPLES - 1).bit_length())]  # two that change places differ in one of them
    # Short and long ones take turns in these.
    tried += [(ragged, 0) for ragged in padded(model, on_cpu(model), loss, batch)]
    for ragged, bit in tried:
        with Capture(model, EXAMPLES, rows_of(loss, ragged)) as capture, torch.enable_grad():
            losses = checked_losses(loss, model, ragged)
        _check_rows(capture, losses, torch.arange(EXAMPLES) >> bit & 1 == 1, rows_of(loss, ragged))


def _check_rows(capture: Capture, losses: Tensor, chosen: Tensor, rows: int) -> None:
    """What the losses of some examples send back stands in the rows of these: a model may sort its batch, and sort it back."""
    capture.differentiate(losses[chosen.to(losses.device)].sum())
    for call in capture.calls:
        for n, gradient in enumerate(call.gradients):
            axis = capture.rules[call.module].batch_axis(call.module, n)
            if gradient is None:
                continue
            others = (~chosen).repeat_interleave(rows).nonzero().flatten().to(gradient.device)
            if bool((gradient.index_select(axis, others).nan_to_num() != 0).any()):
                raise NotCaptured(
                    f"{type(call.module).__name__} does not keep example by example on axis {axis} of its output, in the order of the batch"
                )


def _check_against_reference(model: nn.Module, loss: PerExampleLoss, make: Maker, engine: str) -> None:
    """Each example's gradient, unclipped, is the reference's, also beside very large examples; and some example has one.

    A tie that rounding breaks one way in a batch and another way alone (two almost equal inputs of a max-pooling) changes a gradient
    that both have right: after a failure two other batches must pass. A term that is wrong fails on all.
    """
    ordinary = EXAMPLES // 2

    def batches(seed: int) -> list[tuple[Batch, int]]:
        large = [] if engine == "reference" else in_other_sizes(make(seed, EXAMPLES), ordinary)
        return [(make(seed, EXAMPLES), EXAMPLES), *((batch, ordinary) for batch in large)]

    for first, *others in zip(*(batches(seed) for seed in range(3)), strict=True):
        try:
            _check_batch_against_reference(model, loss, first[0], first[1], engine)
        except NotCaptured:
            for batch, judged in others:
                _check_batch_against_reference(model, loss, batch, judged, engine)


def _check_batch_against_reference(
    model: nn.Module, loss: PerExampleLoss, batch: Batch, judged: int, engine: str
) -> None:
    """The gradients of the first `judged` examples."""
    if judged < EXAMPLES:
        try:
            losses = checked_losses(loss, model, batch)
        except Exception:  # the others are more than the model or the loss takes
            return
        if not bool(torch.isfinite(losses[:judged]).all()):
            return
    support = Support.full(model)
    with deterministic(model, loss, batch):
        slow = [example_gradient(model, loss, take(batch, slice(i, i + 1)), support) for i in range(judged)]
        norms = torch.stack([torch.stack([g.norm() for g in example.values()]).norm() for example in slow])
        if not bool((norms > 0).any()):
            raise Refusal(
                "on made-up examples every gradient is zero: training would spend its budget on noise (cross-entropy on a model with one output does this: give it one output a class)"
            )
        if engine == "reference":
            return
        fast = {name: c.dense() for name, c in per_example_gradients(model, loss, batch, engine).items()}
    for i, example in enumerate(slow):
        gaps = [(fast[name][i] - g if name in fast else g).norm() for name, g in example.items()]
        if not bool(torch.stack(gaps).norm() <= TOLERANCE * norms[i] + 1e-6):
            raise NotCaptured("on made-up examples its gradients are not the reference's")


def _uses(losses: Tensor) -> dict[int, int]:
    """id of a leaf tensor → how many operations of the graph read it."""
    uses: dict[int, int] = {}
    seen, queue = set(), [losses.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if variable is not None:
                uses[id(variable)] = uses.get(id(variable), 0) + 1
            elif following is not None:
                queue.append(following)
    return uses
