"""Promise 7: nothing is skipped silently. Every model is right, or refused before anything is charged."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.gradients.cases import CASES, BarePosition, make
from tptopk.gradients import probe
from tptopk.gradients.clipping import clipped_sum
from tptopk.gradients.contributions import Dense
from tptopk.gradients.examples import take
from tptopk.gradients.probe import choose_engine
from tptopk.models.fix import fix
from tptopk.privacy.refusal import Refusal
from tptopk.supports.support import Support

VECTORS = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.long))
IDS = (torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, dtype=torch.long))


class Wrapped(nn.Module):
    """A linear layer, something in the middle, a linear head."""

    def __init__(self, middle, features=6) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, features), nn.Linear(features, 3)
        self.middle = middle

    def forward(self, x):
        return self.head(self.middle(self, torch.tanh(self.first(x))))


@pytest.mark.parametrize("name", CASES)
def test_every_layer_with_a_rule_is_captured(name):
    model, data = make(name, 0, 1)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert choose_engine(model.train(), F.cross_entropy, data) == "capture"
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()), (
        "the probe must leave the model as it was"
    )


class FunctionalUse(nn.Module):
    """The layer's weight is used a second time, without a call of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(F.linear(torch.tanh(self.layer(x)), self.layer.weight))


class Standardised(nn.Conv1d):
    """Overrides what the convolution's rule relies on, not forward itself."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean((1, 2), keepdim=True), bias)


class TimeFirst(nn.Module):
    """Puts time before the batch: with eight steps a batch of eight looks right and is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x.transpose(0, 1))).mean(0))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.scale * x


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (BarePosition, IDS),
        (FunctionalUse, VECTORS),
        (TimeFirst, (torch.zeros(1, 8, 6), VECTORS[1])),
        (
            lambda: nn.Sequential(Standardised(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)),
            (torch.zeros(1, 2, 6), VECTORS[1]),
        ),
        (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 3)), VECTORS),
        (
            lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.Flatten(), nn.Linear(21, 3)),
            (torch.zeros(1, 2, 6), VECTORS[1]),
        ),
        (lambda: nn.Sequential(nn.Linear(6, 4), Scale(), nn.Linear(4, 3)), VECTORS),
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.PReLU(), nn.Linear(4, 3)), VECTORS),
    ],
)
def test_what_no_rule_can_do_right_goes_to_vmap_and_is_right_there(model, data):
    torch.manual_seed(0)
    model = model()
    assert choose_engine(model, F.cross_entropy, data) == "vmap"
    batch = (
        torch.randint(0, 2, (4, 5)) if data is IDS else torch.randn(4, *data[0].shape[1:]),
        torch.randint(0, 3, (4,)),
    )
    fast, slow = (
        clipped_sum(model, F.cross_entropy, batch, Support.full(model), 0.1, engine=e).values
        for e in ("vmap", "reference")
    )
    for name in slow:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-4, atol=1e-6)
    with pytest.raises(Refusal, match="no engine"):
        choose_engine(model, F.cross_entropy, data, engine="capture")


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_stock_transformer_layer_with_dropout_is_right(batch_first):
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=batch_first)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = layer, nn.Linear(6, 3)

        def forward(self, x):
            y = self.layer(x if batch_first else x.transpose(0, 1))
            return self.head(y.mean(1 if batch_first else 0))

    assert choose_engine(Model().train(), F.cross_entropy, (torch.zeros(1, 5, 6), VECTORS[1])) == "vmap"


def test_dropout_between_captured_layers_is_fine():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    assert choose_engine(model, F.cross_entropy, VECTORS) == "capture"
    assert model.training and model[1].training


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        (
            lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
            VECTORS,
            r"layer '1' \(BatchNorm1d\).*return tptopk.fix\(model\) from your function",
        ),
        (
            lambda: nn.Sequential(
                nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(12, 3)
            ),
            (torch.zeros(1, 2, 6), VECTORS[1]),
            "running statistics",
        ),
        (lambda: nn.Sequential(nn.Embedding(20, 3, max_norm=1.0), nn.Flatten(), nn.Linear(15, 3)), IDS, "max_norm"),
        (lambda: nn.Linear(6, 3).double(), VECTORS, "float32"),
        (lambda: nn.Linear(6, 3).requires_grad_(False), VECTORS, "nothing to train"),
        (lambda: Wrapped(lambda m, h: h - h.mean(0)), VECTORS, "other examples"),
        (lambda: Wrapped(lambda m, h: h - h.mean(0).detach()), VECTORS, "other examples"),
        (lambda: Wrapped(lambda m, h: h - h.mean(0).detach() if m.training else h), VECTORS, "other examples"),
        (lambda: Wrapped(lambda m, h: h - h.mean(0) if len(h) >= 4 else h), VECTORS, "other examples"),
        (lambda: Wrapped(lambda m, h: h * len(h)), VECTORS, "other examples"),
        (
            lambda: Wrapped(lambda m, h: checkpoint(m.head, h, use_reentrant=True).repeat(1, 2)),
            VECTORS,
            "use_reentrant=False",
        ),
        (lambda: nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(2, 2)}), VECTORS, "made-up"),
        (lambda: nn.Linear(7, 3), VECTORS, "made-up"),
    ],
)
def test_what_cannot_be_private_is_refused_with_a_reason(model, data, words):
    with pytest.raises(Refusal, match=words):
        choose_engine(model().train(), F.cross_entropy, data)


