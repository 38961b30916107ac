"""A run: what training leaves behind, in memory and in a folder.

A run folder holds `run.json` (status, configuration, results), `plan.json`, `ledger.jsonl`, `metrics.jsonl`,
`support.safetensors`, `model.safetensors`, `statement.md`, of a warm-up `warmup.safetensors` and of a table `schema.json`; until it is finished also checkpoints. None of them holds a noise or sampling secret.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal
from tptopk.privacy.statement import Facts, statement
from tptopk.supports.support import Support
from tptopk.supports.warmup import FILE as WARMUP
from tptopk.supports.warmup import WarmUp
from tptopk.training.begun import begun_with, summary_in, what_instead
from tptopk.training.checkpoint import remove_checkpoints, sha256_of, write_durably
from tptopk.training.facts import facts_in
from tptopk.training.metrics import JsonLines
from tptopk.training.metrics import StepRecord as StepRecord

FORMAT = 1
SCHEMA = "schema.json"  # how a table's columns became inputs; public, and declared by whoever trained


FILES = (
    "ledger.jsonl",
    "run.json",
    "plan.json",
    "metrics.jsonl",
    "model.safetensors",
    "support.safetensors",
    "statement.md",
    SCHEMA,
)


@dataclass(repr=False)
class Run:
    """A trained model with the account of what its training cost."""

    model: nn.Module
    plan: Plan
    epsilon: float  # spent, by the plan's accountant
    support: Support
    history: list[StepRecord]
    test: dict[str, float]
    facts: Facts
    status: str
    seconds: float
    engine: str
    folder: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        cost = f"ε={self.epsilon:.4g}, δ={self.delta:g}" if self.plan.spec.private else "NOT private"
        return f"Run({self.plan.method}, {self.status}, {cost}, k/d={self.support.ratio:.3g}, test={self.test}, folder={self.folder})"

    @property
    def delta(self) -> float:
        return self.plan.delta

    def statement(self) -> str:
        """What may be claimed for this run and what may not, in Markdown."""
        return statement(self.plan, self.facts)

    def summary(self) -> dict[str, Any]:
        """The run in plain values, as `run.json` holds it."""
        return {
            "format": FORMAT,
            "status": self.status,
            "method": self.plan.method,
            "epsilon": self.epsilon if self.plan.spec.private else None,
            "delta": self.plan.delta,
            "active": self.support.size,
            "coordinates": self.support.total,
            "test": self.test,
            "seconds": round(self.seconds, 3),
            "engine": self.engine,
            "facts": asdict(self.facts),
            "config": self.config,
            "versions": self.facts.versions,
        }


def refuse_taken(path: str | Path) -> None:
    """Refuse a folder that already holds a run, or a path that cannot be a folder."""
    if Path(path).exists() and not Path(path).is_dir():
        raise Refusal(f"cannot write to {path}: it is not a folder")
    found = [name for name in FILES if os.path.lexists(Path(path) / name)]
    if found:
        raise Refusal(f"{path} already holds a run ({found[0]}); {what_instead(path)}")


class RunFolder:
    """Writes a run folder; refuses one that already holds a run, unless that is to be resumed."""

    def __init__(
        self,
        path: str | Path,
        model: nn.Module,
        plan: Plan,
        config: Mapping[str, Any],
        *,
        resume: bool = False,
        pay: Callable[[str], object] | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        """`pay` is asked once the folder is known to be free, and may refuse; then nothing is written."""
        self.path = Path(path)
        for name, value in model.state_dict().items():
            if not isinstance(value, torch.Tensor):
                raise Refusal(f"the model's state holds {name}, a {type(value).__name__}; only tensors can be saved")
        self.ledger = self.path / "ledger.jsonl"
        if not resume:
            refuse_taken(path)
        if resume and not self.ledger.exists():
            raise Refusal(f"{path} holds no run to resume")
        try:
            new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._paid(pay, new)
            if schema is not None:
                self._write(SCHEMA, schema)
            write_durably(self.path / "plan.json", plan.to_json().encode() + b"\n")
            self._write(
                "run.json", {"format": FORMAT, "status": "running", "method": plan.method, "config": dict(config)}
            )
            self._metrics = JsonLines(self.path / "metrics.jsonl")
        except OSError as error:
            raise Refusal(f"cannot write to {self.path}: {error.strerror}") from error

    def _paid(self, pay: Callable[[str], object] | None, new: bool) -> None:
        try:
            if pay is not None:
                pay(str(self.path))
        except Refusal:
            if new:
                with suppress(OSError):  # somebody else's files may lie there by now
                    self.path.rmdir()
            raise

    def keep_metrics(self, steps: int) -> list[StepRecord]:
        """Of an earlier attempt keep the records of the first `steps` steps; later ones were lost."""
        self._metrics.close()
        kept = []
        for line in (self.path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()[:steps]:
            try:
                kept.append(StepRecord(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise Refusal(f"{self.path / 'metrics.jsonl'} cannot be read: {error}") from error
        text = "".join(json.dumps(asdict(record)) + "\n" for record in kept)
        write_durably(self.path / "metrics.jsonl", text.encode())
        self._metrics = JsonLines(self.path / "metrics.jsonl")
        return kept

    def record(self, step: StepRecord) -> None:
        self._metrics.step(step)

    def take_in(self, warmup: WarmUp, gradient: PrivateGradient) -> None:
        """Add a step to the warm-up, and write it down once it is over: what advice needs, sums of released gradients."""
        if gradient.phase == 0:
            warmup.add(gradient)
            if warmup.complete:
                self.keep_warmup(warmup)

    def keep_warmup(self, warmup: WarmUp) -> None:
        write_durably(self.path / WARMUP, warmup.content())

    def close(self, run: Run, ledger: Ledger) -> None:
        """Write down the end, whatever it was: weights, support, the ledger's last line, and `run.json` last."""
        self._metrics.close()
        save_weights(run.model, self.path / "model.safetensors", {"tptopk.ledger": f"{ledger.length} {ledger.head}"})
        run.support.save(self.path / "support.safetensors")
        # safetensors writes files that only their owner can read; all files of a run have one mode
        names = ("model.safetensors", "support.safetensors")
        for name in names:
            shutil.copymode(self.path / "plan.json", self.path / name)
        kept = [*names, *(name for name in (WARMUP, SCHEMA) if (self.path / name).exists())]
        files = {name: sha256_of(self.path / name) for name in kept}
        ledger.close(run.status, files, averaged=run.facts.averaged)
        if ledger.ended is None:
            return  # its file could not be written: the folder stays as a crash leaves it
        run.facts = replace(run.facts, ended=ledger.ended)
        self.describe(run)
        if run.status == "finished":
            remove_checkpoints(self.path)

    def abandon(self, ledger: Ledger) -> None:
        """Leave everything as a crash would: the model may not be saved."""
        self._metrics.close()
        ledger.release()

    def describe(self, run: Run) -> None:
        _describe(run, self.path)

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        _write_json(self.path / name, values)


