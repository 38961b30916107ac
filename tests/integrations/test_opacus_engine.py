"""The Opacus-shaped engine: what it returns, and what it charges whatever the loop does."""

from __future__ import annotations

import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

from tests.integrations.loops import BATCH, N, network, private, records, sgd, train, weights, with_samples
from tptopk.integrations.opacus import BatchMemoryManager, ModuleValidator, PrivacyEngine
from tptopk.privacy import accounting
from tptopk.privacy.accounting import Segment, round_up
from tptopk.privacy.ledger import BudgetSpent
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.training.checkpoint import load_checkpoint, save_checkpoint

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


# What is charged.


def test_epsilon_is_that_of_the_steps_charged():
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    train(model, optimizer, loader, steps=2)
    assert engine.accountant.history == [(1.0, BATCH / N, 8)] and len(engine.accountant) == 8
    expected = accounting.epsilon([Segment(1.0, BATCH / N, 8)], 1e-4, "rdp")
    assert engine.get_epsilon(1e-4) == engine.get_epsilon(delta=1e-4) == expected


def test_a_statement_is_of_the_steps_charged():
    engine, model, optimizer, loader = private()
    with pytest.raises(Refusal, match="call make_private first"):
        PrivacyEngine().statement()
    train(model, optimizer, loader)
    text = engine.statement(1e-5)
    assert f"({round_up(engine.get_epsilon(1e-5))}, 1e-05)" in text and "unfinished" not in text
    assert f"| training | {len(loader)} | {len(loader)} |" in text


def test_a_statement_of_a_plan_says_how_much_of_it_was_taken():
    engine, model, optimizer, loader = private(target_epsilon=3.0, target_delta=1e-5, epochs=2)
    train(model, optimizer, loader)
    half = engine.statement()
    assert "This run is **unfinished**" in half and f"of {2 * len(loader)} steps" in half
    assert round_up(engine.get_epsilon(1e-5)) in half
    train(model, optimizer, loader)
    assert "unfinished" not in engine.statement()


def test_what_cannot_be_private_is_found_and_mended():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    assert not ModuleValidator.is_valid(model) and "GroupNorm" in str(ModuleValidator.validate(model)[0])
    with pytest.raises(Refusal):
        ModuleValidator.validate(model, strict=True)
    fixed = ModuleValidator.fix_and_validate(model)
    assert ModuleValidator.is_valid(fixed) and isinstance(fixed[1], nn.GroupNorm)
    with pytest.raises(Refusal, match="takes the module alone"):
        ModuleValidator.fix(model, replace_bn_with_in=True)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_target_is_never_passed(accountant):
    engine, model, optimizer, loader = private(
        PrivacyEngine(accountant=accountant), target_epsilon=2.0, target_delta=1e-3, epochs=2
    )
    for _ in range(2):
        train(model, optimizer, loader)
    assert 2.0 * 0.998 <= engine.get_epsilon(1e-3) <= 2.0
    before = weights(model)
    with pytest.raises(BudgetSpent, match="plan more epochs"):
        train(model, optimizer, loader)
    assert torch.equal(weights(model), before) and engine.get_epsilon(1e-3) <= 2.0


@pytest.mark.parametrize("size", [157, 119, 121])
def test_epochs_of_a_loader_with_a_last_short_batch_are_all_paid_for(size):
    engine, model, optimizer, loader = private(
        loader=DataLoader(records(size), batch_size=BATCH), target_epsilon=3.0, target_delta=1e-4, epochs=3
    )
    assert sum(train(model, optimizer, loader) for _ in range(3)) == 3 * math.ceil(size / BATCH)
    assert engine.accountant.history[0][1:] == (1 / math.ceil(size / BATCH), 3 * math.ceil(size / BATCH))


def test_an_empty_batch_is_a_charged_noisy_step(monkeypatch):
    engine, model, optimizer, loader = private()
    with_samples(monkeypatch, optimizer, [], [3, 4], [])
    before = weights(model)
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        assert len(engine.accountant) == len(sizes)
        assert not (weights(model) == before).any() and torch.isfinite(weights(model)).all()
        before = weights(model)
    assert sizes[:3] == [0, 2, 0] and x.shape[1:] == (6,)


