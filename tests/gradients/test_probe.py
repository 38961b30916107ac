"""Promise 7: nothing is skipped silently. Every model is right, or refused before anything is charged."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
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


@pytest.mark.parametrize("where", ["buffer", "late buffer", "parameter", "attribute", "list"])
def test_a_model_that_remembers_its_data_is_refused(where):
    with pytest.raises(Refusal, match="changes when the model is run"):
        choose_engine(RunningMean(where), F.cross_entropy, VECTORS)


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


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]).item(),
        lambda m, b: m(b[0]),
        lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")[:1],
    ],
)
def test_a_loss_that_is_not_per_example_is_refused(loss):
    with pytest.raises(Refusal, match="one number an example"):
        choose_engine(nn.Linear(6, 3), loss, VECTORS)


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
