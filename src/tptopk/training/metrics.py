"""What a private run may show while it goes on, and who is shown it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tptopk.privacy.refusal import Refusal

if TYPE_CHECKING:
    from tptopk.training.run import Run


@dataclass(frozen=True)
class StepRecord:
    """What a step may show: numbers of the plan, and of the private gradient."""

    step: int  # over all phases, from 1
    phase: int
    support_size: int
    learning_rate: float
    gradient_norm: float | None  # of the private gradient; None in a run that is not private


@runtime_checkable
class Metrics(Protocol):
    """Anything with these two methods can be `fit`'s `on_step`; `examples/tensorboard_metrics.py` is one.

    Formal guarantees: a record holds the plan's numbers and the norm of a private gradient, so whatever is made of records is as
    private as the run. There is no training loss in it, and `fit` computes none. `run.test` is about the test set and outside the
    guarantee.
    """

    def step(self, record: StepRecord) -> None:
        """After every step, in the first process alone."""

    def end(self, run: Run) -> None:
        """Once, however the run ended (`run.status`); of a finished one after the test set was measured."""


class JsonLines:
    """Metrics as a file, one JSON object a step: a run folder's `metrics.jsonl`, or a file of your own."""

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise Refusal(f"cannot write to {path}: {error.strerror}") from error

    def step(self, record: StepRecord) -> None:
        self._file.write(json.dumps(asdict(record)) + "\n")

    def end(self, run: Run) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()


class EachStep:
    """A plain function as metrics."""

    def __init__(self, function: Callable[[StepRecord], object]) -> None:
        self._function = function

    def step(self, record: StepRecord) -> None:
        self._function(record)

    def end(self, run: Run) -> None:
        return None


def metrics_of(given: Metrics | Callable[[StepRecord], object] | None) -> Metrics | None:
    if given is None or isinstance(given, Metrics):
        return given
    if not callable(given):
        raise Refusal(
            f"on_step is a {type(given).__name__}; give a function of a step's record, or an object with step(record) and end(run)"
        )
    return EachStep(given)