def test_an_empty_batch_that_the_loop_skips_makes_its_noisy_step_all_the_same(monkeypatch):
    engine, model, optimizer, loader = private()
    with_samples(monkeypatch, optimizer, [1], [], [2], *[[3, 4]] * 2, [])  # the last of the pass is empty, too
    given, left = [], []
    for x, y in loader:
        given.append(weights(model))
        if len(x) > 0:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        left.append(weights(model))
    given.append(weights(model))
    moved_between = [not torch.equal(after, later) for after, later in zip(left, given[1:], strict=True)]
    assert moved_between == [False, True, False, False, False, True]
    assert len(engine.accountant) == 6


def test_a_batch_without_its_step_is_charged(monkeypatch):
    engine, model, optimizer, loader = private()
    with_samples(monkeypatch, optimizer, [1, 2], [3], [4])
    passes = iter(loader)
    x, y = next(passes)
    F.cross_entropy(model(x), y).backward()
    before = weights(model)
    with pytest.warns(PrivacyWarning, match="charged all the same"):
        next(passes)  # the first was run and not stepped on
    assert len(engine.accountant) == 1 and torch.equal(weights(model), before)
    next(passes)  # the second was passed over in training mode
    assert len(engine.accountant) == 2
    model.eval()
    next(passes)  # looked at in evaluation mode: nothing is trained on it
    assert len(engine.accountant) == 2


def test_looking_at_a_batch_before_training_is_free():
    engine, model, optimizer, loader = private(target_epsilon=3.0, target_delta=1e-4, epochs=1)
    next(iter(loader))
    assert train(model, optimizer, loader) == N // BATCH == len(engine.accountant)
    model.eval()
    with torch.no_grad():
        for x, _ in loader:
            model(x)
    assert len(engine.accountant) == N // BATCH


def test_a_loop_cannot_choose_its_samples_by_what_is_in_them():
    """Record 0 would be in every step; by chance it is in all of 20 samples once in 6^20 runs."""
    data = records()
    data.tensors[0][0] = 100.0
    engine, model, optimizer, loader = private(loader=DataLoader(data, batch_size=BATCH))
    taken = refused = 0
    while taken < 20 and refused < 500:
        for x, y in loader:
            if not bool((x > 50).any()):
                refused += 1
                break  # it would like another one
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            taken += 1
    assert taken < 20 and refused == 500 and len(engine.accountant) == taken


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_was_looked_at_comes_again_until_it_is_used(workers):
    engine, model, optimizer, loader = private(
        loader=DataLoader(records(), batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0)
    )
    x, _ = next(iter(loader))
    with torch.no_grad():
        model(x)
    parts = BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer)
    with parts as physical:
        assert torch.equal(next(iter(physical))[0], x[: len(x) // math.ceil(len(x) / 4)])
    assert torch.equal(next(iter(loader))[0], x) and len(engine.accountant) == 0
    train(model, optimizer, loader, steps=1)
    again, _ = next(iter(loader))
    assert not torch.equal(again, x) and len(engine.accountant) == 1
    model(again)  # used in training, and not stepped on
    with pytest.warns(PrivacyWarning, match="charged all the same"):
        fresh, _ = next(iter(loader))
    assert not torch.equal(fresh, again) and len(engine.accountant) == 2


def test_a_checkpoint_brings_no_fresh_sample(tmp_path):
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader, steps=1)
    engine.save_checkpoint(path=tmp_path, module=model)
    x, _ = next(iter(loader))
    for _ in range(2):
        engine.load_checkpoint(path=tmp_path, module=model)
        assert torch.equal(next(iter(loader))[0], x)
    assert len(engine.accountant) == 1


def test_samples_passed_over_in_evaluation_mode_are_charged_once_a_later_one_is_trained_on():
    engine, model, optimizer, loader = private()
    model.eval()
    seen = [x for x, _ in loader]
    for n, (x, y) in enumerate(loader):
        assert torch.equal(x, seen[n]) and len(engine.accountant) == 0
        if n == 3:
            model.train()
            with pytest.warns(PrivacyWarning, match="charged all the same"):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            break
    assert len(engine.accountant) == 4
    assert torch.equal(next(iter(loader))[0], seen[4])


def test_a_step_needs_a_batch_and_a_backward_pass():
    engine, model, optimizer, loader = private()
    before = weights(model)
    with pytest.raises(RuntimeError, match="no batch to step on"):
        optimizer.step()
    x, y = next(iter(loader))
    with pytest.raises(RuntimeError, match="before loss.backward"):
        optimizer.step()
    model(x)
    with pytest.raises(RuntimeError, match="before loss.backward"):
        optimizer.step()
    assert torch.equal(weights(model), before) and len(engine.accountant) == 0
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    after = weights(model)
    with pytest.raises(RuntimeError, match="no batch to step on"):  # the sample is used up
        optimizer.step()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="no batch to step on"):
        optimizer.step()
    assert torch.equal(weights(model), after) and len(engine.accountant) == 1


