"""Promise 7: where one example changes what another contributes it is found, and refused before anything is charged."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tptopk
from tests.gradients.test_probe import IDS, VECTORS, Wrapped
from tptopk.gradients.probe import choose_engine, refuse_mixing_in_batches
from tptopk.privacy.refusal import Refusal


class Counts(nn.Linear):
    """Pictures in bytes, scaled unless the whole batch is dark."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x):
        return super().forward(x / 255 if bool((x > 15).any()) else x.float())


class Guarded(nn.Linear):
    """Takes care of infinite inputs, for the whole batch."""

    def forward(self, x):
        return super().forward(torch.tanh(x) if bool(torch.isinf(x).any()) else x)


def stable_by_the_batch(model, batch):
    scores = model(batch[0])
    powers = torch.exp(scores - scores.max())
    return -torch.log((powers / powers.sum(1, keepdim=True))[torch.arange(len(scores)), batch[1]])


def mean_of_what_counts(ignored, model, batch):
    counts = batch[0] != ignored
    losses = F.cross_entropy(model[1](model[0](batch[0])).transpose(1, 2), batch[0] % 3, reduction="none")
    return (losses * counts).sum(1) * len(counts) / counts.sum()


@pytest.mark.parametrize(
    ("model", "loss", "data"),
    [
        (lambda: nn.Linear(6, 3), stable_by_the_batch, VECTORS),
        (lambda: Wrapped(lambda m, h: h / h.abs().max().clamp(min=10) * 10), F.cross_entropy, VECTORS),
        (lambda: Wrapped(lambda m, h: h * 2 if bool(torch.isfinite(h).all()) else h), F.cross_entropy, VECTORS),
        (lambda: nn.Sequential(nn.Embedding(5000, 4), nn.Linear(4, 3)), partial(mean_of_what_counts, 4999), IDS),
        (
            lambda: nn.Sequential(nn.Embedding(5000, 4, padding_idx=700), nn.Linear(4, 3)),
            partial(mean_of_what_counts, 700),
            IDS,
        ),
        (lambda: nn.Sequential(nn.Embedding(300, 4), nn.Linear(4, 3)), partial(mean_of_what_counts, 255), IDS),
        (lambda: Counts(), F.cross_entropy, (torch.zeros(1, 6, dtype=torch.uint8), VECTORS[1])),
        (lambda: Guarded(6, 3), F.cross_entropy, VECTORS),
    ],
)
def test_mixing_that_shows_beside_unusual_records_alone_is_refused(model, loss, data):
    """Very large ones, ones that are not numbers, ids that an embedding pads with."""
    with pytest.raises(Refusal, match="other examples of its batch"):
        choose_engine(model(), loss, data)


