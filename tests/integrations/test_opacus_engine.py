"""The Opacus-shaped engine: what it returns, its phases, and what is drawn."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.loops import BATCH, N, network, private, records, train, weights, with_samples
from tptopk.privacy import accounting
from tptopk.privacy.accounting import Segment
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal

# What is returned.


def test_the_module_comes_back_as_it_was():
    model = network()
    names = list(model.state_dict())
    engine, returned, optimizer, loader = private(model=model)
    assert returned is model and list(model.state_dict()) == names and type(model) is nn.Sequential
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(loader, DataLoader)
    assert optimizer.param_groups is optimizer.original_optimizer.param_groups
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm, optimizer.expected_batch_size) == (1.0, 1.0, BATCH)
    assert len(loader) == N // BATCH and engine.accountant.history == [] and engine.get_epsilon(1e-5) == 0
    train(model, optimizer, loader)
    apart = copy.deepcopy(model)  # a copy is free of the engine
    loaded = pickle.loads(pickle.dumps(model))  # and so is one that torch.save would write
    for free in (apart, loaded):
        free(torch.randn(3, 6)).sum().backward()
        assert all(p.grad is not None for p in free.parameters())
    assert model[0]._forward_hooks == {}  # layers are hooked for the length of a forward pass alone


def test_a_model_that_was_pickled_when_its_hooks_were_in_another_file_still_loads():
    _, model, _, _ = private()
    for _ in range(2):  # and again when it is pickled once more
        pickled = pickle.dumps(model, protocol=0)
        assert b"opacus.door\n" in pickled
        model = pickle.loads(pickled.replace(b"opacus.door\n", b"opacus.steps\n"))
        assert model(torch.randn(3, 6)).shape == (3, 3)


def test_a_bare_layer_trains_as_it_would_in_a_sequence(monkeypatch):
    monkeypatch.setattr(Streams, "normal", lambda self, shape, device, *place: torch.zeros(shape, device=device))
    torch.manual_seed(0)
    bare = nn.Linear(6, 3)
    ends = []
    for model in (copy.deepcopy(bare), nn.Sequential(copy.deepcopy(bare))):
        engine, model, optimizer, loader = private(model=model)
        with_samples(monkeypatch, optimizer, [1, 2, 3], [], [4])
        assert train(model, optimizer, loader, steps=3) == len(engine.accountant) == 3
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # the layer's own error is seen
            next(iter(loader))
            model(torch.zeros(4, 7))
        assert len(model._forward_hooks) == 1
        ends.append(weights(model))
    assert torch.equal(*ends) and not torch.equal(ends[0], weights(bare))


def test_what_backward_leaves_is_not_seen():
    _, model, optimizer, loader = private()
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    assert all(p.grad is None for p in model.parameters())
    before = weights(model)
    optimizer.original_optimizer.step()
    assert torch.equal(weights(model), before)


def test_the_step_is_the_mechanisms():
    """Over 90,000 draws the variance of a step is (lr σ C / B)², within 6 standard errors: a false alarm once in 1e8 runs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 50), nn.Linear(50, 3))
    x = torch.zeros(N, 300)
    loader = DataLoader(TensorDataset(x, torch.zeros(N, dtype=torch.long)), batch_size=BATCH)
    _, model, optimizer, loader = private(model=model, loader=loader, noise_multiplier=1.7)
    moved = []
    for x, _ in loader:
        before = weights(model)
        optimizer.zero_grad()
        (0.0 * model(x)).mean().backward()  # every gradient is zero
        optimizer.step()
        moved.append((weights(model) - before).double())
    noise = torch.cat(moved)[:90_000]
    expected = (0.3 * 1.7 * 1.0 / BATCH) ** 2
    assert abs(float(noise.square().mean()) / expected - 1) < 6 * math.sqrt(2 / 90_000)


