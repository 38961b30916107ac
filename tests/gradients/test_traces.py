"""Promise 7: what a model or a loss keeps of the data it was run on is found, and refused before anything is charged."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.gradients.test_probe import VECTORS
from tptopk.gradients.probe import choose_engine
from tptopk.gradients.traces import unchanged
from tptopk.privacy.refusal import Refusal


class RunningMean(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        if where == "buffer":
            self.register_buffer("mean", torch.zeros(6))
        elif where == "late buffer":
            self.register_buffer("mean", None)
        elif where == "parameter":
            self.mean = nn.Parameter(torch.zeros(6), requires_grad=False)
        else:
            self.mean = torch.zeros(6) if where == "attribute" else None
        self.seen: list[torch.Tensor] = []
        self.where = where

    def forward(self, x):
        with torch.no_grad():
            if self.where == "list":
                self.seen.append(x.mean(0))
            elif self.where in ("buffer", "parameter"):
                self.mean.lerp_(x.mean(0), 0.1)
            else:
                self.mean = x.mean(0) if self.mean is None else 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x)


class Slotted:
    __slots__ = ("x",)


class Remembers(nn.Module):
    """Keeps something of what it is run on in a plain attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(6, 3), how
        self.largest, self.examples, self.calls, self.seen = 1.0, 0, 0, set()
        self.last, self.array, self.inside = deque(maxlen=1), np.zeros(6), SimpleNamespace(x=None)
        self.generator, self.scalar, self.function, self.slotted = (
            torch.Generator(),
            np.float32(1),
            lambda: None,
            Slotted(),
        )
        self.itself = [self]
        self.itself.append(self.itself)
        self.register_buffer("unknown", torch.full((2,), torch.nan))

    def forward(self, x):
        self.calls += 1
        detached = x.detach()
        if self.how == "a running maximum":
            self.largest = max(self.largest, float(detached.abs().max()))
        elif self.how == "a maximum that only large records move":
            self.largest = max(self.largest, float(detached.abs().max()) / 1e4)
        elif self.how == "a count of examples":
            self.examples += len(x)
        elif self.how == "a set":
            self.seen.add(float(detached[0, 0]))
        elif self.how == "a queue":
            self.last.append(detached)
        elif self.how == "an array":
            self.array += detached.mean(0).numpy()
        elif self.how == "an object":
            self.inside.x = detached
        elif self.how == "a number of NumPy's":
            self.scalar = np.float32(max(self.scalar, float(detached.abs().max())))
        elif self.how == "a function's attribute":
            self.function.last = float(detached.sum())
        elif self.how == "a slot":
            self.slotted.x = float(detached.sum())
        elif self.how == "a generator":
            torch.rand(len(x), generator=self.generator)
        return self.layer(x)


@pytest.mark.parametrize(
    "how",
    ["a running maximum", "a maximum that only large records move", "a count of examples", "a set", "a queue", "an array", "an object", "a number of NumPy's", "a function's attribute", "a slot", "a generator"],
)  # fmt: skip
def test_what_a_model_keeps_in_plain_attributes_is_seen(how):
    with pytest.raises(Refusal, match="changes when the model is run"):
        choose_engine(Remembers(how), F.cross_entropy, VECTORS)


def test_a_model_may_count_its_calls():
    model = Remembers("nothing")
    assert choose_engine(model, F.cross_entropy, VECTORS) == "capture" and model.calls > 0


class RememberingLoss(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.numbers = how, []
        self.register_buffer("largest", torch.ones(()))

    def forward(self, model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        if self.how == "buffer":
            self.largest.copy_(torch.maximum(self.largest, losses.detach().max()))
        else:
            self.numbers.append(float(losses.detach().mean()))
        return losses


@pytest.mark.parametrize("how", ["buffer", "list"])
def test_a_loss_that_remembers_its_data_is_refused(how):
    loss = RememberingLoss(how)
    for one in (loss, lambda model, batch: loss(model, batch)):
        with pytest.raises(Refusal, match="the loss.* changes when the model is run"):
            choose_engine(nn.Linear(6, 3), one, VECTORS)


@pytest.mark.parametrize("where", ["buffer", "late buffer", "parameter", "attribute", "list"])
def test_a_model_that_remembers_its_data_is_refused(where):
    with pytest.raises(Refusal, match="changes when the model is run"):
        choose_engine(RunningMean(where), F.cross_entropy, VECTORS)


BANKS = {
    "lists": lambda: [[] for _ in range(10_000)],
    "dicts": lambda: {place: {} for place in range(10_000)},
    "nothing yet": lambda: [None] * 10_000,
    "numbers": lambda: [0.0] * 10_000,
    "tuples": lambda: [()] * 10_000,
}


class Bank(nn.Module):
    """A memory of records, or of a number about them, at one of many places; a large vocabulary beside it changes nothing."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.layer, self.of, self.bank = nn.Linear(6, 3), of, BANKS[of]()
        self.vocabulary = {f"word {n}": n for n in range(20_000)}
        self.merges = [("a", "b")] * 20_000
        self.remembers = True

    def forward(self, x):
        for record in x.detach() if self.remembers else ():
            place = 5000 + int(record.abs().sum() * 100) % 1000
            if self.of == "lists":
                self.bank[place].append(record.clone())
            elif self.of == "dicts":
                self.bank[place][len(self.bank[place])] = record.clone()
            else:
                self.bank[place] = {"numbers": float(record.sum()), "tuples": (record.clone(),)}.get(
                    self.of, record.clone()
                )
        return self.layer(x)


@pytest.mark.parametrize("of", BANKS)
def test_a_large_memory_of_records_is_found_before_training_and_at_every_batch(of):
    model = Bank(of)
    with pytest.raises(Refusal, match="changes when the model is run"):
        choose_engine(model, F.cross_entropy, VECTORS)
    model.remembers = False
    assert choose_engine(model, F.cross_entropy, VECTORS) == "capture"
    if of == "numbers":
        return  # those are looked at before training alone
    model = Bank(of)
    with pytest.raises(RuntimeError, match="the model was changed"), unchanged(model, "it was run"):
        model(VECTORS[0])