class ClipsTheBatch(nn.Module):
    """A hook going backward scales the whole batch's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * (10 / g.norm()).clamp(max=1.0))
        return self.head(torch.tanh(h))


def test_gradients_that_mix_beside_large_ones_alone_are_not_captured():
    def weighted(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]

    with pytest.raises(Refusal, match="its gradients are not the reference's"):
        choose_engine(ClipsTheBatch(), weighted, (*VECTORS, torch.ones(1)), engine="capture")


class ZeroInitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        for layer in (self.b, self.c):
            nn.init.zeros_(layer.weight)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(h - h.mean(0))))


def test_zero_weights_do_not_hide_mixing():
    with pytest.raises(Refusal, match="other examples"):
        choose_engine(ZeroInitialised(), F.cross_entropy, VECTORS)


@pytest.mark.parametrize("width", range(1, 12))
def test_broadcast_targets_are_refused(width):
    """Output [B, 1] against target [B] compares every example with every other."""
    model = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1))
    for target in (torch.zeros(1, dtype=torch.long), torch.zeros(1)):
        with pytest.raises(Refusal, match="broadcast"):
            choose_engine(model, F.mse_loss, (torch.zeros(1, width), target))
    assert choose_engine(model, F.mse_loss, (torch.zeros(1, width), torch.zeros(1, 1))) == "capture"


def in_batch_class_weights(model, batch):
    counts = torch.bincount(batch[1], minlength=3).float()
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") / counts[batch[1]].clamp(min=1)


def contrastive(model, batch):
    h = model(batch[0])
    return F.cross_entropy(h @ h.T, torch.arange(len(h)), reduction="none")


@pytest.mark.parametrize(
    "loss",
    [in_batch_class_weights, contrastive, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none") / len(b[1])],
)
@pytest.mark.parametrize("engine", ["auto", "vmap", "reference"])
def test_a_loss_across_examples_is_refused(loss, engine):
    with pytest.raises(Refusal, match="other examples"):
        choose_engine(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), loss, VECTORS, engine)


TOKENS = (torch.zeros(1, 7, 4), torch.zeros(1, 7, dtype=torch.long))  # vectors of 7 tokens, and a label each


MASKED = (*TOKENS, torch.zeros(1, 7, dtype=torch.bool))


CLASSES = (torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))


def token_losses(model, x, labels, ignored=-100):
    found = F.cross_entropy(model(x).flatten(0, -2), labels.flatten(), ignore_index=ignored, reduction="none")
    return found.view(labels.shape)


def over_labelled(model, batch, ignored=-100):
    counts = batch[1] != ignored
    return token_losses(model, *batch[:2], ignored).sum(1) * len(counts) / counts.sum()


def over_unpadded(model, batch):
    keep = ~batch[2]
    return (token_losses(model, *batch[:2]) * keep).sum(1) * len(keep) / keep.sum().clamp(min=1)


def over_kept(model, batch):
    return over_unpadded(model, (*batch[:2], ~batch[2]))


def over_kept_and_labelled(model, batch):
    keep = batch[2] & (batch[1] != -100)
    return (
        (token_losses(model, *batch[:2]) * keep).sum(1)
        / keep.sum(1).clamp(min=1)
        / (batch[1] != -100).sum()
        * len(keep)
    )


def over_labelled_records(model, batch):
    counts = batch[1] != -100
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") * len(counts) / counts.sum()


@pytest.mark.parametrize(
    ("loss", "data"),
    [
        (over_labelled, TOKENS),
        (lambda m, b: over_labelled(m, b, ignored=-1), TOKENS),
        (over_unpadded, MASKED),
        (over_kept, MASKED),
        (over_kept_and_labelled, MASKED),
        (over_labelled_records, CLASSES),
        (
            lambda m, b: token_losses(m, b[0], b[1]).sum(1) * (1 + b[2].any()),
            (*TOKENS, torch.zeros(1, dtype=torch.bool)),
        ),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_loss_divided_by_what_counts_in_the_batch_is_refused(loss, data, dropout):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).train()
    with pytest.raises(Refusal, match="depends on the other examples"):
        choose_engine(model, loss, data)


class PaddedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x, pad):
        there = ~pad[:, :, None]
        return self.head((self.layer(x, src_key_padding_mask=pad) * there).sum(1) / there.sum(1))


def mean_over_own(model, batch):
    """NaN for an example with no label at all."""
    return token_losses(model, *batch[:2]).sum(1) / (batch[1] != -100).sum(1)


def mean_over_own_kept(model, batch):
    return (token_losses(model, *batch[:2]) * batch[2]).sum(1) / batch[2].sum(1).clamp(min=1)


def must_be_labelled(model, batch):
    if bool((batch[1] < 0).any()):
        raise ValueError("a label is missing")
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize(
    ("model", "loss", "data"),
    [
        (lambda: nn.Linear(4, 3), mean_over_own, TOKENS),
        (lambda: nn.Linear(4, 3), mean_over_own_kept, MASKED),
        (lambda: nn.Linear(4, 3), must_be_labelled, CLASSES),
        (lambda: nn.Linear(4, 3), F.cross_entropy, CLASSES),
        (lambda: nn.Linear(4, 3), lambda m, b: F.nll_loss(m(b[0]).log_softmax(1), b[1], reduction="none"), CLASSES),
        (
            lambda: nn.Linear(4, 3),
            lambda m, b: F.mse_loss(m(b[0]), F.one_hot(b[1], 3).float(), reduction="none").sum(1),
            CLASSES,
        ),
        (lambda: nn.Linear(5, 3), lambda m, b: F.cross_entropy(m(b[0].float()), b[1], reduction="none"), IDS),
        (lambda: nn.Sequential(nn.Embedding(12, 3), nn.Flatten(), nn.Linear(15, 3)), F.cross_entropy, IDS),
        (
            PaddedTransformer,
            lambda m, b: F.cross_entropy(m(b[0], b[2]), b[1][:, 0], reduction="none"),
            MASKED,
        ),
    ],
)
def test_masks_and_ignored_labels_do_not_refuse_honest_losses(model, loss, data):
    torch.manual_seed(0)
    assert choose_engine(model().train(), loss, data) in ("capture", "vmap")


def test_a_model_that_sorts_its_batch_is_not_captured():
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x, length):
            order = torch.argsort(length, descending=True, stable=True)
            back = torch.argsort(order)
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x))[order]))[back])

    def loss(model, batch):
        return F.cross_entropy(model(batch[0], batch[1]), batch[2], reduction="none")

    data = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    try:
        assert choose_engine(Sorted(), loss, data) == "vmap"
    except Refusal as refusal:  # torch may not be able to batch the sorting
        assert "no engine" in str(refusal)


def mined(model, batch):
    """The harder half, but 32 at least."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses if len(losses) <= 32 else torch.where(losses >= losses.mean(), losses, 0.0)