def test_a_parameter_that_the_loss_does_not_use_is_named():
    model = Wrapped(lambda m, h: h)
    model.extra = nn.Linear(2, 2)
    with pytest.raises(Refusal, match=r"extra\.weight has no gradient"):
        choose_engine(model, F.cross_entropy, VECTORS)
    model.extra.requires_grad_(False)
    assert choose_engine(model, F.cross_entropy, VECTORS) == "capture"


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]).item(),
        lambda m, b: m(b[0]),
        lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")[:1],
        lambda m, b: (lambda losses: losses[losses.isfinite()])(F.cross_entropy(m(b[0]), b[1], reduction="none")),
    ],
)
def test_a_loss_that_is_not_per_example_is_refused(loss):
    with pytest.raises(Refusal, match="one number an example"):
        choose_engine(nn.Linear(6, 3), loss, VECTORS)


def test_batches_hold_tensors_alone():
    with pytest.raises(Refusal, match="holds a int"):
        choose_engine(nn.Linear(6, 3), lambda m, b: m(b["x"]).sum(1), {"x": torch.zeros(1, 6), "n": 3})


def test_positive_inputs_are_tried_before_giving_up():
    model = nn.Sequential(nn.Linear(6, 3))
    assert (
        choose_engine(model, lambda m, b: F.cross_entropy(m(torch.log(b[0])), b[1], reduction="none"), VECTORS)
        == "capture"
    )


def test_fix_makes_a_batch_norm_model_trainable():
    model = fix(nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.Flatten(), nn.Linear(24, 3)))
    assert isinstance(model[1], nn.GroupNorm) and model[1].num_groups == 2
    assert choose_engine(model, F.cross_entropy, (torch.zeros(1, 2, 6), VECTORS[1])) == "capture"


def test_unknown_engines_come_with_the_nearest():
    with pytest.raises(Refusal, match="did you mean 'capture'"):
        choose_engine(nn.Linear(6, 3), F.cross_entropy, VECTORS, engine="captur")


def test_a_torch_loss_object_works_like_its_function():
    model, data = make("linear", 0, 5)
    support = Support.full(model)
    a = clipped_sum(model, nn.CrossEntropyLoss(), data, support, 0.1).values
    b = clipped_sum(model, F.cross_entropy, data, support, 0.1).values
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert take(data, slice(0, 2))[0].shape[0] == 2


@pytest.mark.parametrize("width", range(1, 41))
def test_two_classes_are_enough(width):
    like = (torch.zeros(1, width), torch.zeros(1, dtype=torch.long))
    assert choose_engine(nn.Linear(width, 2), F.cross_entropy, like) == "capture"


