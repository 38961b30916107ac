"""Promise 7: what a model or a loss keeps of the data it was run on is found, and refused before anything is charged."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import ClassVar

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


@pytest.mark.parametrize(
    "where, words",
    [(where, "mean is set by the first batch") for where in ("buffer", "late buffer", "parameter")]
    + [(where, "changes when the model is run") for where in ("attribute", "list")],
)
def test_a_model_that_remembers_its_data_is_refused(where, words):
    with pytest.raises(Refusal, match=words):
        choose_engine(RunningMean(where), F.cross_entropy, VECTORS)


class SetByFirst(nn.Module):
    """A table in a buffer, made when it is first needed: from the first batch, or from nothing but its shape."""

    def __init__(self, of_data: bool, written: str = "copy_", copyable: bool = True) -> None:
        super().__init__()
        self.layer, self.of_data, self.written = nn.Linear(6, 3), of_data, written
        self.register_buffer("table", torch.zeros(6))
        self.register_buffer("made", torch.zeros(()))
        if not copyable:
            self.open = (n for n in range(3))  # a generator cannot be copied

    def forward(self, x):
        if self.training and not self.made:
            table = x.detach().mean(0) if self.of_data else torch.arange(6.0)
            with torch.no_grad():
                self.made.fill_(1)
                if self.written == "data":
                    self.table.data = table
                else:
                    self.table.copy_(table)
        return self.layer(x - self.table)


@pytest.mark.parametrize("written", ["copy_", "data"])
@pytest.mark.parametrize("copyable", [True, False])
def test_what_the_first_batch_sets_for_good_is_refused(written, copyable):
    with pytest.raises(Refusal, match="is set by the first batch"):
        choose_engine(SetByFirst(True, written, copyable), F.cross_entropy, VECTORS)


class Lazy(nn.Linear):
    """A table that is made when it is first needed, in a buffer that is not there before: of chance or of nothing."""

    def __init__(self, drawn: bool) -> None:
        super().__init__(6, 3)
        self.drawn = drawn
        self.register_buffer("table", None)

    def forward(self, x):
        if self.table is None:
            self.table = torch.randn(6) if self.drawn else torch.arange(6.0)
        return super().forward(x + self.table)


@pytest.mark.parametrize(
    "model, engine",
    [(lambda: SetByFirst(False), "capture"), (lambda: Lazy(False), "vmap"), (lambda: Lazy(True), "vmap")],
)
def test_a_table_that_is_made_when_it_is_first_needed_is_no_trace(model, engine):
    assert choose_engine(model(), F.cross_entropy, VECTORS) == engine


class KeepsGradients(nn.Module):
    def __init__(self, written: str) -> None:
        super().__init__()
        self.layer, self.written = nn.Linear(6, 3), written
        self.register_buffer("peak", torch.zeros(6))

    def forward(self, x):
        x = x * self.layer.weight.mean()
        if x.requires_grad:
            x.register_hook(self.keep)
        return self.layer(x)

    def keep(self, gradient):
        if self.written == "data":
            self.peak.data = torch.maximum(self.peak, gradient.detach().abs().amax(0))
        else:
            self.peak.copy_(torch.maximum(self.peak, gradient.detach().abs().amax(0)))


@pytest.mark.parametrize("written", ["copy_", "data"])
def test_what_is_kept_going_backward_is_seen(written):
    with pytest.raises(Refusal, match="buffer peak changes when the model is run"):
        choose_engine(KeepsGradients(written), F.cross_entropy, VECTORS)


SEEN: deque = deque(maxlen=10_000)


class OfAClass(nn.Linear):
    queue: ClassVar[deque] = deque(maxlen=10_000)

    def forward(self, x):
        self.queue.extend(x.detach())
        return super().forward(x)


class OfAFile(nn.Linear):
    def forward(self, x):
        SEEN.extend(x.detach())
        return super().forward(x)


PLACE = SimpleNamespace(last=0.0)
LARGEST = 0.0


def keep(x):
    SEEN.extend(x.detach())


def of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def kept_in_the_file(model, batch):
    SEEN.extend(batch[0].detach())
    return of(model, batch)


def kept_by_another_function(model, batch):
    keep(batch[0])
    return of(model, batch)


def kept_within(model, batch):
    def keep_it():
        SEEN.append(batch[0].detach())

    keep_it()
    return of(model, batch)


def kept_in_a_number(model, batch):
    global LARGEST
    LARGEST = max(LARGEST, float(batch[0].abs().max()))
    return of(model, batch)


def kept_in_a_place(model, batch):
    PLACE.last = float(batch[0].sum())
    return of(model, batch)


def kept_on_a_class(model, batch):
    OfAClass.last = float(batch[0].sum())
    return of(model, batch)


class BySomethingElse(nn.Linear):
    @property
    def seen(self):
        return SEEN

    def forward(self, x):
        self.seen.extend(x.detach())
        return super().forward(x)


@pytest.mark.parametrize(
    "model, loss, where",
    [
        (OfAClass, F.cross_entropy, "class OfAClass.queue"),
        (OfAFile, F.cross_entropy, "SEEN, which class OfAFile.forward reads"),
        (BySomethingElse, F.cross_entropy, "SEEN, which class BySomethingElse.seen reads"),
        (nn.Linear, kept_in_the_file, "SEEN, which the loss reads"),
        (nn.Linear, kept_by_another_function, "SEEN, which keep, which the loss reads reads"),
        (nn.Linear, kept_within, "SEEN, which the loss reads"),
        (nn.Linear, kept_in_a_number, "LARGEST, which the loss reads"),
        (nn.Linear, kept_in_a_place, "PLACE, which the loss reads.last"),
        (nn.Linear, kept_on_a_class, "class OfAClass.last"),
    ],
)
def test_what_is_kept_on_a_class_or_in_a_file_is_seen(model, loss, where):
    SEEN.clear()
    OfAClass.queue.clear()
    with pytest.raises(Refusal, match=f"{where} changes when the model is run"):
        choose_engine(model(6, 3), loss, VECTORS)


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