def test_a_loop_goes_on_after_an_interrupt():
    class Interrupted(nn.Module):
        at = 10**6

        def forward(self, x):
            Interrupted.at -= 1
            if Interrupted.at == 0 and self.training:
                raise KeyboardInterrupt
            return x

    engine, model, optimizer, loader = private(model=nn.Sequential(nn.Linear(6, 3), Interrupted()))
    train(model, optimizer, loader, steps=1)
    Interrupted.at = 1
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, loader)
    with pytest.warns(PrivacyWarning, match="charged all the same"):  # the interrupted batch
        assert train(model, optimizer, loader) == 6
    assert len(engine.accountant) == 1 + 1 + 6


def test_backward_twice_over_one_forward_pass_is_refused():
    engine, model, _, loader = private()
    x, y = next(iter(loader))
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()
    assert len(engine.accountant) == 0


@pytest.mark.parametrize("way", ["twice", "zeroed after forward", "zeroed after backward", "metric"])
def test_gradients_add_up_and_are_dropped_as_torchs_are(way, monkeypatch):
    monkeypatch.setattr(Streams, "normal", lambda self, shape, device, *place: torch.zeros(shape, device=device))
    _, model, optimizer, loader = private()
    reference = copy.deepcopy(model)
    x, y = next(iter(loader))
    if way == "zeroed after backward":
        (7 * F.cross_entropy(model(x), y)).backward()
        optimizer.zero_grad()
    if way == "metric":
        model(x)
    factor = 2.0 if way == "twice" else 1.0
    for _ in range(int(factor)):
        loss = F.cross_entropy(model(x), y)
        if way == "zeroed after forward":
            optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    for p in reference.parameters():
        p.grad = torch.zeros_like(p)
    for i in range(len(x)):
        loss = factor * F.cross_entropy(reference(x[i : i + 1]), y[i : i + 1])
        found = torch.autograd.grad(loss, list(reference.parameters()))
        scale = min(1.0, 1.0 / float(torch.cat([g.flatten() for g in found]).norm())) / BATCH
        for p, g in zip(reference.parameters(), found, strict=True):
            p.grad += scale * g
    sgd(reference).step()
    assert torch.allclose(weights(model), weights(reference), atol=1e-6)


def test_a_penalty_on_the_weights_in_the_loss_is_refused_before_anything_is_charged():
    engine, model, optimizer, loader = private()
    x, y = next(iter(loader))
    (F.cross_entropy(model(x), y) + 0.01 * model[0].weight.square().sum()).backward()
    for _ in range(2):
        with pytest.raises(Refusal, match="weight_decay"):
            optimizer.step()
    assert len(engine.accountant) == 0


def test_one_record_moves_a_step_by_no_more_than_the_clip(monkeypatch):
    """A batch with a record more differs by at most C / B, whatever the record, NaN among them."""
    monkeypatch.setattr(Streams, "normal", lambda self, shape, device, *place: torch.zeros(shape, device=device))
    moved = []
    for value in (0.0, 1e4, math.nan, math.inf):
        data = records()
        data.tensors[0][5] = value
        for sample in ([1, 2], [1, 2, 5]):
            _, model, optimizer, loader = private(loader=DataLoader(data, batch_size=BATCH))
            with_samples(monkeypatch, optimizer, sample)
            train(model, optimizer, loader, steps=1)
            moved.append(weights(model))
        assert torch.isfinite(moved[-1]).all()
        assert float((moved[-1] - moved[-2]).norm()) <= 0.3 * 1.0 / BATCH * (1 + 1e-4)
    assert float((moved[3] - moved[2]).norm()) == pytest.approx(0.3 / BATCH, rel=1e-3)  # the clip is reached


