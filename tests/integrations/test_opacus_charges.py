"""The Opacus-shaped engine: what it charges whatever the loop does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.integrations.loops import BATCH, N, private, records, train, weights, with_samples
from tptopk.integrations.opacus import BatchMemoryManager, ModuleValidator, PrivacyEngine
from tptopk.privacy import accounting
from tptopk.privacy.accounting import Segment, round_up
from tptopk.privacy.ledger import BudgetSpent
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.refusal import Refusal


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
    assert f"({round_up(engine.get_epsilon(1e-5))}, 1e-05)" in text
    assert f"| training | {len(loader)} | {len(loader)} |" in text
    assert "That it ended, and how, may depend on the data and is not covered" in text, "it had no horizon"


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
