"""The Opacus-shaped engine: what it refuses, before anything is charged."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

import tptopk
from tests.integrations.loops import BATCH, N, network, private, records, sgd, train, with_samples
from tptopk.integrations.opacus import PrivacyEngine
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.refusal import Refusal
from tptopk.training.updates import Updater


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(6), 0


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.zeros(6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x + self.table)


def padded(batch):
    x, y = zip(*batch, strict=True)
    return nn.utils.rnn.pad_sequence(x, batch_first=True), torch.stack(y)


def first_twice(batch):
    x, y = zip(*batch, strict=True)
    return torch.stack([x[0], *x]), torch.stack([y[0], *y])


def loader_of(**keywords) -> DataLoader:
    return DataLoader(records(), **{"batch_size": BATCH, **keywords})


LOADERS = {
    "custom sampler": (lambda: loader_of(sampler=WeightedRandomSampler(torch.ones(N), N)), "sampler of its own"),
    "with replacement": (lambda: loader_of(sampler=RandomSampler(records(), replacement=True)), "sampler of its own"),
    "batch sampler": (
        lambda: DataLoader(records(), batch_sampler=[[0, 1], [2]]),
        "sampler of its own",
    ),
    "iterable": (lambda: DataLoader(Endless(), batch_size=2), "IterableDataset"),
    "no batches": (lambda: DataLoader(records(), batch_size=None), "makes no batches"),
    "empty": (lambda: DataLoader(records(), batch_size=2 * N, drop_last=True), "no batch"),
    "a dataset": (lambda: records(), "must be a torch.utils.data.DataLoader"),
    "padding": (lambda: loader_of(collate_fn=padded), "pads records to the longest"),
    "rows": (lambda: loader_of(collate_fn=first_twice), "must stay one"),
    "strings": (lambda: DataLoader([(torch.zeros(6), "a")] * N, batch_size=BATCH), "holds a str"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_that_cannot_be_sampled_are_refused(name):
    build, message = LOADERS[name]
    model = network()
    with pytest.raises(Refusal, match=message):
        PrivacyEngine().make_private(
            module=model, optimizer=sgd(model), data_loader=build(), noise_multiplier=1.0, max_grad_norm=1.0
        )
    assert not model._forward_hooks and not model._forward_pre_hooks


KEYWORDS = {
    "poisson_sampling": (False, "rests on Poisson"),
    "batch_first": (False, "example axis first"),
    "loss_reduction": ("none", "'mean' or 'sum'"),
    "clipping": ("per_layer", "'auto-s'"),
    "noise_generator": (torch.Generator(), "subtract the noise"),
    "grad_sample_mode": ("ghost", "leave it out"),
    "wrap_model": (False, "never wrapped"),
    "rand_on_empty": (True, "no records"),
    "criterion": (nn.CrossEntropyLoss(reduction="sum"), "must agree"),
    "noise_multiplier": (0.0, "not private"),
    "method": ("tp-top", "did you mean 'tp-topk'"),
    "active_ratio": (0.3, "dp-sgd does not use it"),
    "warmup_steps": (5, "dp-sgd does not use it"),
    "warmup": (0.3, "did you mean 'warmup_steps'"),
    "max_grad_norms": (1.0, "did you mean 'max_grad_norm'"),
    "grad_scaler": (None, "no gradient scaler"),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_are_refused_with_what_to_do(name):
    value, message = KEYWORDS[name]
    model = network()
    given = {"module": model, "optimizer": sgd(model), "data_loader": loader_of(), "noise_multiplier": 1.0}
    with pytest.raises(Refusal, match=message):
        PrivacyEngine().make_private(**{**given, "max_grad_norm": 1.0, name: value})
    assert not model._forward_hooks


WEIGHTS = torch.tensor([1.0, 1.0, 3.0])
POSITIVE = torch.tensor([2.0, 1.0, 3.0])
MIXING = {
    "weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "one weight of many": nn.CrossEntropyLoss(weight=torch.cat([torch.ones(40_000), torch.tensor([1.01])])),
    "weights of log-probabilities": nn.NLLLoss(weight=WEIGHTS),
    "weights and smoothing": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
    "ignored": nn.CrossEntropyLoss(ignore_index=0),
    "ignored outside the classes": nn.CrossEntropyLoss(ignore_index=-1),
    "a function with weights": lambda x, y: F.cross_entropy(x, y, weight=WEIGHTS),
    "a function of tokens": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=0),
    "contrast": lambda x, y: F.cross_entropy(x @ y.T, torch.arange(len(x))),
}
APART = {
    "cross-entropy": nn.CrossEntropyLoss(),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "equal weights": nn.CrossEntropyLoss(weight=torch.full((3,), 2.0)),
    "log-probabilities": nn.NLLLoss(),
    "weights of outputs": nn.BCEWithLogitsLoss(weight=POSITIVE, pos_weight=POSITIVE),
    "probabilities": nn.BCELoss(),
    "squares": nn.MSELoss(),
    "absolute": nn.SmoothL1Loss(),
    "margins": nn.MultiMarginLoss(weight=WEIGHTS),
    "divergence": nn.KLDivLoss(),
    "three inputs": nn.TripletMarginLoss(),
    "squares of one column": lambda x, y: (x.squeeze(1) - y).square().mean(),
    "tokens": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "weights, averaged by itself": lambda x, y: F.cross_entropy(x, y, weight=WEIGHTS, reduction="none").mean(),
    "ignored, averaged by itself": lambda x, y: F.cross_entropy(x, y, ignore_index=0, reduction="none").mean(),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_criterion_whose_mean_is_not_of_each_examples_own_loss_is_refused(name):
    model = network()
    given = {"module": model, "optimizer": sgd(model), "data_loader": loader_of(), "max_grad_norm": 1.0}
    with pytest.raises(Refusal, match=r"reduction='none'\).mean\(\)"):
        PrivacyEngine().make_private(**given, noise_multiplier=1.0, criterion=MIXING[name])
    with pytest.raises(Refusal, match="whose mean over a batch"):
        PrivacyEngine().make_private_with_epsilon(
            **given, target_epsilon=1.0, target_delta=1e-5, epochs=1, criterion=MIXING[name]
        )
    assert not model._forward_hooks


@pytest.mark.parametrize("name", APART)
def test_a_criterion_of_each_examples_own_loss_is_taken(name):
    private(criterion=APART[name])


def test_sums_of_weighted_losses_are_each_examples_own():
    for sum_of in (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), nn.NLLLoss(ignore_index=0, reduction="sum")):
        private(criterion=sum_of, loss_reduction="sum")


def test_methods_are_asked_for_what_they_need():
    model = network()
    given = {"module": model, "optimizer": sgd(model), "data_loader": loader_of(), "max_grad_norm": 1.0}
    with pytest.raises(Refusal, match="needs warmup_steps="):
        PrivacyEngine().make_private(**given, noise_multiplier=1.0, method="tp-topk")
    with pytest.raises(Refusal, match="is not private"):
        PrivacyEngine().make_private(**given, noise_multiplier=1.0, method="non-private")
    with pytest.raises(Refusal, match="noise_multiplier has 2 values"):
        PrivacyEngine().make_private(**given, noise_multiplier=(1.0, 2.0))
    with pytest.raises(Refusal, match="too small an ε"):
        PrivacyEngine(accountant="gdp")
    with pytest.raises(Refusal, match="unknown accountant"):
        PrivacyEngine(accountant="prw")
    with pytest.raises(TypeError, match="no argument 'secure'"):
        PrivacyEngine(secure=True)


MODULES = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), "GroupNorm"),
    "bare parameter": (Positions, "no rule knows it"),
    "meta": (lambda: network().to("meta"), "meta device"),
    "data parallel": (lambda: nn.DataParallel(network()), "the module itself"),
    "frozen": (lambda: network().requires_grad_(False), "nothing to train"),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_hooks_cannot_follow_are_refused(name):
    build, message = MODULES[name]
    model = build()
    given = {"optimizer": sgd(model), "data_loader": loader_of(), "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    with pytest.raises(Refusal, match=message):
        PrivacyEngine().make_private(module=model, **given)
    assert not PrivacyEngine().is_compatible(module=model)


def test_a_fixed_module_is_compatible():
    engine = PrivacyEngine()
    model = engine.get_compatible_module(MODULES["batch norm"][0]())
    assert engine.is_compatible(module=model, optimizer=sgd(model), data_loader=loader_of())


def test_optimizers_that_do_not_fit_are_refused():
    model, other = network(), network()
    given = {"module": model, "data_loader": loader_of(), "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    for optimizer, message in (
        (torch.optim.SGD(model[0].parameters(), lr=0.1), "does not hold parameter 2.weight"),
        (sgd(other), "does not hold"),
        (torch.optim.LBFGS(model.parameters()), "evaluates the loss several times"),
    ):
        with pytest.raises(Refusal, match=message):
            PrivacyEngine().make_private(optimizer=optimizer, **given)


def test_part_of_a_module_is_trained_by_freezing_the_rest():
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    _, model, optimizer, loader = private(model=model, optimizer=torch.optim.SGD(model[2].parameters(), lr=0.1))
    train(model, optimizer, loader)
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    with pytest.raises(Refusal, match="are not those that were made private"):
        train(model, optimizer, loader)


def test_make_private_is_called_once():
    engine, model, optimizer, loader = private()
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    other = network()
    for which, what, message in (
        (engine, (other, sgd(other), loader_of()), "this engine has made"),
        (PrivacyEngine(), (model, sgd(model), loader_of()), "made private before"),
        (PrivacyEngine(), (model, optimizer, loader_of()), "made private before"),
        (PrivacyEngine(), (other, sgd(other), loader), "private one already"),
    ):
        with pytest.raises(Refusal, match=message):
            which.make_private(module=what[0], optimizer=what[1], data_loader=what[2], **given)


def test_a_model_that_fit_trained_is_refused_and_the_other_way_round_warned_about():
    plan = tptopk.Plan.calibrate(
        "dp-sgd", epsilon=3.0, delta=1e-4, batch_size=BATCH, dataset_size=N, steps=2, accountant="rdp"
    )
    model = network()
    tptopk.fit(model, records(), plan, sgd(model), loss=F.cross_entropy)
    with pytest.raises(Refusal, match="its weights carry that training's cost"):
        PrivacyEngine().make_private(
            module=model, optimizer=sgd(model), data_loader=loader_of(), noise_multiplier=1.0, max_grad_norm=1.0
        )
    model = private()[1]
    with pytest.warns(PrivacyWarning, match="which this run's ε does not count"):
        tptopk.fit(model, records(), plan, sgd(model), loss=F.cross_entropy)


def test_a_module_moved_afterwards_is_refused():
    _, model, _, loader = private()
    x, y = next(iter(loader))
    model.to("meta")
    with pytest.raises(Refusal, match="are not those that were made private|has been moved"):
        F.cross_entropy(model(x), y)


def test_the_module_is_tried_before_anything_is_charged():
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x - x.mean(0))

    engine, model, optimizer, loader = private(model=Mixing())
    with pytest.raises(Refusal, match="depends on the other examples"):
        train(model, optimizer, loader)
    assert len(engine.accountant) == 0


def test_a_module_that_fails_on_an_empty_batch_is_refused_where_one_may_come():
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x.view(len(x), -1))

    _, model, optimizer, loader = private(model=Viewed(), loader=DataLoader(records(), batch_size=2))
    with pytest.raises(Refusal, match=r"fails on a batch of zero examples.*flatten\(1\)"):
        for _ in range(20):
            train(model, optimizer, loader)


def test_other_data_goes_through_the_module_outside_training(monkeypatch):
    engine, model, optimizer, loader = private()
    with_samples(monkeypatch, optimizer, [1, 2, 3])
    x, y = next(iter(loader))
    with pytest.raises(Refusal, match="takes the batch that was drawn, whole|none of which it leads"):
        model(torch.randn(50, 6))
    with torch.no_grad():
        model(torch.randn(50, 6))
    model.eval()
    model(torch.randn(50, 6))
    model.train()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert len(engine.accountant) == 1


def test_a_dataset_that_changes_its_length_is_refused():
    class Growing(Dataset):
        more = 0

        def __len__(self):
            return N + self.more

        def __getitem__(self, index):
            return torch.zeros(6), torch.tensor(0)

    data = Growing()
    _, model, optimizer, loader = private(loader=DataLoader(data, batch_size=BATCH))
    data.more = 1
    with pytest.raises(Refusal, match="public number"):
        train(model, optimizer, loader)


def test_one_pass_over_the_loader_at_a_time():
    _, _, _, loader = private()
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    with pytest.raises(RuntimeError, match="one pass at a time"):
        next(first)


def test_a_subset_is_a_dataset_and_secure_mode_trains():
    _, model, optimizer, loader = private(
        PrivacyEngine(secure_mode=True, accountant="rdp"),
        loader=DataLoader(Subset(records(), range(60)), batch_size=20),
    )
    assert train(model, optimizer, loader) == 3
    assert optimizer._private_steps._streams.name == "chacha20"


def test_a_step_whose_update_fails_stays_charged(monkeypatch):
    engine, model, optimizer, loader = private()

    def fail(self, *given):
        raise KeyboardInterrupt

    monkeypatch.setattr(Updater, "apply", fail)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, loader)
    assert len(engine.accountant) == 1


def test_a_noise_multiplier_where_the_noise_is_calibrated_is_sent_to_the_call_that_takes_one():
    model = network()
    with pytest.raises(Refusal, match="make_private takes a noise_multiplier"):
        PrivacyEngine().make_private_with_epsilon(
            module=model, optimizer=sgd(model), data_loader=loader_of(), target_epsilon=1.0, target_delta=1e-5, epochs=1,
            max_grad_norm=1.0, noise_multiplier=1.0,
        )  # fmt: skip


def test_a_trained_network_in_another_module_is_refused():
    _, model, optimizer, loader = private()
    train(model, optimizer, loader, steps=1)
    with pytest.raises(Refusal, match="was trained or made private before"):
        again = nn.Sequential(model, nn.Linear(3, 3))
        PrivacyEngine().make_private(
            module=again, optimizer=sgd(again), data_loader=loader_of(), noise_multiplier=1.0, max_grad_norm=1.0
        )