def test_a_loop_under_autocast_trains_and_clips(monkeypatch):
    monkeypatch.setattr(Streams, "normal", lambda self, shape, device, *place: torch.zeros(shape, device=device))
    moved = []
    for sample in ([1, 2], [1, 2, 5]):
        data = records()
        data.tensors[0][5] = 100.0
        _, model, optimizer, loader = private(loader=DataLoader(data, batch_size=BATCH))
        with_samples(monkeypatch, optimizer, sample)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            train(model, optimizer, loader, steps=1)
        moved.append(weights(model))
    assert 0 < float((moved[1] - moved[0]).norm()) <= 0.3 / BATCH * (1 + 1e-4)


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


# Virtual batches.


def test_virtual_batches_are_one_step_of_the_same_sum(monkeypatch):
    monkeypatch.setattr(Streams, "normal", lambda self, shape, device, *place: torch.zeros(shape, device=device))
    samples, found = [[*range(17)], [], [40, 41, 42]], []
    for most in (None, 5, 1):
        engine, model, optimizer, loader = private()
        with_samples(monkeypatch, optimizer, *samples)
        if most is None:
            train(model, optimizer, loader, steps=3)
        else:
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=most, optimizer=optimizer) as physical:
                parts = {5: 4 + 1 + 1, 1: 17 + 1 + 3}[most]
                assert train(model, optimizer, physical, steps=parts) == parts
                assert len(physical) >= len(loader)
        assert len(engine.accountant) == 3
        found.append(weights(model))
    assert torch.allclose(found[0], found[1], atol=1e-6) and torch.allclose(found[0], found[2], atol=1e-6)


def test_leaving_in_the_middle_of_a_virtual_batch_leaves_no_part_of_it_behind(monkeypatch):
    monkeypatch.setattr(Streams, "normal", lambda self, shape, device, *place: torch.zeros(shape, device=device))
    engine, model, optimizer, loader = private()
    untouched = copy.deepcopy(model)
    with_samples(monkeypatch, optimizer, [*range(10)])
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as physical:
        train(model, optimizer, physical, steps=2)
    assert torch.equal(weights(model), weights(untouched)) and len(engine.accountant) == 0
    with_samples(monkeypatch, optimizer, [50, 51])
    with pytest.warns(PrivacyWarning, match="charged all the same"):
        train(model, optimizer, loader, steps=1)
    assert len(engine.accountant) == 2
    _, alone, other, fresh = private()
    with_samples(monkeypatch, other, [50, 51])
    train(alone, other, fresh, steps=1)
    assert torch.equal(weights(model), weights(alone))


def test_every_part_of_a_virtual_batch_is_stepped_on(monkeypatch):
    engine, model, optimizer, loader = private()
    with_samples(monkeypatch, optimizer, [*range(6)], [7])
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as physical:
        parts = iter(physical)
        next(parts)
        x, y = next(parts)
        F.cross_entropy(model(x), y).backward()
        before = weights(model)
        with pytest.raises(RuntimeError, match="a part of this sample was left out"):
            optimizer.step()
        assert torch.equal(weights(model), before)
        with pytest.warns(PrivacyWarning, match="charged all the same"):
            next(parts)
    assert len(engine.accountant) == 1


