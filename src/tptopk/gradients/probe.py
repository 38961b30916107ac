"""Which engine is right for a model: tried on made-up examples, before anything is charged.

The probe has the shapes and types of the data and none of its values, so its outcome says nothing about any
record. It runs the model, at weights moved a little off where they stand, to find out what no reading of the source
could tell: that every parameter reaches the loss, only through calls that were recorded; that an example's loss
stays the same whatever the other examples are and however many; that running the model leaves no trace in it; and
that the engine's gradient of every single example is the reference's. It puts weights and buffers back.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

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
    tensors_of,
)
from tptopk.gradients.mixing import (
    EXAMPLES,
    Maker,
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

IDS = (10, 2, 1)  # of how many the made-up whole numbers are, the more the better
TOLERANCE = 1e-3  # relative; a missing or doubled term is off by far more


def choose_engine(model: nn.Module, loss: Callable[..., Tensor], like: Batch, engine: str = "auto") -> str:
    """The first of capture and vmap that is right for this model, or the forced one if it is."""
    if engine not in (*ENGINES, "auto"):
        raise Refusal(f"unknown engine {engine!r}{nearest(str(engine), [*ENGINES, 'auto'])}")
    refuse_unsuitable(model)
    refuse_foreign_leaves(like)
    losses = per_example(loss)
    with _put_back(model), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
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
    with _put_back(model), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
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


def made_up(
    value: Any,
    generator: np.random.Generator,
    positive: bool = False,
    ids: int = 2,
    examples: int | None = None,
    truth: float = 0.0,
) -> Any:
    """A value of the same shape and type that is nobody's: normal (or positive) numbers, ids below `ids`, booleans true at the rate `truth`."""
    if isinstance(value, (bool, np.bool_)):
        return bool(generator.random() < truth)
    if isinstance(value, (int, np.integer)):
        return int(generator.integers(ids))
    if isinstance(value, (float, np.floating)):
        return float(generator.standard_normal())
    if isinstance(value, str):
        return "ab"[generator.integers(2)]
    if isinstance(value, np.ndarray):
        return made_up(torch.from_numpy(value), generator, positive, ids, truth=truth).numpy()
    if not isinstance(value, Tensor):
        return value
    shape = tuple(value.shape) if examples is None else (examples, *value.shape[1:])
    drawn: np.ndarray[Any, Any]
    if value.dtype == torch.bool:
        drawn = generator.random(shape) < truth
    elif value.is_floating_point() or value.is_complex():
        drawn = generator.uniform(0.1, 1.0, shape) if positive else generator.standard_normal(shape)
    else:
        drawn = generator.integers(0, ids, shape)
    return torch.as_tensor(drawn).to(value.dtype).to(value.device)


def working_maker(model: nn.Module, loss: PerExampleLoss, like: Batch) -> Maker:
    """The richest made-up values that the model runs on with finite losses: normal inputs and many ids, if it can be.

    A label that is no class has a loss of zero and shows nothing, so values with losses that are mostly zero come last.
    """
    problem: Exception | None = None
    poor: Maker | None = None
    # A mask is true where something counts, or where it does not.
    truths = (0.0, 1.0) if any(t.dtype == torch.bool for t in tensors_of(like)) else (0.0,)
    trial = on_cpu(model)
    leaves, form = tree_flatten(like)
    whole = [n for n, leaf in enumerate(leaves) if _is_id(leaf)]

    def maker(positive: bool, bounds: list[int], truth: float) -> Maker:
        """`bounds`: below which the whole numbers of each leaf are."""

        def make(seed: int, examples: int) -> Batch:
            generator = np.random.default_rng(seed)
            drawn = [made_up(leaf, generator, positive, ids, examples, truth) for leaf, ids in zip(leaves, bounds, strict=True)]  # fmt: skip
            return tree_unflatten(drawn, form)

        return make

    def tried(make: Maker) -> Tensor:
        """Losses, on a CPU."""
        with torch.no_grad():
            batch = tree_map(
                lambda leaf: leaf.cpu() if trial is not model and isinstance(leaf, Tensor) else leaf, make(0, EXAMPLES)
            )
            return checked_losses(loss, trial, batch)

    def richer(positive: bool, bounds: list[int], truth: float, losses: int) -> Maker:
        """With more ids in each leaf that takes more, whatever others take: texts of many words though there are two classes."""
        for n in whole:
            for ids in IDS:
                more = [*bounds[:n], ids, *bounds[n + 1 :]]
                try:
                    found = tried(maker(positive, more, truth)) if ids > bounds[n] else None
                except Exception:
                    continue
                if found is None or (bool(torch.isfinite(found).all()) and int((found != 0).sum()) >= losses):
                    bounds = more if found is not None else bounds
                    break
        return maker(positive, bounds, truth)

    for positive in (False, True):
        for ids, truth in itertools.product(IDS, truths):
            bounds = [ids] * len(leaves)
            try:
                losses = tried(maker(positive, bounds, truth))
                if bool(torch.isfinite(losses).all()):
                    if int((losses != 0).sum()) > EXAMPLES // 2:
                        return richer(positive, bounds, truth, int((losses != 0).sum()))
                    poor = poor or maker(positive, bounds, truth)
                problem = problem or ArithmeticError("its losses are not finite")
            except Refusal:
                raise
            except Exception as error:
                problem = error
    if poor is not None:
        return poor
    shapes = [tuple(t.shape[1:]) for t in tensors_of(like)]
    raise Refusal(
        f"the model or the loss failed on made-up examples of the data's shapes {shapes}: {type(problem).__name__}: {problem}"
        + _channels_first(model, shapes[0] if shapes else ())
    ) from problem


def _is_id(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    return isinstance(leaf, (int, np.integer)) and not isinstance(leaf, (bool, np.bool_))


def on_cpu(model: nn.Module) -> nn.Module:
    """An id out of range is an error on a CPU but the end of the process's GPU context, so ids are tried on a CPU."""
    return copy.deepcopy(model).cpu() if any(p.is_cuda for p in model.parameters()) else model


def _channels_first(model: nn.Module, shape: tuple[int, ...]) -> str:
    """What to do where the first layer is a convolution, and images of `shape` have no channel or have it last."""
    layers = ((name, m) for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None)
    name, layer = next(layers, ("", model))
    if not isinstance(layer, nn.Conv2d):
        return ""
    takes = f"; layer {name!r} (Conv2d) takes images as ({layer.in_channels}, height, width) and these are {shape}: "
    if len(shape) == 2 and layer.in_channels == 1:
        return takes + "x[:, None] adds the channel"
    if len(shape) == 3 and shape[2] == layer.in_channels != shape[0]:
        return takes + "put the channels first, by numpy.moveaxis(x, -1, 1)"
    return ""


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
    with _put_back(model), deterministic(model, loss, batch), torch.enable_grad():
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
    tried += [
        (ragged, 0) for ragged in padded(model, on_cpu(model), loss, batch)
    ]  # short and long ones take turns there
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


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Move the weights off special values (zeros hide what they multiply), and put everything back afterwards."""
    state = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    generator = np.random.default_rng(2)
    try:
        with torch.no_grad():
            for p in trainable(model).values():
                p.add_(
                    torch.as_tensor(0.05 * generator.standard_normal(tuple(p.shape)), dtype=p.dtype, device=p.device)
                )
        yield
    finally:
        with torch.no_grad():
            for tensor, before in state:
                tensor.copy_(before)


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