class SortedByLength(nn.Module):
    """Runs its layers on the batch in another order, and puts it back: on records of one length the order is the batch's own."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.inside, self.outside, self.axis = nn.Linear(3, 4), nn.Linear(6, 2), axis

    def forward(self, batch):
        x, more = batch[0], batch[-1]
        counts = x if x.dtype == torch.bool else (x != 0).any(3 - self.axis)
        order = counts.sum(1).argsort(descending=True, stable=True)
        inside = batch[1] if x.dtype == torch.bool else x.transpose(1, 2) if self.axis == 2 else x
        found = torch.tanh(self.inside(inside[order])).mean(1)[order.argsort()]
        return torch.cat([found, more], 1) @ self.outside.weight.T.detach() + self.outside(torch.cat([found, more], 1))


@pytest.mark.parametrize(
    ("axis", "data"),
    [
        (1, (torch.zeros(1, 5, 3), torch.zeros(1, 2))),
        (2, (torch.zeros(1, 3, 5), torch.zeros(1, 2))),
        (1, (torch.zeros(1, 5, dtype=torch.bool), torch.zeros(1, 5, 3), torch.zeros(1, 2))),
    ],
    ids=["padded records", "padded along the last axis", "masks"],
)
def test_a_model_that_sorts_its_batch_by_length_is_not_captured(axis, data):
    """A recorded call has the records in the model's order, and what is outside of it in the batch's: rows would be mistaken for each other."""

    def loss(model, batch):
        return F.cross_entropy(model(batch), torch.zeros(len(batch[0]), dtype=torch.long), reduction="none")

    assert choose_engine(SortedByLength(axis), loss, data) == "vmap"


class SortedWords(nn.Module):
    """The same of texts, which end in an id that stands for nothing; or in numbers that do; or whose lengths are given."""

    def __init__(self, pad: int, declared: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8, padding_idx=pad if declared else None)
        self.inside, self.outside, self.pad = nn.Linear(8, 8), nn.Linear(8, 2), pad

    def forward(self, ids):
        order = (ids != self.pad).sum(1).argsort(descending=True, stable=True)
        return self.outside(torch.tanh(self.inside(self.table(ids)[order])).mean(1)[order.argsort()])


@pytest.mark.parametrize(
    ("pad", "declared"),
    [(0, True), (0, False), (1, False), (2, False), (3, False), (50, True), (99, True), (99, False)],
)
def test_texts_that_are_sorted_by_length_are_not_captured_whatever_pads_them(pad, declared):
    """Two classes: made-up words are as many as the words take all the same."""
    data = torch.zeros(1, 12, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    assert choose_engine(SortedWords(pad, declared), F.cross_entropy, data) == "vmap"


@pytest.mark.parametrize("pad", [-1.0, float("nan")])
def test_numbers_that_stand_for_nothing_are_tried_too(pad):
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x):
            real = ~x.isnan() if pad != pad else x != pad
            order = real.all(2).sum(1).argsort(descending=True, stable=True)
            return self.outside(torch.tanh(self.inside(torch.where(real, x, 0.0)[order])).mean(1)[order.argsort()])

    data = torch.zeros(1, 9, 4), torch.zeros(1, dtype=torch.long)
    assert choose_engine(Sorted(), F.cross_entropy, data) == "vmap"


def test_lengths_that_stand_beside_the_records_are_tried_up_to_the_longest():
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x, lengths):
            lengths = lengths.clamp(min=1)
            order = lengths.argsort(descending=True, stable=True)
            real = (torch.arange(x.shape[1]) < lengths[order][:, None])[..., None]
            return self.outside(((torch.tanh(self.inside(x[order])) * real).sum(1) / real.sum(1))[order.argsort()])

    def loss(model, batch):
        return F.cross_entropy(model(batch[0], batch[1]), batch[2].clamp(0, 1), reduction="none")

    data = torch.zeros(1, 9, 4), torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    assert choose_engine(Sorted(), loss, data) == "vmap"


def test_a_batch_that_is_cut_to_its_longest_record_is_refused():
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x[:, : int((x != 0).any(2).sum(1).max())].mean(1))

    with pytest.raises(Refusal, match="must not change with its length"):
        choose_engine(Cut(), F.cross_entropy, (torch.zeros(1, 5, 3), torch.zeros(1, dtype=torch.long)))


@pytest.mark.parametrize(("wrong", "chosen"), [(0, "capture"), (1, "capture"), (2, "vmap"), (3, "vmap")])
def test_after_a_tie_two_other_batches_must_pass(wrong, chosen, monkeypatch):
    """The capture engine's first so many batches come out wrong: one may be a tie of a max-pooling, two are a mistake."""
    honest, batches = probe.per_example_gradients, []

    def tied(model, loss, batch, engine):
        found = honest(model, loss, batch, engine)
        batches.append(engine)
        if engine == "capture" and batches.count("capture") <= wrong:
            return {name: Dense(1.5 * c.dense()) for name, c in found.items()}
        return found

    monkeypatch.setattr(probe, "per_example_gradients", tied)
    like = (torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))
    assert choose_engine(nn.Linear(4, 2), F.cross_entropy, like) == chosen


@pytest.mark.parametrize(
    ("channels", "shape", "hint"),
    [
        (1, (28, 28), r"layer 'body.1' \(Conv2d\) takes images as \(1, height, width\).*x\[:, None\] adds the channel"),
        (1, (28, 28, 1), r"takes images as \(1, height, width\) and these are \(28, 28, 1\).*moveaxis\(x, -1, 1\)"),
        (3, (28, 28, 3), r"takes images as \(3, height, width\) and these are \(28, 28, 3\).*moveaxis\(x, -1, 1\)"),
        (3, (28, 28), None),  # grey images for a network of colours: what was meant is not known
        (3, (1, 28, 28), None),
    ],
)
def test_images_without_channels_first_are_told_how_to_be(channels, shape, hint):
    model = nn.Sequential()
    model.body = nn.Sequential(
        nn.Identity(), nn.Conv2d(channels, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)
    )
    like = (torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long))
    with pytest.raises(Refusal, match=hint or "made-up examples") as refused:
        choose_engine(model, F.cross_entropy, like)
    assert hint is not None or "Conv2d" not in str(refused.value)
