"""Records what each layer took in and what came back to it, whoever runs backward.

Going forward a hook keeps each call's inputs and the place of its outputs in autograd's graph (a gradient edge:
the output tensor itself goes silently wrong when an in-place activation follows). Going backward the output
gradients are either asked for (`Capture.differentiate`, which computes no weight gradient at all) or overheard
while somebody else's `loss.backward()` runs (`listen=True`).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from tptopk.gradients.contributions import Contribution, Dense
from tptopk.gradients.rules import Call, Registered, find_rule
from tptopk.supports.support import trainable


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


class Capture:
    """A context in which every call of a layer that owns trainable parameters is recorded."""

    def __init__(self, model: nn.Module, batch: int, *, listen: bool = False) -> None:
        self.calls: list[Call] = []
        self._names = {id(p): name for name, p in trainable(model).items()}
        self.rules = claimed_modules(model)
        self._batch, self._listen = batch, listen
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Capture:
        for module in self.rules:
            self._handles.append(module.register_forward_hook(self._record, with_kwargs=True))
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
        axis = self.rules[module].batch_axis
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for n, tensor in enumerate(tensors):
            if tensor.dim() <= axis(module, n) or tensor.shape[axis(module, n)] != self._batch:
                raise NotCaptured(
                    f"an output of {type(module).__name__} has shape {tuple(tensor.shape)}, "
                    f"which is not led by the batch of {self._batch}"
                )
        # An in-place activation on a view rewrites the view's history and cuts the edge: give it a tensor of its own.
        leaves = [leaf.clone() if isinstance(leaf, Tensor) and leaf._is_view() else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        args, kwargs = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        call = Call(
            module,
            self._batch,
            args,
            kwargs,
            [get_gradient_edge(t) if t.requires_grad else None for t in tensors],
            [tuple(t.shape) for t in tensors],
        )
        call.gradients = [None] * len(tensors)
        if self._listen:
            for n, edge in enumerate(call.edges):
                if edge is not None:
                    edge.node.register_prehook(_overhear(call, n, edge.output_nr))
        self.calls.append(call)
        return tree_unflatten(leaves, structure)

    def differentiate(self, total: Tensor) -> None:
        """Fill in every call's output gradients, and compute nothing else."""
        places = [(call, n, edge) for call in self.calls for n, edge in enumerate(call.edges) if edge is not None]
        if not places:
            return
        gradients = torch.autograd.grad(total, [edge for _, _, edge in places], allow_unused=True)
        for (call, n, _), gradient in zip(places, gradients, strict=True):
            call.gradients[n] = gradient

    def contributions(self) -> dict[str, Contribution]:
        """Parameter name → its per-example gradients, summed over all calls and all layers that share it."""
        found: dict[str, list[Contribution]] = {name: [] for name in self._names.values()}
        for call in self.calls:
            parameters = dict(call.module.named_parameters())
            for local, contribution in self.rules[call.module].rule(call).items():
                name = self._names.get(id(parameters[local]))
                if name is not None:
                    found[name].append(contribution)
        return {
            name: parts[0] if len(parts) == 1 else Dense(_sum([part.dense() for part in parts]))
            for name, parts in found.items()
            if parts
        }


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _overhear(call: Call, output: int, position: int) -> Any:
    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        call.gradients[output] = gradients[position]

    return keep
