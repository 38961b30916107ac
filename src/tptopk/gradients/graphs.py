"""Clipped sums of fixed shape: a whole computation replayed as one CUDA graph, compiled or not.

A small network's step is bound by launching its kernels and by Python, not by arithmetic. Here a batch is padded to a
fixed shape with examples of weight zero, the computation of `clipped_sum` is recorded once, and then replayed. Only
gradients are computed inside: noise is drawn elsewhere, afresh at every step. It is recorded on made-up examples, since
a program may keep numbers that it read on the host, and those of a record would be in every later step.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tptopk.gradients.clipping import Clip, ClippedSum, gather, shapes_of
from tptopk.gradients.examples import Batch, batch_length, per_example
from tptopk.gradients.made_up import EXAMPLES, on_cpu, working_maker
from tptopk.gradients.mixing import padded
from tptopk.gradients.precision import computing_in, forward_in, slack
from tptopk.gradients.traces import ModelChanged, unchanged, versions_of
from tptopk.supports.support import Shifting, Support

Program = Callable[[list[Tensor], Tensor], Tensor]  # leaves, which of the examples count → flat sum
# Relative, of a recording and the ordinary way; what was kept is more.
SAME = {"fp32": 1e-2, "tf32": 1e-2, "bf16": 1e-1}


def _nothing() -> Tensor:
    raise RuntimeError("nothing is recorded yet")


@dataclass
class _Recorded:
    """One computation with the tensors it reads and writes."""

    leaves: list[Tensor]
    real: Tensor  # [size] ones, and zeros for padding
    run: Callable[[], Tensor]
    examples: int = -1  # how many of `real` are ones


class FixedShapes:
    """Makes the clipped sums of `clipped_sum`'s capture engine, for one model and one support after another.

    The first `patience` batches on a support go the ordinary way. Where supports change sooner than that, one recording
    serves all of them, on a mask that is written anew (`Shifting`): more arithmetic, but no launches. A model that cannot be recorded is said to be so once, and goes the ordinary way.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        *,
        precision: str = "fp32",
        memory_limit: int | None = None,
        compiled: bool = False,
        clipping: str = "flat",
        patience: int = 1,
    ) -> None:
        self._clipping, self._patience, self._waited = clipping, patience, 0
        self._model, self._precision, self._memory_limit = model, precision, memory_limit
        self._loss = forward_in(per_example(loss), precision)
        self._compiled = compiled
        self._support: Support | None = None  # of the last batch
        self._left_soon = 0  # supports in a row, just before it, that went before they had been recorded
        self._shifting: Shifting | None = None
        self._recorded_on: Support | None = None
        self._place: object = None
        self._recorded: dict[Any, _Recorded] = {}
        self._refused = False
        self._made_up: tuple[Any, list[Tensor], list[list[Tensor]]] | None = None
        self._pool: Any = None

    def clipped_sum(self, batch: Batch, support: Support, clip_norm: float) -> ClippedSum | None:
        """The sum; None where the batch has to go the ordinary way."""
        support_now = self._support_to_record(support)
        if support_now is None:
            return None
        leaves, structure = tree_flatten(batch)
        examples = batch_length(batch)
        if self._refused or not examples or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return None
        device = leaves[0].device
        size = fixed_size(examples, 8 if self._compiled else 32)
        if support_now is not self._recorded_on:
            self._recorded.clear()
            self._recorded_on, self._pool = support_now, None
        key = (size, structure, clip_norm, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves))
        with computing_in(self._precision, device), torch.no_grad():
            if key not in self._recorded:
                try:
                    self._recorded[key] = self._record(leaves, structure, size, clip_norm)
                except (torch.OutOfMemoryError, ModelChanged):
                    raise
                except Exception as error:
                    self._refused = True
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    warnings.warn(
                        f"steps run one kernel at a time, since this model cannot be recorded: {reason}", stacklevel=2
                    )
                    return None
            recorded = self._recorded[key]
            _fill(recorded, leaves, examples)
            return ClippedSum(recorded.run().clone(), shapes_of(self._model), clip_norm)

    def forget(self) -> None:
        """Drop the recordings and the memory they hold."""
        self._recorded.clear()
        self._support = self._shifting = self._recorded_on = self._pool = None
        self._left_soon = 0

    def _support_to_record(self, support: Support) -> Support | None:
        """What to record for this batch: its support, or one that shifts to it; None while it is worth neither."""
        place = _place(self._model)
        if place != self._place:
            self.forget()
            self._place = place
        if support is not self._support:
            self._left_soon = self._left_soon + 1 if self._support is not None and self._waited <= self._patience else 0
            self._support, self._waited = support, 0
        self._waited += 1
        if self._waited > self._patience:
            return support
        if self._left_soon < 2:
            return None
        self._shifting = self._shifting or Shifting(support)
        self._shifting.become(support)
        return self._shifting

    def _record(self, leaves: list[Tensor], structure: Any, size: int, clip_norm: float) -> _Recorded:
        support, device = self._recorded_on, leaves[0].device
        assert support is not None

        def program(leaves: list[Tensor], real: Tensor) -> Tensor:
            clip = Clip(support, self._clipping)
            gather(self._model, self._loss, tree_unflatten(leaves, structure), "capture", clip, self._memory_limit)
            weights, finite = clip.weights(size, clip_norm, slack(self._precision, device), device)
            # Always by selection: one that is not finite must not choose another program, or another throw, for all the others.
            return clip.sum(weights * real, ~finite)

        few, others = self._made_up_examples(leaves, structure)
        place = torch.arange(size, device=device) % EXAMPLES
        recorded = _Recorded([leaf[place] for leaf in few], torch.ones(size, device=device), _nothing)
        with unchanged(self._model, "a step was recorded"), _unmoved(self._model, device):
            program(recorded.leaves, recorded.real)  # tables of the support are made outside the recording
            made = _traced(program, recorded) if self._compiled else program
            if device.type != "cuda":
                recorded.run = lambda: made(recorded.leaves, recorded.real)
            else:
                recorded.run = self._as_graph(made, recorded)
        while others:  # once: what a program keeps does not depend on the size that it is recorded for
            for leaf, made_up in zip(recorded.leaves, others.pop(), strict=True):
                leaf.copy_(made_up[place])
            self._refuse_another_sum(program, recorded, 1e-3 * size * clip_norm)
        return recorded

    def _refuse_another_sum(self, program: Program, recorded: _Recorded, rounding: float) -> None:
        """Unless the model throws dice, whose sums differ anyway."""
        once, again = (program(recorded.leaves, recorded.real) for _ in range(2))
        most = SAME[self._precision] * once.norm() + rounding
        if bool((once - again).norm() <= most) and bool((recorded.run() - once).norm() > most):
            raise RuntimeError("what it computes depends on its examples by more than the recorded operations")

    def _made_up_examples(self, leaves: list[Tensor], structure: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Examples that are nobody's, to record on; and others to compare with, which are used up."""
        shapes = structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        if self._made_up is None or self._made_up[0] != shapes:
            like = tree_unflatten([leaf[:1] for leaf in leaves], structure)
            with torch.random.fork_rng(devices=[]):
                make, trial = working_maker(self._model, self._loss, like), on_cpu(self._model)
                others = [make(1, EXAMPLES), *padded(self._model, trial, self._loss, make(2, EXAMPLES))]
            self._made_up = shapes, tree_flatten(make(0, EXAMPLES))[0], [tree_flatten(batch)[0] for batch in others]
        return self._made_up[1], self._made_up[2]

    def _as_graph(self, program: Program, recorded: _Recorded) -> Callable[[], Tensor]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            program(recorded.leaves, recorded.real)  # libraries choose their kernels outside the recording
        torch.cuda.current_stream().wait_stream(side)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = program(recorded.leaves, recorded.real)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def fixed_size(examples: int, sizes: int) -> int:
    """The next of that many sizes to each power of two: few recordings serve all batches, and padding stays small."""
    grain: int = max(1, 2 ** (examples.bit_length() - 1) // sizes)
    return -(-examples // grain) * grain


def _traced(program: Program, recorded: _Recorded) -> Program:
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(program)(recorded.leaves, recorded.real)
    return torch.compile(traced, dynamic=False)


def _fill(recorded: _Recorded, leaves: list[Tensor], examples: int) -> None:
    for fixed, leaf in zip(recorded.leaves, leaves, strict=True):
        fixed[:examples].copy_(leaf)
        if examples < len(fixed):
            fixed[examples:].copy_(leaf[:1].expand(len(fixed) - examples, *leaf.shape[1:]))
    if recorded.examples != examples:
        recorded.real[:examples] = 1.0
        recorded.real[examples:] = 0.0
        recorded.examples = examples


def _place(model: nn.Module) -> object:
    """Changes whenever a recording would read memory that the model no longer uses, or run in another mode."""
    found: list[int | bool] = []
    for module in model.modules():
        found.append(module.training)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            found.append(0 if tensor is None else tensor.data_ptr())
    return found


@contextmanager
def _unmoved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Refuses a forward pass that writes to the model, or throws dice on the host: a recording repeats one throw for ever."""

    def state() -> tuple[Any, ...]:
        on_host = torch.get_rng_state().tolist() if device.type == "cuda" else None
        return versions_of(model), random.getstate(), str(np.random.get_state()), on_host

    before = state()
    yield  # an error in between is said instead
    after = state()
    if after[0] != before[0]:
        raise RuntimeError("its forward pass writes to the model")
    if after != before:
        raise RuntimeError("its forward pass draws random numbers on the host")