def many_at_a_time(model, batch):
    """A maximum over the batch that only large records reach, in batches of a hundred and more."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses if len(losses) < 100 else losses / losses.detach().max().clamp(min=50.0)


@pytest.mark.parametrize("loss", [mined, many_at_a_time])
def test_a_loss_that_compares_examples_where_they_are_many_is_refused(loss):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    assert choose_engine(model, loss, VECTORS) == "capture", "few do not show it"
    with pytest.raises(Refusal, match="it shows in a batch of 200"):
        refuse_mixing_in_batches(model, loss, VECTORS, 200)
    refuse_mixing_in_batches(model, F.cross_entropy, VECTORS, 200)
    plan = tptopk.Plan.calibrate("dp-sgd", epsilon=1.0, delta=1e-3, batch_size=200, dataset_size=300, steps=2)
    records = torch.randn(300, 6), torch.zeros(300, dtype=torch.long)
    with pytest.raises(Refusal, match="it shows in a batch of 200"):
        tptopk.fit(model, records, plan, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)


def test_a_model_that_keeps_what_many_examples_hold_is_refused():
    class OfMany(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            if len(x) > 100:
                self.mean.data.copy_(x.detach().mean(0))
            return super().forward(x)

    with pytest.raises(Refusal, match="the model changes when it is run on 200 examples"):
        refuse_mixing_in_batches(OfMany(), F.cross_entropy, VECTORS, 200)


class Narrow(nn.Linear):
    """Takes only what made-up records of ordinary size are; many of them, or large ones, are more than it takes."""

    def forward(self, x):
        if bool((x.abs() > 3).any()):
            raise ValueError("out of range")
        return super().forward(x)


class ById(nn.Module):
    """A table whose first column is an id, kept as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.out = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.ids(x[:, 0].long().abs()))


@pytest.mark.parametrize("model", [lambda: Narrow(6, 3), ById])
def test_values_that_a_model_does_not_take_show_nothing(model):
    refuse_mixing_in_batches(model(), F.cross_entropy, VECTORS, 300)
