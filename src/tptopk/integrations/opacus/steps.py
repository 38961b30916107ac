"""Private steps around somebody else's training loop: drawn, run forward, run backward, and then paid for.

The loop draws a batch from the private loader; hooks on the module, there for the length of its forward pass, record
every layer's call; the loop's own backward pass brings the calls their gradients; `step` clips, charges, draws noise
and moves the model. What a loop may do otherwise, and what comes of it:

==============================================  =================================================================
the loop                                        what happens
==============================================  =================================================================
steps without a batch, or twice on one          refused: nothing charged, nothing moved
steps on a batch without running backward       refused, unless the batch is empty: then it adds nothing but noise
puts a penalty on bare weights into the loss    refused at the first step: it is no example's and cannot be clipped
runs backward twice over one forward pass       refused: add the losses up
runs forward and backward twice on a batch      the gradients of each record add up and are clipped as one
goes on to the next batch without a step        in training mode, charged all the same; an empty batch makes its noisy step
leaves out a part of a virtual batch            refused at the next step; the batch is charged
looks at a batch alone, begins a new pass       free: the new pass begins with the same sample again
goes past batches in evaluation mode            free, and the next pass begins with them; charged if it trains on a later one
runs the module in evaluation mode or no_grad   not recorded
==============================================  =================================================================
"""

from __future__ import annotations

import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tptopk.gradients.capture import Capture, NotCaptured
from tptopk.gradients.clipping import Clip, ClippedSum
from tptopk.gradients.examples import Batch
from tptopk.gradients.precision import computing_in
from tptopk.gradients.rules import Call
from tptopk.integrations.opacus.loader import Part
from tptopk.integrations.opacus.probe import probe
from tptopk.privacy.ledger import BudgetSpent, Ledger
from tptopk.privacy.plan import Plan, PrivacyWarning
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.supports.policies import SupportPolicy
from tptopk.supports.support import Support, trainable
from tptopk.training.mechanism import Mechanism
from tptopk.training.sampling import PoissonSampler
from tptopk.training.updates import Updater


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


@dataclass
class Drawn:
    """The batch that the loop was given last, and what has been made of it."""

    part: Part
    number: int  # of the pass over the loader
    step: tuple[int, int] | None  # phase and step of the plan that it is for; None: the plan has none left
    recording: Recording | None = None
    ran: bool = False  # whether the module was run on some part of the sample
    stepped: bool = False  # whether `step` was called for this part
    left_out: bool = False  # whether an earlier part of the sample was not stepped on
    total: ClippedSum | None = None  # of the parts so far


class Door:
    """A hook of the module: of a copied or pickled module it is another's, and does nothing."""

    def __init__(self, module: nn.Module, act: Callable[..., None]) -> None:
        self._module, self._act = module, act

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if module is self._module:
            self._act(*given)

    def __deepcopy__(self, memo: object) -> Door:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return closed_door, ()


def closed_door() -> Callable[..., None]:
    return _nothing


def _nothing(*given: Any) -> None:
    return


