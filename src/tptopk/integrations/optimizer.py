"""The user's optimizer, made private."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.refusal import Refusal


class Steps(Protocol):
    """Who makes private steps for an optimizer."""

    plan: Plan

    @property
    def next_step(self) -> tuple[int, int] | None:
        """The phase and step of the plan that come next; None when all are taken."""

    def step(self) -> object:
        """Make the step on the batch that was drawn."""

    def zero_grad(self) -> None:
        """Drop the gradients that backward brought so far."""


class PrivateOptimizer(Optimizer):
    """The user's optimizer, whose `step` applies what the mechanism releases and nothing else."""

    def __init__(self, original: Optimizer, steps: Steps, divisor: float) -> None:
        self.original_optimizer, self.expected_batch_size, self._private_steps = original, divisor, steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._private_steps.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._private_steps.zero_grad()
        self.original_optimizer.zero_grad(set_to_none)

    @property
    def _phase(self) -> Phase:
        return self._private_steps.plan.phases[(self._private_steps.next_step or (-1, 0))[0]]

    @property
    def noise_multiplier(self) -> float:
        """σ of the phase that the next step is in."""
        return self._phase.noise_multiplier

    @property
    def max_grad_norm(self) -> float:
        return self._phase.clip_norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise Refusal(
            "the parameters of a private optimizer are settled; build the optimizer whole before make_private"
        )

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.original_optimizer.load_state_dict(dict(state_dict))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original_optimizer"], name)

    def __repr__(self) -> str:
        return f"private {self.original_optimizer!r}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a private optimizer is not copied or pickled; save its state_dict()")
