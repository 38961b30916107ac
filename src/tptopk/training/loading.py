"""Reads a run folder back: what a run cost, from its ledger, and its weights."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal
from tptopk.privacy.statement import Facts
from tptopk.supports.support import Support
from tptopk.training.begun import how_to_resume, run_folder
from tptopk.training.facts import facts_in
from tptopk.training.metrics import StepRecord
from tptopk.training.run import FORMAT, Run
from tptopk.training.trained import TRAINED


def load(path: str | Path, model: nn.Module | None = None) -> Run:
    """Read a run folder back, its weights into `model`.

    Without a model, one of the library's own networks is built if the run names it. A network of somebody else's is
    never built because a file says so: give it. What the run cost is read from its ledger, whatever else its files say.
    """
    folder = run_folder(path)
    try:
        summary = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if summary["format"] != FORMAT:
            raise Refusal(
                f"{folder} was written by another version of tptopk (format {summary['format']}, here {FORMAT})"
            )
        if summary["status"] == "running":
            raise Refusal(
                f"{folder} holds a run that is still going on, or was killed before it could save a model; if it was killed, go on "
                f"with: {how_to_resume(folder)}"
            )
        plan = Plan.from_dict(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
        weights = load_file(str(folder / "model.safetensors"))
        support = Support.load(folder / "support.safetensors")
        history = [
            StepRecord(**json.loads(line))
            for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        facts = Facts(**summary["facts"])
        if plan.spec.private:
            record = read_ledger(folder / "ledger.jsonl")
            if record.plan != plan:
                raise Refusal(
                    f"plan.json of {folder} is not the plan in the ledger; `tptopk verify {folder}` says more"
                )
            if record.end is None:
                raise Refusal(
                    f"the ledger of {folder} has no closing line, and run.json says that the run is {summary['status']}: lines are missing; "
                    f"`tptopk verify {folder}` says more"
                )
            facts = facts_in(folder, record)
        run = Run(
            nn.Identity() if model is None else model,
            plan,
            math.inf if facts.epsilon is None else facts.epsilon,
            support,
            history,
            summary["test"],
            facts,
            summary["status"],
            summary["seconds"],
            summary["engine"],
            folder,
            summary["config"],
        )
    except FileNotFoundError as error:
        missing = Path(
            error.filename or str(error).rsplit(" ", 1)[-1]
        ).name  # safetensors gives the path in its message alone
        raise Refusal(f"{folder} is not a run folder: {missing} is missing") from error
    except (
        KeyError,
        TypeError,
        json.JSONDecodeError,
        UnicodeDecodeError,
        SafetensorError,
        NotADirectoryError,
    ) as error:
        raise Refusal(f"{folder} is not a readable run folder: {error}") from error
    if model is None:
        run.model = _own_network(run.config.get("model"))
    load_weights(run.model, weights)
    TRAINED.add(run.model)
    return run


def _own_network(reference: object) -> nn.Module:
    """The network that a run of the command line names as tptopk.models.…:function, or …:function(14, 2)."""
    found = re.fullmatch(r"(tptopk\.models\.\w+):(\w+)(?:\((\d+(?:, *\d+)*)\))?", str(reference))
    if found is None:
        raise Refusal(
            f"the run's model is {reference!r}, which is not one of the library's own; give the network, so that no code is run "
            "because a file says so: tptopk.load(folder, model), or --model package.module:factory"
        )
    module, function, numbers = found.groups()
    arguments = [int(number) for number in numbers.split(",")] if numbers else []
    try:
        network = getattr(importlib.import_module(module), function)(*arguments)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise Refusal(f"the run's model {reference!r} cannot be built: {error}") from error
    assert isinstance(network, nn.Module)
    return network


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    own = model.state_dict(keep_vars=True)
    restored = {id(own[name]) for name in weights if name in own}
    missing = [name for name, value in own.items() if id(value) not in restored]
    if missing or set(weights) - set(own):
        raise Refusal(
            f"the weights are of another model: {(missing or sorted(set(weights) - set(own)))[0]} does not match"
        )
    for name, value in weights.items():
        if own[name].shape != value.shape:
            raise Refusal(
                f"the weights are of another model: {name} has shape {tuple(value.shape)}, "
                f"the model's has {tuple(own[name].shape)}"
            )
    model.load_state_dict(dict(weights), strict=False)
    model.eval()