class PrivateSteps:
    """Everything between the loader, the module and the optimizer of one training."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        plan: Plan,
        *,
        clipping: str,
        loss_reduction: str,
        divisor: float,
        secure: bool,
    ) -> None:
        """`divisor`: what the loop expects its sums to be divided by, a public number."""
        self.module, self.optimizer, self.plan, self.ledger = module, optimizer, plan, Ledger(plan)
        self.sample_rate, self.dataset_size = plan.phases[0].sample_rate, plan.dataset_size
        self.device = next(module.parameters()).device
        self.run = secrets.token_hex(8)
        self._used_before, self._charged_elsewhere = 0, dict[str, Counter[int]]()
        self._id = secrets.token_hex(16)  # of what is charged between this and the next checkpoint loaded
        self._parameters = trainable(module)
        self._clipping, self._mean, self._secure = clipping, loss_reduction == "mean", secure
        self._scale = plan.expected_batch_size(plan.phases[0]) / divisor
        self._drawn: Drawn | None = None
        self._depth, self._passes, self._forwards = 0, 0, 0
        self._thrown = ExitStack()  # the dice of the forward pass that is going on
        self._probed = self._said = False
        self.policy = SupportPolicy(plan, Support.full(module), lambda n: self._streams.numpy("support", n))
        self._renew()
        self._sampler = PoissonSampler(self.dataset_size, self._streams)  # kept when a checkpoint is loaded
        module.register_forward_pre_hook(Door(module, self._enter), with_kwargs=True, prepend=True)
        module.register_forward_hook(Door(module, self._leave), always_call=True)
        self._unseen: dict[str, Tensor] | None = {}  # whole gradients of the first batch, until they have been compared
        for name, p in self._parameters.items():
            p.register_post_accumulate_grad_hook(self._taker(name))  # type: ignore[no-untyped-call]

    def _renew(self) -> None:
        """Fresh randomness: no noise of before is ever drawn again."""
        self._streams = Streams(run=self.run, secure=self._secure)
        self._mechanism = Mechanism(self.module, _no_loss, self.plan, self.ledger, self._streams)
        self._updater = Updater(self.module, self.optimizer)

    @property
    def next_step(self) -> tuple[int, int] | None:
        return self.ledger.next_step

    # The loader's side.

    @property
    def unused(self) -> int:
        """Place of the first sample not charged for: every charge of this process uses up one, and nothing else does."""
        return self._used_before + self._charges()[self._id].total()

    def sample(self, place: int) -> Tensor:
        return self._sampler.sample(0, place, self.sample_rate)

    def dice(self, purpose: str, *place: int) -> AbstractContextManager[None]:
        return self._streams.dice(self.device, purpose, *place)

    def begin_pass(self) -> int:
        self.settle()
        self._passes += 1
        return self._passes

    def given(self, part: Part, number: int) -> None:
        if number != self._passes:
            raise RuntimeError("another pass over the private loader has begun since; one pass at a time")
        self._depth = 0  # an interrupt may have left a forward pass without its end
        self._thrown.close()
        if part.first:
            self.settle(passed_over=True)
            if self._unseen is not None:
                self._unseen = {}  # gradients of a batch that was not stepped on are not this one's
            self._drawn = Drawn(part, number, self.next_step)
        elif self._drawn is not None:
            self._close_recording()
            self._drawn.left_out |= not self._drawn.stepped
            self._drawn.part, self._drawn.stepped = part, False

    def end_pass(self, number: int) -> None:
        if number == self._passes:
            self.settle(passed_over=True)

    def settle(self, *, passed_over: bool = False) -> None:
        """Charge the batch that was drawn and never stepped on, if the loop used it or went on past it in training."""
        drawn = self._drawn
        self._close_recording()
        self._drawn = None
        if drawn is None or (drawn.stepped and drawn.part.last):
            return
        if not (drawn.ran or (passed_over and self.module.training)):
            return
        self._forgo(drawn)
        if drawn.step is None or self.ledger.steps_allowed < 1:
            return
        support = self.policy.support(*drawn.step)
        if drawn.part.whole == 0:
            self._release(None, support, *drawn.step)
            return
        self.ledger.charge(*drawn.step, support.size)
        self._say_charged(stacklevel=5)

    def _forgo(self, drawn: Drawn) -> None:
        """Charge the samples that the loop went past in evaluation mode, now that it trains on a later one instead."""
        while self.unused < drawn.part.sample and self.next_step is not None and self.ledger.steps_allowed > 0:
            self.ledger.charge(*self.next_step, self.policy.support(*self.next_step).size)
            self._say_charged(stacklevel=3)
        drawn.step = self.next_step

    def _say_charged(self, stacklevel: int) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                "a batch was drawn for training and optimizer.step() was not called on it: it is charged all the same, because "
                "leaving it out may depend on its records",
                PrivacyWarning,
                stacklevel=stacklevel,
            )

    # The module's side.

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        drawn = self._drawn
        if self._depth > 1 or not (self.module.training and torch.is_grad_enabled()) or drawn is None or drawn.stepped:
            return
        self._check_unchanged()
        if not self._probed:
            probe(self.module, args, kwargs, drawn.part.size, self.sample_rate, self.dataset_size)
            self._probed = True
        drawn.ran = True
        self._forgo(drawn)
        if drawn.part.size:
            if drawn.recording is None:
                scale = float(drawn.part.size) if self._mean else 1.0
                drawn.recording = Recording(self.module, drawn.part.size, scale)
            drawn.recording.__enter__()
        self._forwards += 1
        self._thrown.enter_context(self.dice("forward", self._forwards))  # dropout

    def _leave(self, args: object, output: object) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._thrown.close()
        if self._depth == 0 and self._drawn is not None and self._drawn.recording is not None:
            self._drawn.recording.__exit__(None, None, None)

    def _taker(self, name: str) -> Callable[[Tensor], None]:
        """Takes away what backward leaves in `p.grad`: no gradient but the mechanism's is ever seen."""

        def take(p: Tensor) -> None:
            if self._unseen is not None and p.grad is not None:
                self._unseen[name] = self._unseen[name] + p.grad if name in self._unseen else p.grad
            p.grad = None

        return take

    def _compare(self, recording: Recording, scale: float) -> None:
        """Once, before anything is charged: what backward brought each parameter is what its layers' calls recorded."""
        whole = self._unseen
        if not whole:
            return
        ones = torch.ones(recording.batch, device=self.device)
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
        self._unseen = None

    def _close_recording(self) -> None:
        if self._drawn is not None and self._drawn.recording is not None:
            self._drawn.recording.__exit__(None, None, None)
            self._drawn.recording = None

    def _check_unchanged(self) -> None:
        now = trainable(self.module)
        if now.keys() != self._parameters.keys() or any(p is not self._parameters[name] for name, p in now.items()):
            raise Refusal(
                "the module's trainable parameters are not those that were made private; freeze and move before make_private"
            )
        if any(p.device != self.device for p in now.values()):
            raise Refusal(
                f"the module was made private on {self.device} and has been moved; move it before make_private"
            )

    # The optimizer's side.

    def zero_grad(self) -> None:
        if self._unseen is not None:
            self._unseen = {}
        if self._drawn is not None and self._drawn.recording is not None:
            self._drawn.recording.drop_heard()

    def step(self) -> bool:
        """Clip and add up the batch; after the last part of a sample, charge, release and move the model."""
        drawn = self._drawn
        if drawn is None or drawn.stepped:
            raise RuntimeError(
                "there is no batch to step on: every step takes a batch of its own, drawn from the loader that make_private "
                "returned. Nothing was charged"
            )
        if drawn.part.whole == 0:  # the module need not have been run
            self._forgo(drawn)
        if drawn.step is None or self.ledger.steps_allowed < 1:
            raise BudgetSpent(
                f"the {sum(self.ledger.charged.values())} steps charged are all that the plan pays for; plan more epochs. "
                "Nothing was charged"
            )
        if drawn.left_out:
            raise RuntimeError(
                "a part of this sample was left out: optimizer.step() is called after every part, and moves the model after the last. "
                "Nothing was charged yet; the sample will be when the next is drawn"
            )
        support = self.policy.support(*drawn.step)
        if drawn.part.size:
            part = self._clipped(drawn, support)
            drawn.total = part if drawn.total is None else drawn.total + part
        self._close_recording()
        drawn.stepped = True
        if not drawn.part.last:
            return False
        total, drawn.total = drawn.total, None
        self._release(total, support, *drawn.step)
        return True

    def _clipped(self, drawn: Drawn, support: Support) -> ClippedSum:
        assert drawn.step is not None
        if drawn.recording is None or not drawn.recording.heard:
            raise RuntimeError(
                "optimizer.step() before loss.backward() on the batch: run the module itself, in training mode, on the batch that "
                "was drawn, then backward. Nothing was charged"
            )
        self._check_unchanged()
        clip_norm = self.plan.phases[drawn.step[0]].clip_norm
        with torch.no_grad(), computing_in("fp32", self.device):
            self._compare(drawn.recording, float(drawn.part.size) if self._mean else 1.0)
            clip = Clip(support, self._clipping)
            for name, contribution in drawn.recording.contributions().items():
                clip.receive(name, contribution)
            weights, finite = clip.weights(drawn.part.size, clip_norm, 0.0, self.device)
            left_out = None if bool(finite.all()) else ~finite
            shapes = {name: mask.shape for name, mask in support.masks.items()}
            return ClippedSum(clip.sum(weights, left_out), shapes, clip_norm)

    def _release(self, total: ClippedSum | None, support: Support, phase: int, step: int) -> None:
        private = self._mechanism.release(total, support, phase, step)
        self.policy.observe(private)
        values: Mapping[str, Tensor] = private.values
        if self._scale != 1.0:
            values = {name: value * self._scale for name, value in values.items()}
        self._updater.apply(values, support)

    # Where a checkpoint was.

    def _charges(self) -> dict[str, Counter[int]]:
        """Who charged → phase index → steps; who charged is a process, from one checkpoint that it loaded to the next."""
        elsewhere = sum(self._charged_elsewhere.values(), Counter[int]())
        return {**self._charged_elsewhere, self._id: self.ledger.charged - elsewhere}

    def counts(self) -> Mapping[str, Any]:
        charges = {who: dict(steps) for who, steps in self._charges().items()}
        return {"run": self.run, "taken": dict(self.ledger.steps), "charges": charges}

    def stand_at(self, run: str, taken: Mapping[int, int], charges: Mapping[str, Mapping[int, int]]) -> None:
        """Go on from a checkpoint's counts. What has been charged besides stays charged, as lost steps.

        Formal guarantees: a step that this process or the checkpoint knows of is counted, and counted once, in whatever
        order processes load each other's checkpoints. Of one who charged the larger count is right, for it only grows.
        """
        known = self._charges()
        for who, steps in charges.items():
            known[who] = known.get(who, Counter[int]()) | Counter(steps)
        total = sum(known.values(), Counter[int]())
        lost = {phase: total[phase] - taken.get(phase, 0) for phase in range(len(self.plan.phases))}
        if any(count < 0 for count in lost.values()):
            raise Refusal("the checkpoint holds more steps than were charged")
        self._close_recording()
        self._drawn, self.run = None, run
        self._used_before = self.unused
        self.ledger = Ledger.carried_on(self.plan, taken, lost)
        self._charged_elsewhere, self._id = known, secrets.token_hex(16)
        self._renew()


def _no_loss(model: nn.Module, batch: Batch) -> Tensor:
    raise RuntimeError("sums come from the loop's own backward pass")
