"""Private steps inside `Trainer`'s loop, and their record on the disk."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.trainer_utils import get_last_checkpoint

from tptopk.gradients.examples import Batch, PerExampleLoss, batch_length, take
from tptopk.privacy.description import describe
from tptopk.privacy.ledger import BudgetSpent, Ledger
from tptopk.privacy.plan import Plan, PrivacyWarning
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.supports.policies import SupportPolicy
from tptopk.supports.support import Support, trainable
from tptopk.supports.warmup import WarmUp
from tptopk.training.checkpoint import load_checkpoint, save_checkpoint
from tptopk.training.facts import facts_in_run_json, facts_of_ledger
from tptopk.training.mechanism import Mechanism
from tptopk.training.metrics import StepRecord
from tptopk.training.run import Run, RunFolder
from tptopk.training.standing import ledger_place, place_in_ledger, refuse_another_run
from tptopk.training.updates import Updater

FOLDER = "privacy"  # in the output folder, a run folder; in a checkpoint, what the next step needs of it


class TrainerSteps:
    """One training by `Trainer`: its optimizer's steps, what they cost, and the run folder that says so."""

    def __init__(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        engine: str,
        plan: Plan,
        streams: Streams,
        *,
        micro_batch_size: int,
        precision: str,
    ) -> None:
        self.model, self.loss, self.engine, self.plan = model, loss, engine, plan
        self._streams, self._most, self._precision = streams, micro_batch_size, precision
        self.policy = SupportPolicy(plan, Support.full(model), lambda n: streams.numpy("support", n))
        self._warmup = WarmUp(plan) if plan.spec.warmup else None
        self.ledger: Ledger | None = None
        self._batch: Batch | None = None
        self._history: list[StepRecord] = []
        self._started = time.monotonic()

    def open(
        self,
        path: Path,
        checkpoint: Path | None,
        global_step: int,
        config: Mapping[str, Any],
        *,
        training_loss: bool = False,
    ) -> None:
        """Begin a run in the folder, or go on with the one that is there from a checkpoint of Trainer's at that step."""
        said: dict[str, Any] = {"described": describe(path, self.model, config), "generator": self._streams.name}
        if checkpoint is None:
            self._folder = RunFolder(path, self.model, self.plan, config)
            self.ledger = Ledger(self.plan, self._folder.ledger, training_loss=training_loss, **said)
        else:
            # measured when an earlier attempt was over
            training_loss |= bool(facts_in_run_json(path).get("training_loss"))
            ledger = self._resumed(path, checkpoint, global_step, training_loss=training_loss, **said)
            try:
                self._folder = RunFolder(path, self.model, self.plan, config, resume=True)
                self._history = self._folder.keep_metrics(sum(ledger.steps.values()))
            except Refusal:
                ledger.release()
                raise
            self.ledger = ledger
        self._mechanism = Mechanism(
            self.model, self.loss, self.plan, self.ledger, self._streams, self.engine, precision=self._precision
        )

    def _resumed(self, path: Path, checkpoint: Path, global_step: int, **said: Any) -> Ledger:
        """Every charge after the checkpoint stays charged, and no randomness of before is drawn again."""
        refuse_another_run(path, self.plan)
        found = load_checkpoint(checkpoint / FOLDER)
        if found is None:
            raise Refusal(f"{checkpoint} holds no privacy state; resume from a checkpoint that PrivateTrainer saved")
        taken, length, head = place_in_ledger(found, self.plan, checkpoint)
        if sum(taken.values()) != global_step:
            raise Refusal(
                f"{checkpoint} stands at step {global_step} and its privacy state at step {sum(taken.values())}; resume from another"
            )
        ledger = Ledger.resume(path / "ledger.jsonl", taken, length, head, **said)
        try:
            self.policy.restore(found.part("policy"))
            if self._warmup is not None and (part := found.part("warmup")):
                self._warmup.restore(part, trainable(self.model))
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            ledger.release()
            raise Refusal(f"the checkpoint {checkpoint} does not fit this model: {error}") from error
        return ledger

    def save(self, checkpoint: Path) -> None:
        """Beside the model and the optimizer that Trainer saves: charges, support and scores. No secret is in it."""
        assert self.ledger is not None
        parts = {"policy": self.policy.state(), "warmup": self._warmup.unfinished() if self._warmup else {}}
        folder = checkpoint / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        save_checkpoint(folder, parts, ledger_place(self.ledger))

    @property
    def taken(self) -> int:
        return sum(self.ledger.steps.values()) if self.ledger is not None else 0

    @property
    def steps_left(self) -> int:
        return self.ledger.steps_allowed if self.ledger is not None else self.plan.steps

    @property
    def next_step(self) -> tuple[int, int] | None:
        assert self.ledger is not None
        return self.ledger.next_step

    def use(self, optimizer: Optimizer) -> None:
        self._optimizer, self._updater = optimizer, Updater(self.model, optimizer)

    def given(self, batch: Batch) -> None:
        """The batch that the next step is for. A sample that was drawn is never passed over."""
        if self._batch is not None:
            raise RuntimeError("a batch was handed over and optimizer.step() was not called on it; nothing was charged")
        self._batch = batch

    def zero_grad(self) -> None:
        """Backward is never run outside a step, so there is nothing to drop."""

    def step(self) -> None:
        """Charge, clip, add up, draw noise and move the model, all for the batch that was given."""
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError(
                "there is no batch to step on: every step takes one of its own, by training_step. Nothing was charged"
            )
        place = self.next_step
        if place is None or self.steps_left < 1:
            raise BudgetSpent(f"the {self.taken} steps taken are all that the plan pays for. Nothing was charged")
        support = self.policy.support(*place)
        private = self._mechanism.private_gradient(self.parts(batch), support, *place)
        self.policy.observe(private)
        if self._warmup is not None:
            self._folder.take_in(self._warmup, private)
        norm = float(nn.utils.get_total_norm(private.values.values()))
        rate = float(self._optimizer.param_groups[0]["lr"])
        self._updater.apply(private.values, support)
        self._history.append(StepRecord(self.taken, place[0], support.size, rate, norm))
        self._folder.record(self._history[-1])

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """A sample in even physical batches; nothing where no record was drawn."""
        size = batch_length(batch)
        count = -(-size // self._most)
        for n in range(count):
            yield take(batch, slice(n * size // count, (n + 1) * size // count))

    @torch.no_grad()
    def mean_loss(self, batch: Batch) -> Tensor:
        """Of private records, without noise: for whoever asked to see it."""
        losses = [self.loss(self.model, part) for part in self.parts(batch)]
        return torch.cat(losses).mean() if losses else torch.zeros((), device=next(self.model.parameters()).device)

    def warn_of_dropped(self) -> None:
        """Of planned steps that lost ones took the budget of."""
        dropped = self.plan.steps - self.taken
        if self.steps_left < 1 and dropped:
            warnings.warn(
                f"the last {dropped} of {self.plan.steps} steps were dropped: with what was charged before, lost steps of earlier attempts "
                "among it, they would cost more than the budget",
                PrivacyWarning,
                stacklevel=3,
            )

    def close(self, status: str, config: Mapping[str, Any], *, test_metrics: bool, training_loss: bool) -> Run:
        """Write down the end, whatever it was."""
        assert self.ledger is not None
        if status != "finished":
            self.ledger.recount()
        self.ledger.training_loss |= training_loss
        facts = facts_of_ledger(self.ledger, seeded=False, averaged=False, status=status, generator=self._streams.name)
        run = Run(
            self.model,
            self.plan,
            self.ledger.epsilon(),
            self.policy.current,
            self._history,
            {},
            replace(facts, test_metrics=test_metrics),
            status,
            time.monotonic() - self._started,
            self.engine,
            self._folder.path,
            dict(config),
        )
        self._folder.close(run, self.ledger)
        return run

    def abandon(self) -> None:
        """Leave the folder as a crash would: the model may not be saved."""
        if self.ledger is not None:
            self._folder.abandon(self.ledger)
            self.ledger = None

    def add_that_the_loss_was_shown(self, run: Run) -> None:
        """Of a run that is closed: in its statement and its run.json."""
        run.facts = replace(run.facts, training_loss=True)
        self._folder.describe(run)


def checkpoint_at(given: object, output_dir: str) -> Path | None:
    """What `resume_from_checkpoint` means: a folder, or True for the last checkpoint of the output folder."""
    if given is None or given is False:
        return None
    found = get_last_checkpoint(output_dir) if given is True else given
    if not isinstance(found, (str, os.PathLike)):
        raise Refusal(f"{output_dir} holds no checkpoint to resume from")
    return Path(found)