# Checkpoints.


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk"])
def test_a_checkpoint_keeps_charges_noise_and_support(method, tmp_path):
    options = {"method": method, "target_epsilon": 3.0, "target_delta": 1e-4, "epochs": 3}
    model = network()
    engine, model, optimizer, loader = private(model=model, optimizer=sgd(model, momentum=0.9), **options)
    train(model, optimizer, loader)
    train(model, optimizer, loader, steps=1)
    engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1})
    saved, support = weights(model), optimizer._private_steps.policy.current
    momentum = [s["momentum_buffer"].clone() for s in optimizer.original_optimizer.state.values()]

    other = network()
    second, other, its, fresh = private(model=other, optimizer=sgd(other, momentum=0.9), **options)
    assert second.load_checkpoint(path=tmp_path / "c.pt", module=other, optimizer=its) == {"epoch": 1}
    assert torch.equal(weights(other), saved) and other.training
    assert second.accountant.history == engine.accountant.history
    assert its.noise_multiplier == optimizer.noise_multiplier
    assert its._private_steps.policy.current == support
    kept = [s["momentum_buffer"] for s in its.original_optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, momentum, strict=True))
    train(other, its, fresh, steps=5)
    train(other, its, fresh)
    assert 3.0 * 0.998 <= second.get_epsilon(1e-4) <= 3.0
    with pytest.raises(BudgetSpent):
        train(other, its, fresh, steps=1)
    if method == "tp-topk":
        active = torch.cat([m.flatten() for m in support.masks.values()])
        assert torch.equal(weights(other)[~active], saved[~active])


def test_going_back_to_a_checkpoint_takes_no_charge_back_and_repeats_no_noise(tmp_path, monkeypatch):
    drawn, normal = [], Streams.normal

    def listened(self, *place):
        drawn.append(normal(self, *place))
        return drawn[-1].clone()

    monkeypatch.setattr(Streams, "normal", listened)
    engine, model, optimizer, loader = private(target_epsilon=3.0, target_delta=1e-4, epochs=2)
    train(model, optimizer, loader, steps=2)
    engine.save_checkpoint(path=tmp_path, module=model, optimizer=optimizer)
    train(model, optimizer, loader, steps=3)
    engine.load_checkpoint(path=tmp_path, module=model, optimizer=optimizer)
    assert len(engine.accountant) == 5
    train(model, optimizer, loader, steps=3)
    assert len(engine.accountant) == 8
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    with pytest.raises(BudgetSpent):  # the three lost steps are not to be had again
        for _ in range(2):
            train(model, optimizer, loader)
    assert engine.get_epsilon(1e-4) <= 3.0 and len(engine.accountant) == 12


def test_another_trainings_charges_are_added(tmp_path):
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path, module=model)
    second, other, its, fresh = private()
    train(other, its, fresh, steps=2)
    second.load_checkpoint(path=tmp_path, module=other)
    assert len(second.accountant) == 6 + 2


def test_charges_of_processes_that_load_each_others_checkpoints_are_all_counted_and_once(tmp_path):
    a, model, optimizer, loader = private()
    b, other, its, fresh = private()
    train(model, optimizer, loader, steps=2)
    a.save_checkpoint(path=tmp_path / "A", module=model)
    train(model, optimizer, loader, steps=4)
    b.load_checkpoint(path=tmp_path / "A", module=other)
    train(other, its, fresh, steps=5)
    b.save_checkpoint(path=tmp_path / "B", module=other)
    a.load_checkpoint(path=tmp_path / "B", module=model)
    assert len(b.accountant) == 2 + 5 and len(a.accountant) == 2 + 4 + 5
    train(model, optimizer, loader, steps=1)
    for _ in range(2):  # whatever it loads, and however often
        for path in ("A", "B"):
            a.load_checkpoint(path=tmp_path / path, module=model)
            assert len(a.accountant) == 2 + 4 + 5 + 1
    a.save_checkpoint(path=tmp_path / "C", module=model)
    b.load_checkpoint(path=tmp_path / "C", module=other)
    assert len(b.accountant) == 2 + 4 + 5 + 1


def test_a_checkpoint_of_before_charges_were_kept_apart_is_added_to_what_is_known(tmp_path):
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader, steps=2)
    engine.save_checkpoint(path=tmp_path, module=model)
    found = load_checkpoint(tmp_path)
    counts = {"run": found.values["counts"]["run"], "taken": {"0": 2}, "charged": {"0": 3}}
    save_checkpoint(tmp_path, found.tensors, {**found.values, "counts": counts})
    other, another, _, _ = private()
    other.load_checkpoint(path=tmp_path, module=another)
    assert len(other.accountant) == 3
    engine.load_checkpoint(path=tmp_path, module=model)
    assert len(engine.accountant) == 2 + 3


