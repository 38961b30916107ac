"""What the loop's own backward pass brings: recorded call by call, and held against whole gradients once.

==============================================  =================================================================
the loop                                        what happens
==============================================  =================================================================
runs the module in evaluation mode or no_grad   not recorded
runs forward and backward twice on a batch      the gradients of each record add up and are clipped as one
runs backward twice over one forward pass       refused: add the losses up
puts a penalty on bare weights into the loss    refused at the first step: it is no example's and cannot be clipped
==============================================  =================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tptopk.gradients.capture import Capture, NotCaptured
from tptopk.gradients.rules import Call
from tptopk.privacy.refusal import Refusal


class Recording(Capture):
    """The calls of one physical batch, brought their gradients by the loop's own backward pass.

    `scale` takes a mean's division by the batch back, so that gradients are those of each example's own loss.
    """

    def __init__(self, model: nn.Module, batch: int, scale: float) -> None:
        super().__init__(model, batch)
        self.batch, self._scale = batch, scale
        self.tolerance = 1e-4  # of two sums of the same gradients; more where some were rounded to few bits

    @property
    def heard(self) -> bool:
        return any(gradient is not None for call in self.calls for gradient in call.gradients)

    def drop_heard(self) -> None:
        """What `zero_grad` does: gradients are dropped, a forward pass that still waits for backward is not."""
        self.calls = [call for call in self.calls if all(gradient is None for gradient in call.gradients)]

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        try:
            return super()._record(module, args, kwargs, output)
        except NotCaptured as error:
            raise Refusal(
                f"{error}. In training mode the module takes the batch that was drawn, whole; other data goes through it in "
                "evaluation mode or under torch.no_grad()"
            ) from error

    def _hearer(self, call: Call, output: int) -> Callable[[Tensor | None], None]:
        def hear(gradient: Tensor | None) -> None:
            if gradient is None:
                return
            if call.gradients[output] is not None:
                raise RuntimeError(
                    "backward ran twice over one forward pass; add the losses up and call backward once. Nothing was charged"
                )
            if gradient.dtype != torch.float32 or gradient.is_cuda:
                self.tolerance = 5e-2
            call.gradients[output] = gradient.detach().float() * self._scale

        return hear


class WholeGradients:
    """What backward leaves in each `p.grad`: taken away, and for the first batch compared with what was recorded."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._first: dict[str, Tensor] | None = {}  # of the first batch, until they have been compared
        for name, p in parameters.items():
            p.register_post_accumulate_grad_hook(self._taker(name))  # type: ignore[no-untyped-call]

    def _taker(self, name: str) -> Callable[[Tensor], None]:
        """No gradient but the mechanism's is ever seen in `p.grad`."""

        def take(p: Tensor) -> None:
            if self._first is not None and p.grad is not None:
                self._first[name] = self._first[name] + p.grad if name in self._first else p.grad
            p.grad = None

        return take

    def drop(self) -> None:
        """What was taken of the first batch is of no backward pass that counts."""
        if self._first is not None:
            self._first = {}

    def compare(self, recording: Recording, scale: float) -> None:
        """Once, before anything is charged: what backward brought each parameter is what its layers' calls recorded."""
        whole = self._first
        if not whole:
            return
        ones = torch.ones(recording.batch, device=next(iter(whole.values())).device)
        recorded = {name: c.weighted_sum(ones, None) / scale for name, c in recording.contributions().items()}
        norms = torch.stack([g.norm() for g in whole.values()])
        for name, gradient in whole.items():
            gap = (gradient - recorded[name] if name in recorded else gradient).norm()
            if bool(gap > recording.tolerance * gradient.norm() + 1e-6 * norms.norm()):
                raise Refusal(
                    f"parameter {name} has a gradient that no call of its layer accounts for: the loss uses it as a bare tensor (a "
                    "penalty on the weights, say), and what is not an example's cannot be clipped as one. Use the optimizer's "
                    "weight_decay. Nothing was charged"
                )
        self._first = None
