"""Where a training with the engine stands, in a folder of safetensors and JSON. No secret, nothing pickled."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tptopk.integrations.opacus.steps import PrivateSteps
from tptopk.privacy.description import read_time
from tptopk.privacy.ledger_record import weaker
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal
from tptopk.training.checkpoint import load_checkpoint, save_checkpoint
from tptopk.training.loading import load_weights
from tptopk.training.updates import optimizer_state, restore_optimizer


def save(path: object, steps: PrivateSteps, *, optimizer: bool, yours: Mapping[str, Any]) -> None:
    folder = _folder(path)
    steps.settle()
    tensors, groups = optimizer_state(steps.optimizer) if optimizer else ({}, None)
    parts: dict[str, Mapping[str, Tensor]] = {
        "model": steps.module.state_dict(),
        "optimizer": tensors,
        "policy": steps.policy.state(),
    }
    values = {
        "plan": steps.plan.to_dict(),
        "counts": steps.counts(),
        "begun": steps.ledger.begun,
        "generator": steps.ledger.generator or steps._streams.name,
        "optimizer": groups,
        "yours": dict(yours),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_checkpoint(folder, parts, values)
    except OSError as error:
        raise Refusal(f"cannot write to {folder}: {error.strerror}") from error


def load(path: object, steps: PrivateSteps, *, optimizer: bool) -> dict[str, Any]:
    """Charges first, then the weights that they paid for: what fails half-way is over-counted."""
    folder = _folder(path)
    found = load_checkpoint(folder)
    if found is None:
        raise Refusal(f"{folder} holds no checkpoint")
    training = steps.module.training
    try:
        plan, counts, groups = Plan.from_dict(found.values["plan"]), found.values["counts"], found.values["optimizer"]
        run, yours = str(counts["run"]), dict(found.values["yours"])
        taken, charges = _by_phase(counts["taken"]), {str(who): _by_phase(n) for who, n in _charges(counts).items()}
        begun = [read_time({"line": n, "time": time}) for n, time in enumerate(found.values.get("begun", [None]))]
        if plan != steps.plan:
            difference = _difference(plan, steps.plan)
            raise Refusal(
                f"the checkpoint in {folder} is of another plan: {difference}; call make_private as that training did"
            )
        if optimizer and groups is None:
            raise Refusal(f"the checkpoint in {folder} was saved without an optimizer; load it without one")
        if groups is not None and not optimizer:
            warnings.warn("the checkpoint holds an optimizer's state, and no optimizer was given", stacklevel=4)
        steps.settle()
        generator = weaker(found.values.get("generator"), steps.ledger.generator or steps._streams.name)
        begun = max(begun, steps.ledger.begun, key=len)  # this process may have gone back to a checkpoint before
        steps.stand_at(run, taken, charges)
        steps.ledger.follows(begun, generator)
        load_weights(steps.module, found.part("model"))
        if optimizer:
            restore_optimizer(steps.optimizer, found.part("optimizer"), groups)
        steps.policy.restore(found.part("policy"))
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"the checkpoint in {folder} does not fit this training: {error}") from error
    finally:
        steps.module.train(training)
    return yours


def _charges(counts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Who charged what. Checkpoints of before this was kept say the sum alone: it is added to all that is known."""
    return counts["charges"] if "charges" in counts else {secrets.token_hex(16): counts["charged"]}


def _by_phase(counts: Mapping[str, int]) -> dict[int, int]:
    return {int(phase): int(count) for phase, count in counts.items()}


def _folder(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise Refusal(f"path is a {type(path).__name__}; a checkpoint is a folder, so give its path")
    folder = Path(path)
    if folder.is_file():
        raise Refusal(f"{folder} is a file; a checkpoint is a folder, so give another path")
    return folder


def _difference(there: Plan, here: Plan) -> str:
    """The first number in which two plans differ."""
    for mine, other in zip(here.phases, there.phases, strict=False):
        for field in ("noise_multiplier", "sample_rate", "clip_norm", "steps"):
            if getattr(mine, field) != getattr(other, field):
                return f"its {field} is {getattr(other, field):g}, here {getattr(mine, field):g}"
    for field in ("method", "active_ratio", "dataset_size", "delta", "accountant"):
        if getattr(here, field) != getattr(there, field):
            return f"its {field} is {getattr(there, field)}, here {getattr(here, field)}"
    return "it has other phases"