def test_samples_are_poisson(monkeypatch):
    """Inclusions of each record over 600 draws are binomial: χ² over 120 records, a false alarm once in 1e6 runs."""
    loader = DataLoader([torch.tensor([i]) for i in range(N)], batch_size=BATCH, shuffle=True)
    _, _, _, loader = private(model=nn.Sequential(nn.Linear(1, 2)), loader=loader)
    counts, sizes = np.zeros(N), []
    with pytest.warns(PrivacyWarning, match="charged all the same"):
        for _ in range(100):
            for x in loader:
                counts[x[:, 0].numpy()] += 1
                sizes.append(len(x))
    q, draws = BATCH / N, 100 * N // BATCH
    statistic = ((counts - q * draws) ** 2 / (draws * q * (1 - q))).sum()
    assert chi2.sf(statistic, N) > 1e-6
    assert np.var(sizes) == pytest.approx(N * q * (1 - q), rel=0.4)  # of a shuffle's fixed batches it would be 0


def test_workers_give_the_same_promises():
    loader = DataLoader(records(), batch_size=BATCH, num_workers=2)
    engine, model, optimizer, loader = private(loader=loader)
    assert train(model, optimizer, loader) == N // BATCH
    assert engine.accountant.history == [(1.0, BATCH / N, N // BATCH)]


def test_schedulers_closures_and_state_dicts_work_as_before():
    _, model, optimizer, loader = private()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    x, y = next(iter(loader))

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.15)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(Refusal, match="settled"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(AttributeError):
        optimizer.noise_multiplier = 0.1


# Phases.


@pytest.mark.parametrize("method", ["tp-topk", "tp-rand"])
def test_the_support_switches_inside_and_holds_still_to_the_bit(method):
    engine, model, optimizer, loader = private(
        model=(model := network()),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
        method=method,
        active_ratio=0.25,
        warmup_steps=4,
        noise_multiplier=(2.0, 1.0),
    )
    train(model, optimizer, loader, steps=4)
    assert optimizer.noise_multiplier == 1.0
    before = weights(model)
    train(model, optimizer, loader)
    train(model, optimizer, loader)
    still = weights(model) == before
    total = len(before)
    assert int((~still).sum()) == math.floor(0.25 * total)
    assert engine.accountant.history == [(2.0, BATCH / N, 4), (1.0, BATCH / N, 12)]
    expected = accounting.epsilon([Segment(2.0, BATCH / N, 4), Segment(1.0, BATCH / N, 12)], 1e-4, "rdp")
    assert engine.get_epsilon(1e-4) == expected


@pytest.mark.parametrize("method", ["on-topk", "on-rand"])
def test_online_methods_draw_a_support_every_epoch(method):
    _, model, optimizer, loader = private(method=method, active_ratio=0.3)
    moved = []
    for _ in range(3):
        before = weights(model)
        train(model, optimizer, loader)
        moved.append(weights(model) != before)
        assert int(moved[-1].sum()) <= math.floor(0.3 * len(before))
    assert not torch.equal(moved[0], moved[1])


def test_a_calibrated_warm_up_costs_its_share():
    engine, model, optimizer, loader = private(
        target_epsilon=3.0,
        target_delta=1e-4,
        epochs=5,
        method="tp-topk",
        warmup=0.4,
        warmup_budget=0.5,
        active_ratio=0.5,
    )
    train(model, optimizer, loader)
    train(model, optimizer, loader)
    assert 1.5 * 0.998 <= engine.get_epsilon(1e-4) <= 1.5
    for _ in range(3):
        train(model, optimizer, loader)
    assert 3.0 * 0.998 <= engine.get_epsilon(1e-4) <= 3.0


# What a model and a dataset draw.


def test_dropout_and_crops_are_secret_under_a_public_seed():
    class Cropped(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.randn(6), y

    def one_batch() -> torch.Tensor:
        model = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5), nn.Linear(10, 3))
        data = DataLoader(Cropped(torch.zeros(N, 6), torch.zeros(N, dtype=torch.long)), batch_size=N)  # everybody
        _, model, optimizer, loader = private(model=model, loader=data)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        x, y = next(iter(loader))
        F.cross_entropy(model(torch.zeros_like(x)), y).backward()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), before), "no generator tells how many records there were"
        return x

    assert not torch.equal(one_batch(), one_batch())


def test_a_forward_pass_throws_its_own_dice():
    outputs = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3))
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        _, model, _, loader = private(
            model=model, loader=DataLoader(TensorDataset(torch.ones(N, 6), torch.zeros(N).long()), batch_size=N)
        )
        torch.manual_seed(0)
        x, _ = next(iter(loader))
        outputs.append(model(x).detach())
    assert not torch.equal(*outputs)