def test_a_statement_after_a_checkpoint_says_what_is_not_counted(tmp_path):
    """A process that died after its last checkpoint took its charges with it, and may have released models."""
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader, steps=2)
    once = engine.statement()
    assert "resumed" not in once and "are not counted" not in once and "chosen supports." in once
    for attempt in (2, 3):
        engine.save_checkpoint(path=tmp_path / str(attempt), module=model)
        train(model, optimizer, loader, steps=2)  # and dies
        engine, model, optimizer, loader = private()
        engine.load_checkpoint(path=tmp_path / str(attempt), module=model)
        train(model, optimizer, loader, steps=1)
        text = engine.statement()
        assert f"resumed {attempt - 1} time(s)" in text and f"Begun, {attempt} attempts: 2" in text
        assert (
            f"not on record of the {attempt} attempts" in text
            and "died after its last checkpoint are not counted" in text
        )
        assert "up to the checkpoint that was gone on from" in text
    for attempt in (4, 5):  # the same process goes back to a checkpoint, twice
        engine.load_checkpoint(path=tmp_path / "3", module=model)
        assert f"not on record of the {attempt} attempts" in engine.statement()
    found = load_checkpoint(tmp_path / "2")
    of_before = {name: value for name, value in found.values.items() if name != "begun"}  # when it was not kept
    save_checkpoint(tmp_path / "2", found.tensors, of_before)
    engine, model, _, _ = private()
    engine.load_checkpoint(path=tmp_path / "2", module=model)
    assert "Begun, 2 attempts: not on record, 2" in engine.statement()


def test_noise_of_two_generators_is_not_stated_as_of_the_better(tmp_path):
    said = []
    for number, secure in enumerate((True, True, False, True)):
        engine, model, optimizer, loader = private(PrivacyEngine(accountant="rdp", secure_mode=secure))
        if number:
            engine.load_checkpoint(path=tmp_path, module=model)
        train(model, optimizer, loader, steps=1)
        engine.save_checkpoint(path=tmp_path, module=model)
        said.append("ChaCha20" in engine.statement())
    assert said == [True, True, False, False]


def test_a_checkpoint_holds_no_secret_and_nothing_pickled(tmp_path):
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path, module=model, optimizer=optimizer)
    secret = optimizer._private_steps._streams._secret
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        assert secret not in content and secret.hex().encode() not in content and not content.startswith(b"PK")
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    engine, model, optimizer, loader = private()
    with pytest.raises(Refusal, match="holds no checkpoint"):
        engine.load_checkpoint(path=tmp_path / "none", module=model)
    train(model, optimizer, loader, steps=1)
    engine.save_checkpoint(path=tmp_path / "a", module=model)
    with pytest.raises(Refusal, match="without an optimizer"):
        engine.load_checkpoint(path=tmp_path / "a", module=model, optimizer=optimizer)
    other, another, its, _ = private(noise_multiplier=0.9)
    with pytest.raises(Refusal, match="its noise_multiplier is 1, here 0.9"):
        other.load_checkpoint(path=tmp_path / "a", module=another)
    with pytest.raises(Refusal, match="not the one that this engine"):
        engine.save_checkpoint(path=tmp_path / "b", module=another)
    with pytest.raises(Refusal, match="make_private returned"):
        engine.save_checkpoint(path=tmp_path / "b", module=model, optimizer=its)
    with pytest.raises(Refusal, match="call make_private first"):
        PrivacyEngine().save_checkpoint(path=tmp_path / "b", module=model)
    with pytest.raises(Refusal, match="no keywords for torch"):
        engine.save_checkpoint(path=tmp_path / "b", module=model, torch_save_kwargs={})
    with pytest.raises(Refusal, match="cannot hold"):
        engine.save_checkpoint(path=tmp_path / "b", module=model, checkpoint_dict={"x": object()})
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refusal, match="is a file"):
        engine.save_checkpoint(path=tmp_path / "file", module=model)
    index = json.loads((tmp_path / "a" / "checkpoint.json").read_text())
    (tmp_path / "a" / index["current"]["file"]).write_bytes(b"junk")
    with pytest.raises(Refusal, match="no checkpoint in"):
        engine.load_checkpoint(path=tmp_path / "a", module=model)


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
