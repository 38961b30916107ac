"""The same loop, the same samples, no noise: after 20 steps the parameters are Opacus's."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.gradients.cases import Transformer
from tptopk.integrations.opacus import BatchMemoryManager, PrivacyEngine
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.randomness import Streams

opacus = pytest.importorskip("opacus")

RECORDS, STEPS = 157, 20  # not a multiple of any batch size below


class Encoder(nn.Module):
    """Two blocks with torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.tokens, self.body = nn.Embedding(11, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.tokens(ids)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.Flatten(),
        nn.Linear(72, 3),
    )


def numbers(*shape: int):
    return lambda: torch.randn(RECORDS, *shape)


MODELS = {
    "mlp": (mlp, numbers(20)),
    "cnn": (cnn, numbers(3, 8, 8)),
    "transformer": (Transformer, lambda: torch.randint(0, 11, (RECORDS, 7))),
}
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-3),
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3),
}


def script(engine, model, optimizer, loader, batches, reduction, clip_norm):
    """Written once, for either engine: `batches` stands for the loader that Opacus returns."""
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.0 if batches else 1.0,
        max_grad_norm=clip_norm,
        loss_reduction=reduction,
    )
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    given = []
    while len(given) < STEPS:
        for x, y in batches or loader:
            given.append((x, y))
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            if len(given) == STEPS:
                break
    return given


def furthest(ours: nn.Module, theirs: nn.Module) -> float:
    other = dict(theirs.named_parameters())
    return max(float((p - other[name]).detach().abs().max()) for name, p in ours.named_parameters())


@pytest.fixture(autouse=True)
def _no_noise(monkeypatch):
    monkeypatch.setattr(Streams, "normal", lambda self, shape, device, *place: torch.zeros(shape, device=device))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("optimizer", "clip_norm"), [("sgd", 0.3), ("adam", 0.3), ("sgd", 100.0)])
def test_twenty_steps_leave_opacuss_parameters(name, reduction, optimizer, clip_norm, record_property):
    torch.manual_seed(3)
    build, inputs = MODELS[name]
    data = TensorDataset(inputs(), torch.randint(0, 3, (RECORDS,)))
    ours = build()
    theirs, before = copy.deepcopy(ours), copy.deepcopy(ours)
    rate = {"mean": 1.0, "sum": 1 / 16}[reduction]

    def built(model: nn.Module) -> torch.optim.Optimizer:
        made = OPTIMIZERS[optimizer](model)
        if optimizer == "sgd":
            made.param_groups[0]["lr"] *= rate * (0.1 if clip_norm > 1 else 1.0)
        return made

    loader = DataLoader(data, batch_size=16, shuffle=True)
    given = script(PrivacyEngine(), ours, built(ours), loader, None, reduction, clip_norm)
    script(opacus.PrivacyEngine(), theirs, built(theirs), loader, given, reduction, clip_norm)
    gap = furthest(ours, theirs)
    record_property("gap", gap)
    assert furthest(ours, before) > 0.02  # it moved
    assert gap <= 1e-4, gap


def test_torchs_own_encoder_trains_as_the_sum_of_its_clipped_gradients(record_property):
    """Opacus has no rule for torch's attention, so the comparison is one example at a time."""
    torch.manual_seed(0)
    ours = Encoder()
    theirs = copy.deepcopy(ours)
    data = TensorDataset(torch.randint(0, 11, (RECORDS, 7)), torch.randint(0, 3, (RECORDS,)))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    with pytest.warns(PrivacyWarning):
        given = script(PrivacyEngine(), ours, optimizer, DataLoader(data, batch_size=16), None, "mean", 0.3)
    other = torch.optim.SGD(theirs.parameters(), lr=0.5)
    divisor = int(RECORDS * (1 / 10))
    for x, y in given:
        total = [torch.zeros_like(p) for p in theirs.parameters()]
        for i in range(len(x)):
            loss = F.cross_entropy(theirs(x[i : i + 1]), y[i : i + 1])
            gradient = torch.autograd.grad(loss, list(theirs.parameters()))
            factor = min(1.0, 0.3 / float(torch.stack([g.norm() for g in gradient]).norm()))
            total = [t + factor * g for t, g in zip(total, gradient, strict=True)]
        for p, t in zip(theirs.parameters(), total, strict=True):
            p.grad = t / divisor
        other.step()
    record_property("gap", furthest(ours, theirs))
    assert furthest(ours, theirs) <= 1e-4


@pytest.mark.filterwarnings("ignore")
def test_virtual_batches_leave_opacuss_parameters():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(RECORDS, 20), torch.randint(0, 3, (RECORDS,)))
    ours = mlp()
    theirs = copy.deepcopy(ours)
    loader = DataLoader(data, batch_size=40)
    keywords = {"data_loader": loader, "max_grad_norm": 0.3}
    model, optimizer, private = PrivacyEngine().make_private(
        module=ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.5), noise_multiplier=1.0, **keywords
    )
    wrapped, other, _ = opacus.PrivacyEngine().make_private(
        module=theirs, optimizer=torch.optim.SGD(theirs.parameters(), lr=0.5), noise_multiplier=0.0, **keywords
    )
    parts = 0
    for _ in range(3):
        with BatchMemoryManager(data_loader=private, max_physical_batch_size=7, optimizer=optimizer) as physical:
            for x, y in physical:
                parts += 1
                assert len(x) <= 7
                other.signal_skip_step(do_skip=not optimizer._private_steps._drawn.part.last)
                for network, its in ((model, optimizer), (wrapped, other)):
                    its.zero_grad()
                    F.cross_entropy(network(x), y).backward()
                    its.step()
    assert parts > 3 * 12
    assert furthest(ours, theirs) <= 1e-4


def test_the_warnings_are_of_our_own_kind_alone():
    """A script is told that its loader was replaced and its dataset's size made public, and nothing else."""
    data = TensorDataset(torch.randn(RECORDS, 20), torch.randint(0, 3, (RECORDS,)))
    model = mlp()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        script(
            PrivacyEngine(),
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            DataLoader(data, batch_size=16, shuffle=True),
            None,
            "mean",
            1.0,
        )
    (one,) = [w for w in said if issubclass(w.category, PrivacyWarning)]
    assert "shuffle=True" in str(one.message) and "Poisson" in str(one.message) and "157" in str(one.message)
    assert one.filename == __file__
