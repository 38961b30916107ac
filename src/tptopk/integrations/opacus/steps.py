"""Private steps around somebody else's training loop: drawn, run forward, run backward, and then paid for.

The loop draws a batch from the private loader; hooks on the module, there for the length of its forward pass, record
every layer's call; the loop's own backward pass brings the calls their gradients; `step` clips, charges, draws noise
and moves the model. What a loop may do otherwise, and what comes of it; `recording` says the same of backward passes:

==============================================  =================================================================
the loop                                        what happens
==============================================  =================================================================
steps without a batch, or twice on one          refused: nothing charged, nothing moved
steps on a batch without running backward       refused, unless the batch is empty: then it adds nothing but noise
goes on to the next batch without a step        in training mode, charged all the same; an empty batch makes its noisy step
leaves out a part of a virtual batch            refused at the next step; the batch is charged
looks at a batch alone, begins a new pass       free: the new pass begins with the same sample again
goes past batches in evaluation mode            free, and the next pass begins with them; charged if it trains on a later one
==============================================  =================================================================
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tptopk.gradients.clipping import Clip, ClippedSum, left_out
from tptopk.gradients.examples import Batch
from tptopk.gradients.precision import computing_in
from tptopk.gradients.traces import ModelChanged, refuse_changed, versions_of
from tptopk.integrations.opacus.charges import Charges
from tptopk.integrations.opacus.door import Door, _nothing, closed_door  # noqa: F401  # older pickles name the last two here
from tptopk.integrations.opacus.loader import Part
from tptopk.integrations.opacus.probe import probe
from tptopk.integrations.opacus.recording import Recording, WholeGradients
from tptopk.privacy.ledger import BudgetSpent, Ledger
from tptopk.privacy.plan import Plan, PrivacyWarning
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.supports.policies import SupportPolicy
from tptopk.supports.support import Support, trainable
from tptopk.training.mechanism import Mechanism
from tptopk.training.sampling import PoissonSampler
from tptopk.training.updates import Updater


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
    before: list[Any] | None = None  # what the module held when it was first run on this part


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
        self.module, self.optimizer, self.plan, self.charges = module, optimizer, plan, Charges(plan)
        self.sample_rate, self.dataset_size = plan.sample_rate, plan.dataset_size
        self.device = next(module.parameters()).device
        self.run = secrets.token_hex(8)
        self._parameters = trainable(module)
        self._clipping, self._mean, self._secure = clipping, loss_reduction == "mean", secure
        self._scale = plan.expected_batch_size() / divisor
        self._drawn: Drawn | None = None
        self._depth, self._passes, self._forwards = 0, 0, 0
        self._thrown = ExitStack()  # the dice of the forward pass that is going on
        self._probed = self._said = False
        self._changed: ModelChanged | None = None
        self.policy = SupportPolicy(plan, Support.full(module), lambda n: self._streams.numpy("support", n))
        self._renew()
        self._sampler = PoissonSampler(self.dataset_size, self._streams)  # kept when a checkpoint is loaded
        module.register_forward_pre_hook(Door(module, self._enter), with_kwargs=True, prepend=True)
        module.register_forward_hook(Door(module, self._leave), always_call=True)
        self._whole = WholeGradients(self._parameters)

    def _renew(self) -> None:
        """Fresh randomness: no noise of before is ever drawn again."""
        self._streams = Streams(run=self.run, secure=self._secure)
        self._mechanism = Mechanism(self.module, _no_loss, self.plan, self.ledger, self._streams)
        self._updater = Updater(self.module, self.optimizer)

    @property
    def ledger(self) -> Ledger:
        return self.charges.ledger

    @property
    def next_step(self) -> tuple[int, int] | None:
        return self.ledger.next_step

    # The loader's side.

    @property
    def unused(self) -> int:
        """Place of the first sample not charged for: every charge of this process uses up one, and nothing else does."""
        return self.charges.here

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
            self._whole.drop()  # gradients of a batch that was not stepped on are not this one's
            self._drawn = Drawn(part, number, self.next_step)
        elif self._drawn is not None:
            self._close_recording()
            self._drawn.left_out |= not self._drawn.stepped
            self._check_kept_nothing(self._drawn)
            self._drawn.part, self._drawn.stepped, self._drawn.before = part, False, None

    def end_pass(self, number: int) -> None:
        if number == self._passes:
            self.settle(passed_over=True)

    def settle(self, *, passed_over: bool = False) -> None:
        """Charge the batch that was drawn and never stepped on, if the loop used it or went on past it in training."""
        drawn = self._drawn
        self._close_recording()
        self._drawn = None
        if drawn is not None:
            self._check_kept_nothing(drawn)
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
        drawn.before = drawn.before or versions_of(self.module)
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

    def _close_recording(self) -> None:
        if self._drawn is not None and self._drawn.recording is not None:
            self._drawn.recording.__exit__(None, None, None)
            self._drawn.recording = None

    def _check_kept_nothing(self, drawn: Drawn) -> None:
        """The module holds what it held before it was run on this part; if not, nothing goes on here any more."""
        if drawn.before is None or drawn.stepped:
            return
        try:
            refuse_changed(
                self.module, drawn.before, "it was run on the batch (change it before its forward pass, or after step)"
            )
        except ModelChanged as error:
            self._changed = error
            raise

    def refuse_if_changed(self) -> None:
        if self._changed is not None:
            raise self._changed

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
        self._whole.drop()
        if self._drawn is not None and self._drawn.recording is not None:
            self._drawn.recording.drop_heard()

    def step(self) -> bool:
        """Clip and add up the batch; after the last part of a sample, charge, release and move the model."""
        self.refuse_if_changed()
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
        self._check_kept_nothing(drawn)
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
            self._whole.compare(drawn.recording, float(drawn.part.size) if self._mean else 1.0)
            clip = Clip(support, self._clipping)
            for name, contribution in drawn.recording.contributions().items():
                clip.receive(name, contribution)
            weights, finite = clip.weights(drawn.part.size, clip_norm, 0.0, self.device)
            shapes = {name: mask.shape for name, mask in support.masks.items()}
            return ClippedSum(clip.sum(weights, left_out(finite)), shapes, clip_norm)

    def _release(self, total: ClippedSum | None, support: Support, phase: int, step: int) -> None:
        private = self._mechanism.release(total, support, phase, step)
        self.policy.observe(private)
        values: Mapping[str, Tensor] = private.values
        if self._scale != 1.0:
            values = {name: value * self._scale for name, value in values.items()}
        self._updater.apply(values, support)

    # Where a checkpoint was.

    def counts(self) -> Mapping[str, Any]:
        return {"run": self.run, **self.charges.counts()}

    def stand_at(self, run: str, taken: Mapping[int, int], charges: Mapping[str, Mapping[int, int]]) -> None:
        """Go on from a checkpoint's counts, with fresh randomness."""
        self.charges.stand_at(taken, charges)
        self._close_recording()
        self._drawn, self.run = None, run
        self._renew()


def _no_loss(model: nn.Module, batch: Batch) -> Tensor:
    raise RuntimeError("sums come from the loop's own backward pass")
