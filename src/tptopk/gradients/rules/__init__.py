"""One file a layer type: how a layer's input and output gradient become per-example gradients of its parameters.

A rule is a function from a `Call` to `{local parameter name: Contribution}`, registered for a layer class. It
applies only to layers that run that class's own forward: a subclass that overrides it has no rule.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from tptopk.gradients.contributions import Contribution


@dataclass
class Call:
    """One call of a layer, recorded going forward; its output gradients are filled in going backward."""

    module: nn.Module
    batch: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: list[Tensor | None]  # one for each output tensor, None where the loss does not depend on it
    forgotten: bool = False

    def forget(self) -> None:
        """Let go of the tensors: the call has been made into contributions."""
        self.args, self.kwargs, self.gradients, self.forgotten = (), {}, [], True

    @property
    def input(self) -> Tensor:
        """The first argument, in float32."""
        value = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return value.detach().float() if value.is_floating_point() else value  # type: ignore[no-any-return]

    @property
    def output_gradient(self) -> Tensor | None:
        """The first output's gradient in float32; None where the output does not matter to the loss."""
        gradient = self.gradients[0]
        return None if gradient is None else gradient.float()


Rule = Callable[[Call], dict[str, Contribution]]
R = TypeVar("R", bound=Rule)


@dataclass(frozen=True)
class Registered:
    layer: type[nn.Module]
    rule: Rule
    methods: tuple[str, ...]  # that must be the layer's own for the rule to hold
    whole: bool  # the rule also answers for the layer's submodules
    batch_axis: Callable[[nn.Module, int], int]  # of output number n
    objection: Callable[[nn.Module], str | None]


_RULES: dict[type[nn.Module], Registered] = {}


def rule_for(
    *layers: type[nn.Module],
    methods: tuple[str, ...] = ("forward",),
    whole: bool = False,
    batch_axis: Callable[[nn.Module, int], int] = lambda module, output: 0,
    objection: Callable[[nn.Module], str | None] = lambda module: None,
) -> Callable[[R], R]:
    """Register a rule for layer classes; `objection` says why a certain layer must not use it."""

    def register(rule: R) -> R:
        for layer in layers:
            _RULES[layer] = Registered(layer, rule, methods, whole, batch_axis, objection)
        return rule

    return register


def find_rule(module: nn.Module) -> Registered | None:
    """The rule whose class's own code this module runs, if there is one."""
    for layer in type(module).__mro__:
        if layer in _RULES:
            found = _RULES[layer]
            own = all(getattr(type(module), m) is getattr(layer, m) and m not in vars(module) for m in found.methods)
            return found if own else None
    return None


for _name in ("linear", "conv", "embedding", "norm", "attention", "recurrent"):
    importlib.import_module(f"{__name__}.{_name}")
