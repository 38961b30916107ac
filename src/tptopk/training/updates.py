"""Applying a private gradient: any torch optimizer, with inactive coordinates held still to the bit."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from tptopk.privacy.refusal import Refusal, check_number
from tptopk.supports.support import Support, trainable


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that does not hold exactly the model's trainable parameters."""
    if not isinstance(optimizer, Optimizer):
        raise Refusal(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer over the model's parameters"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Refusal(
            f"{type(optimizer).__name__} evaluates the loss several times a step, which no step of the plan pays for; "
            "use an optimizer that needs only the gradient, such as SGD or AdamW"
        )
    if isinstance(optimizer, SparseAdam):
        raise Refusal("SparseAdam takes sparse gradients, and private gradients are dense; use Adam")
    if any(optimizer.state.values()):
        raise Refusal(
            "the optimizer has taken steps before: its state may hold gradients that never passed the mechanism; build a new one"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    names = {id(p): name for name, p in trainable(model).items()}
    missing = [name for key, name in names.items() if key not in held]
    if missing:
        raise Refusal(
            f"the optimizer does not hold parameter {missing[0]}"
            + (f" and {len(missing) - 1} more" if missing[1:] else "")
            + "; build it from model.parameters(), or set requires_grad=False on what it should leave alone"
        )
    if held - set(names):
        raise Refusal("the optimizer holds parameters that are not the model's; build it from this model's parameters")


class Updater:
    """Steps an optimizer on private gradients.

    Momentum, decay and adaptive states all move coordinates that have no gradient. So optimizer state is projected
    onto the support whenever it changes, and after every step inactive coordinates are put back from a copy.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._parameters, self._optimizer = trainable(model), optimizer
        self._support: Support | None = None

    @torch.no_grad()
    def apply(self, gradient: Mapping[str, Tensor], support: Support) -> None:
        if support is not self._support:
            # off the old one too: decay builds up state where nothing is active
            for active in (self._support, support):
                if active is not None:
                    self._project_state(active)
            self._support = support
        before = {name: p.clone() for name, p in self._parameters.items() if not support.covers(name)}
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                p.grad = None  # also of frozen parameters: nothing but the mechanism's output is ever applied
        for name, p in self._parameters.items():
            p.grad = gradient[name].to(p.dtype)
        try:
            self._optimizer.step()
        finally:  # even when interrupted inside the step
            for name, old in before.items():
                p = self._parameters[name]
                torch.where(support[name], p, old, out=p)
            for p in self._parameters.values():
                p.grad = None

    def _project_state(self, support: Support) -> None:
        for name, p in self._parameters.items():
            for value in self._optimizer.state.get(p, {}).values():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    value.copy_(support.keep(name, value))


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors by name and plain values."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}/{key}"] = value
            else:
                plain[f"{index}/{key}"] = value
    return tensors, {"plain": plain, "groups": state["param_groups"]}


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**values["plain"], **tensors}.items():
        index, _, key = name.partition("/")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": values["groups"]})


class WeightAverage:
    """Exponential moving average of the weights: decay min(`decay`, (1 + t)/(10 + t)). Post-processing, free."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        check_number("ema", decay, above=0, below=1)
        self._parameters, self._decay, self._steps = trainable(model), decay, 0
        self._average = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        self._steps += 1
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        for name, p in self._parameters.items():
            self._average[name].lerp_(p, 1 - decay)

    def state(self) -> tuple[dict[str, Tensor], int]:
        return self._average, self._steps

    @torch.no_grad()
    def restore(self, average: Mapping[str, Tensor], steps: int) -> None:
        self._steps = steps
        for name, value in self._average.items():
            value.copy_(average[name])

    @torch.no_grad()
    def write_to_model(self) -> None:
        for name, p in self._parameters.items():
            p.copy_(self._average[name])
