"""Where a run stands: everything that a step changes, saved to a checkpoint and put back from one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tptopk.privacy.account import charge_account, has_paid
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.ledger_record import LedgerRecord, read_ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal
from tptopk.supports.policies import SupportPolicy
from tptopk.supports.support import trainable
from tptopk.supports.warmup import WarmUp
from tptopk.training.begun import refuse_finished
from tptopk.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from tptopk.training.lines import missing_lines
from tptopk.training.loading import load_weights
from tptopk.training.run import describe_anew
from tptopk.training.updates import WeightAverage, optimizer_state, restore_optimizer


class Standing:
    """Everything that a step changes, so that it can be saved and put back."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        average: WeightAverage | None,
        policy: SupportPolicy,
        warmup: WarmUp | None = None,
    ) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._average, self._policy, self._warmup = average, policy, warmup

    def save(self, folder: Path, ledger: Ledger) -> None:
        state, optimizer = optimizer_state(self._optimizer)
        average, averaged = self._average.state() if self._average else ({}, 0)
        parts = {
            "model": self._model.state_dict(),
            "optimizer": state,
            "average": average,
            "policy": self._policy.state(),
            "warmup": self._warmup.unfinished() if self._warmup else {},
        }
        save_checkpoint(
            folder,
            parts,
            {
                **ledger_place(ledger),
                "optimizer": optimizer,
                "scheduler": self._scheduler.state_dict() if self._scheduler else None,
                "averaged": averaged,
            },
        )

    def restore(self, found: Checkpoint) -> None:
        try:
            if (found.values["scheduler"] is None) != (self._scheduler is None):
                raise Refusal("the checkpoint was made with a scheduler and there is none now, or the other way round")
            if bool(found.part("average")) != (self._average is not None):
                raise Refusal("the checkpoint was made with ema and there is none now, or the other way round")
            load_weights(self._model, found.part("model"))
            self._model.train()
            restore_optimizer(self._optimizer, found.part("optimizer"), found.values["optimizer"])
            if self._scheduler is not None:
                self._scheduler.load_state_dict(found.values["scheduler"])
            if self._average is not None:
                self._average.restore(found.part("average"), found.values["averaged"])
            self._policy.restore(found.part("policy"))
            if self._warmup is not None and (part := found.part("warmup")):
                self._warmup.restore(part, trainable(self._model))
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise Refusal(f"the checkpoint does not fit this model and optimizer: {error}") from error


def check_scheduler_can_be_saved(scheduler: LRScheduler | None, out: object) -> None:
    if scheduler is None or out is None:
        return
    try:
        json.dumps(scheduler.state_dict())
    except (TypeError, ValueError) as error:
        raise Refusal(
            f"the scheduler's state cannot be written to a checkpoint ({error}); leave out `out` or the scheduler"
        ) from error


def follow(folder: Path, standing: Standing) -> None:
    """In a process that is not the first: stand where the first process resumes."""
    found = load_checkpoint(folder)
    if found is not None:
        standing.restore(found)


def resumed(
    folder: Path,
    plan: Plan,
    standing: Standing,
    *,
    seeded: bool,
    account: str | Path | None = None,
    from_start: bool = True,
    described: Mapping[str, str] | None = None,
    generator: str | None = None,
) -> Ledger:
    """Put everything back as the last checkpoint has it, and open the ledger for another attempt.

    A run that never came to its first checkpoint starts over, with what it charged counted as lost; unless it asked
    queries before its first step, which the plan pays for once.
    """
    record = refuse_another_run(folder, plan)
    found = load_checkpoint(folder)
    if found is None and not from_start:
        raise Refusal(f"{folder} was killed before it could keep what its queries released; begin a new run")
    taken, length, head = ({}, 0, "") if found is None else place_in_ledger(found, plan, folder)
    if found is not None:
        standing.restore(found)
    paid: dict[str, float | str] | None = None
    # pays late, and for what was charged until now too
    if account is not None and not has_paid(account, record.payment):
        payment, besides = secrets.token_hex(8), plan.segments(record.charged, queries=record.queries)
        order = charge_account(account, plan, str(folder), payment, besides).order
        paid = {"account_order": order, "payment": payment}
    return Ledger.resume(
        folder / "ledger.jsonl", taken, length, head, seeded=seeded, paid=paid, described=described, generator=generator
    )


def refuse_another_run(folder: Path, plan: Plan) -> LedgerRecord:
    """The ledger of an unfinished run by this plan; a folder that holds another is refused."""
    if not (folder / "ledger.jsonl").exists():
        raise Refusal(f"{folder} holds no run to resume")
    describe_anew(folder)
    record = read_ledger(folder / "ledger.jsonl")
    refuse_finished(folder, record.end)
    if record.plan != plan:
        raise Refusal(f"{folder} holds a run of another plan; a run is resumed with the plan it was begun with")
    if record.problems:
        raise Refusal(f"{folder} holds charges that are not its plan's: {record.problems[0]}")
    if lost := missing_lines(folder, record):
        raise Refusal(f"the ledger of {folder} cannot be gone on with: {lost}")
    return record


def ledger_place(ledger: Ledger) -> dict[str, Any]:
    """Where the ledger is, for a checkpoint; `place_in_ledger` reads it back."""
    return {
        "plan": ledger.plan.to_dict(),
        "taken": dict(ledger.steps),
        "length": ledger.length,
        "head": ledger.head,
    }


def place_in_ledger(found: Checkpoint, plan: Plan, folder: Path) -> tuple[dict[int, int], int, str]:
    """Where the ledger was when the checkpoint was made: steps taken in each phase, lines, and the last line's hash."""
    try:
        other = Plan.from_dict(found.values["plan"]) != plan
        taken = {int(phase): int(count) for phase, count in found.values["taken"].items()}
        length, head = int(found.values["length"]), str(found.values["head"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise Refusal(f"the checkpoint in {folder} cannot be read: {error}") from error
    if other:
        raise Refusal(f"the checkpoint in {folder} is of another plan")
    return taken, length, head
