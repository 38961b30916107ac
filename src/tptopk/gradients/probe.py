"""Which engine is right for a model: tried on made-up examples, before anything is charged.

The probe has the shapes and types of the data and none of its values, so its outcome says nothing about any
record. It is run through the model to find out what no inspection of the source could: that every parameter
reaches the loss, only through calls that were recorded; that no example's loss depends on another example; that
running the model leaves no trace in its buffers; and that the engine's clipped sum is the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tptopk.gradients.capture import Capture, NotCaptured
from tptopk.gradients.clipping import clipped_sum
from tptopk.gradients.examples import Batch, PerExampleLoss, checked_losses, per_example, tensors_of
from tptopk.privacy.refusal import Refusal
from tptopk.supports.support import Support, trainable

EXAMPLES = 3
TOLERANCE = 1e-3  # relative; a missing or doubled term is off by far more

_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def made_up_batch(like: Batch, examples: int = EXAMPLES) -> Batch:
    """A batch of the same structure, shapes and types with values that are no record's: normal numbers, ids 0 and 1."""
    generator = torch.Generator().manual_seed(0)

    def invent(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = (examples, *leaf.shape[1:])
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.randn(shape, generator=generator).to(leaf.dtype).to(leaf.device)
        if leaf.dtype == torch.bool:
            return torch.zeros(shape, dtype=torch.bool, device=leaf.device)
        return torch.randint(0, 2, shape, generator=generator).to(leaf.dtype).to(leaf.device)

    return tree_map(invent, like)


def refuse_unsuitable(model: nn.Module) -> None:
    """Refuse what no engine could make private."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _BATCH_NORMS) and not isinstance(module, nn.modules.instancenorm._InstanceNorm):
            raise Refusal(
                f"{name or 'the model'} is a {kind}: it mixes the examples of a batch and keeps statistics of them, so no "
                "per-example guarantee can hold. Call tptopk.fix(model) to replace it by GroupNorm"
            )
        if getattr(module, "track_running_stats", False):
            raise Refusal(
                f"{name or 'the model'} ({kind}) keeps running statistics of the data outside the mechanism; "
                "set track_running_stats=False"
            )
    if not trainable(model):
        raise Refusal("the model has no parameter with requires_grad=True; there is nothing to train")
    for name, p in trainable(model).items():
        if p.dtype != torch.float32:
            raise Refusal(
                f"parameter {name} is {p.dtype}; keep parameters in float32 and choose precision='bf16' for speed"
            )


def choose_engine(model: nn.Module, loss: Callable[..., Tensor], like: Batch, engine: str = "auto") -> str:
    """The first of capture and vmap that is right for this model, or the forced one if it is."""
    refuse_unsuitable(model)
    losses = per_example(loss)
    batch = made_up_batch(like)
    _refuse_traces(model, losses, batch)
    reasons = []
    for candidate in ("capture", "vmap") if engine == "auto" else (engine,):
        try:
            if candidate == "capture":
                _check_capture(model, losses, batch)
            _check_against_reference(model, losses, batch, candidate)
            return candidate
        except (NotCaptured, NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
            reasons.append(f"{candidate}: {str(error).splitlines()[0]}")
    raise Refusal(
        "no engine gives right per-example gradients for this model.\n  "
        + "\n  ".join(reasons)
        + (
            ""
            if engine == "reference"
            else "\nIf examples are independent, engine='reference' works one example at a time, slowly"
        )
    )


def _refuse_traces(model: nn.Module, loss: PerExampleLoss, batch: Batch) -> None:
    """Run once and look at the graph: every parameter used, no buffer changed, no example seen by another."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    with torch.enable_grad():
        inputs = [t.requires_grad_() for t in tensors_of(batch) if t.is_floating_point()]
        try:
            losses = checked_losses(loss, model, batch)
        except Refusal:
            raise
        except Exception as error:
            raise Refusal(
                f"the model or the loss failed on made-up examples of the data's shapes {_shapes(batch)}: "
                f"{type(error).__name__}: {error}"
            ) from error
    for name, buffer in model.named_buffers():
        if name in before and not torch.equal(buffer, before[name]):
            raise Refusal(f"buffer {name} changes when the model is run: it would carry data past the mechanism")
    if not losses.requires_grad:
        raise Refusal("the loss does not depend on any trainable parameter")
    uses = _uses(losses)
    for name, p in trainable(model).items():
        if id(p) not in uses:
            raise Refusal(
                f"parameter {name} has no gradient: the loss does not use it (or only through a reentrant checkpoint). "
                "Set requires_grad=False on it, or use_reentrant=False"
            )
    if inputs:
        gradients = torch.autograd.grad(losses[0], inputs, allow_unused=True, retain_graph=True)
        for gradient in gradients:
            if gradient is not None and bool((gradient[1:] != 0).any()):
                raise Refusal(
                    "an example's loss depends on the other examples of its batch, so clipping one gradient does not "
                    "bound one record's influence; make the model treat examples independently"
                )
    for tensor in inputs:
        tensor.requires_grad_(False)


def _check_capture(model: nn.Module, loss: PerExampleLoss, batch: Batch) -> None:
    """Every use of a parameter in the graph is one recorded call, and recorded calls keep examples apart."""
    with Capture(model, EXAMPLES) as capture, torch.enable_grad():
        losses = checked_losses(loss, model, batch)
    uses, recorded = _uses(losses), dict[int, int]()
    whole = {id(m) for m, rule in capture._rules.items() if rule.whole}
    for call in capture.calls:
        for p in call.module.parameters() if id(call.module) in whole else call.module.parameters(recurse=False):
            # A layer run as a whole uses its parameters as often as it likes inside one call.
            recorded[id(p)] = uses.get(id(p), 0) if id(call.module) in whole else recorded.get(id(p), 0) + 1
    for name, p in trainable(model).items():
        if uses.get(id(p), 0) != recorded.get(id(p), 0):
            raise NotCaptured(
                f"parameter {name} is used {uses.get(id(p), 0)} times, of which {recorded.get(id(p), 0)} in calls "
                "of its own layer: it is used as a bare tensor, or inside a checkpoint"
            )
    capture.differentiate(losses[0])
    for call in capture.calls:
        for n, gradient in enumerate(call.gradients):
            if gradient is not None:
                axis = capture._rules[call.module].batch_axis(call.module, n)
                if bool((gradient.narrow(axis, 1, EXAMPLES - 1) != 0).any()):
                    raise NotCaptured(
                        f"{type(call.module).__name__} does not keep the batch on axis {axis} of its output"
                    )


def _check_against_reference(model: nn.Module, loss: PerExampleLoss, batch: Batch, engine: str) -> None:
    """The engine's clipped sum equals the reference's, in evaluation mode, where nothing is random."""
    if engine == "reference":
        return
    modes = {module: module.training for module in model.modules()}
    support = Support.full(model)
    try:
        model.eval()
        with torch.no_grad():
            clip_norm = 1.0
        fast = clipped_sum(model, loss, batch, support, clip_norm, engine=engine).values
        slow = clipped_sum(model, loss, batch, support, clip_norm, engine="reference").values
    finally:
        for module, training in modes.items():
            module.training = training
    error = torch.stack([(fast[name] - slow[name]).norm() for name in slow]).norm()
    scale = torch.stack([value.norm() for value in slow.values()]).norm()
    if not bool(error <= TOLERANCE * scale + 1e-6):
        raise NotCaptured(
            f"on made-up examples its clipped sum differs from the reference by {float(error):.3g} "
            f"of {float(scale):.3g}"
        )


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


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors_of(batch)]