def _describe(run: Run, folder: Path) -> None:
    write_durably(folder / "statement.md", run.statement().encode() + b"\n")
    _write_json(folder / "run.json", run.summary())


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_durably(path, json.dumps(values, indent=2).encode() + b"\n")


def describe_anew(folder: Path) -> None:
    """Write the statement and run.json of a run that was ended between its closing line and these, from its ledger.

    What only that process knew, seconds and a test's outcome, is not in them.
    """
    record, summary = read_ledger(folder / "ledger.jsonl"), summary_in(folder)
    if record.end is None or record.end["status"] != "finished" or summary.get("status") != "running":
        return
    facts, support = facts_in(folder, record), Support.load(folder / "support.safetensors")
    epsilon = math.inf if facts.epsilon is None else facts.epsilon
    config = begun_with(folder)
    _describe(
        Run(
            nn.Identity(),
            record.plan,
            epsilon,
            support,
            [],
            {},
            facts,
            "finished",
            0.0,
            "not on record",
            folder,
            config,
        ),
        folder,
    )
    remove_checkpoints(folder)


def schema_in(path: str | Path) -> dict[str, Any] | None:
    """The schema of the table that a run was trained on, as its ledger names it; None if there was none."""
    folder = Path(path)
    end = read_ledger(folder / "ledger.jsonl").end or {}
    named = dict(end.get("files") or {}).get(SCHEMA)
    if named is None:
        return None
    if not (folder / SCHEMA).is_file() or sha256_of(folder / SCHEMA) != named:
        raise Refusal(f"{folder / SCHEMA} is not the schema that the run was trained with")
    return _kept_schema(folder)


def refuse_another_schema(path: str | Path, schema: Mapping[str, Any] | None) -> None:
    """Refuse to go on with a run whose table was read in another way: as text, in which the order of columns counts."""
    kept = _kept_schema(Path(path)) if (Path(path) / SCHEMA).exists() else None
    if json.dumps(kept) != json.dumps(None if schema is None else dict(schema)):
        raise Refusal(
            f"the schema is not the one that the run in {path} was begun with, which is in {Path(path) / SCHEMA}: put its values back, or begin "
            "another run"
        )


def _kept_schema(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / SCHEMA).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise Refusal(f"{folder / SCHEMA} cannot be read: {error}") from error


def save_weights(model: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    """Parameters and buffers, each stored once: a tied one under its first name, which is enough to restore both."""
    seen: set[int] = set()
    tensors = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.detach().cpu().contiguous()
    save_file(tensors, str(path), metadata=metadata)
