"""Records what each layer took in and what came back to it, whoever runs backward.

Going forward, a hook keeps each call's inputs and passes its outputs through a tap: an operation that changes nothing
and, going backward, hands over the gradient that passes it. All taps drain into one scalar, the sink. Asking autograd
for the sink's gradient (`differentiate`) visits every tap and computes no weight gradient; somebody else's
`loss.backward()` visits them as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from tptopk.gradients.contributions import Contribution, Dense
from tptopk.gradients.rules import Call, Registered, find_rule
from tptopk.supports.support import trainable

Receive = Callable[[str, Contribution], None]


class NotCaptured(Exception):
    """This model cannot be captured correctly; another engine must be used."""


def claimed_modules(model: nn.Module) -> dict[nn.Module, Registered]:
    """The modules whose rules together answer for every trainable parameter, or NotCaptured with the reason."""
    return dict(_claims(model, "the model"))


def _claims(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, Registered]]:
    if not any(p.requires_grad for p in module.parameters()):
        return
    rule = find_rule(module)
    if rule is not None:
        objection = rule.objection(module)
        if objection:
            raise NotCaptured(f"{name} ({type(module).__name__}): {objection}")
        own = {local for local, _ in module.named_parameters(recurse=False)}
        if not rule.whole and own - {"weight", "bias"}:
            raise NotCaptured(
                f"{name} ({type(module).__name__}) is parametrised by {sorted(own - {'weight', 'bias'})[0]}"
            )
        yield module, rule
        if rule.whole:
            return
    elif any(p.requires_grad for p in module.parameters(recurse=False)):
        raise NotCaptured(f"{name} ({type(module).__name__}) holds parameters and no rule knows it")
    for child_name, child in module.named_children():
        yield from _claims(child, child_name if name == "the model" else f"{name}.{child_name}")


class _Tap(torch.autograd.Function):
    """The identity, on the same memory: an activation that writes over it afterwards is an operation on the tap's result."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, sink: Tensor, hear: Callable[[Tensor | None], None]) -> Tensor:
        ctx.hear = hear
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        ctx.hear(gradient)
        return gradient, None, None


class Capture:
    """A context in which every call of a layer that owns trainable parameters is recorded.

    `batch` examples; with `rows`, each is that many rows, one after another, of what the model is given.
    """

    def __init__(self, model: nn.Module, batch: int, rows: int = 1) -> None:
        self.calls: list[Call] = []
        self._names = {id(p): name for name, p in trainable(model).items()}
        self.rules = claimed_modules(model)
        self._batch, self._rows = batch * rows, rows
        self._handles: list[RemovableHandle] = []
        self._sink = torch.zeros((), requires_grad=True)
        self._receive: Receive | None = None
        self._alone: set[int] = set()

    def __enter__(self) -> Capture:
        for module in self.rules:
            # first of all hooks: what others make of an output, and the end of the pass, come after it was recorded
            self._handles.append(module.register_forward_hook(self._record, with_kwargs=True, prepend=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        leaves, structure = tree_flatten(output)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rule = self.rules[module]
        for n, place in enumerate(places):
            shape, axis = tuple(leaves[place].shape), rule.batch_axis(module, n)
            if len(shape) <= axis or shape[axis] != self._batch:
                raise NotCaptured(
                    f"an output of {type(module).__name__} has shape {shape}, which is not led by the batch of {self._batch}"
                )
        args, kwargs = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        call = Call(module, self._batch, args, kwargs, [None] * len(places))
        for n, place in enumerate(places):
            if leaves[place].requires_grad:
                leaves[place] = _Tap.apply(leaves[place], self._sink, self._hearer(call, n))  # type: ignore[no-untyped-call]
        self.calls.append(call)
        return tree_unflatten(leaves, structure)

    def _hearer(self, call: Call, output: int) -> Callable[[Tensor | None], None]:
        def hear(gradient: Tensor | None) -> None:
            call.gradients[output] = gradient
            if self._receive is not None and id(call) in self._alone:
                for name, contribution in self._of(call):
                    self._receive(name, contribution)
                call.forget()

        return hear

    @torch.no_grad()
    def differentiate(self, total: Tensor, receive: Receive | None = None) -> None:
        """Bring every call its output gradients, and compute nothing else.

        `receive` is given each parameter's contribution as soon as it is whole, so that a layer's inputs and output
        gradient need not outlive its own turn of the backward pass. Without it they are kept for `contributions`.
        """
        uses = Counter(id(p) for call in self.calls for p in self._parameters(call).values())
        self._alone = {
            id(call)
            for call in self.calls
            if len(call.gradients) == 1 and all(uses[id(p)] == 1 for p in self._parameters(call).values())
        }
        self._receive = receive
        torch.autograd.grad(total, [self._sink], allow_unused=True)
        if receive is not None:
            for name, contribution in self.contributions().items():
                receive(name, contribution)

    def contributions(self) -> dict[str, Contribution]:
        """Parameter name → its per-example gradients, summed over all calls and all layers that share it."""
        found: dict[str, list[Contribution]] = {}
        for call in self.calls:
            if not call.forgotten:
                for name, contribution in self._of(call):
                    found.setdefault(name, []).append(contribution)
        return {
            name: parts[0] if len(parts) == 1 else Dense(torch.stack([part.dense() for part in parts]).sum(0))
            for name, parts in found.items()
        }

    def _parameters(self, call: Call) -> dict[str, nn.Parameter]:
        return dict(call.module.named_parameters(recurse=self.rules[call.module].whole))

    def _of(self, call: Call) -> Iterator[tuple[str, Contribution]]:
        parameters = self._parameters(call)
        for local, contribution in self.rules[call.module].rule(call).items():
            name = self._names.get(id(parameters[local]))
            if name is not None:
                yield name, contribution if self._rows == 1 else contribution.folded(self._rows)
