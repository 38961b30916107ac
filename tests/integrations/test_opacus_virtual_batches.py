"""The Opacus-shaped engine: samples in physical batches that fit into memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from tests.integrations.loops import private, train, weights, with_samples
from tptopk.integrations.opacus import BatchMemoryManager
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.randomness import Streams


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


def test_the_module_may_be_changed_between_the_parts_of_a_sample(monkeypatch):
    _, model, optimizer, loader = private()
    with_samples(monkeypatch, optimizer, [*range(10)])
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as physical:
        for step, (x, y) in enumerate(physical):
            model.temperature = 1 / (1 + step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model[0].weight.clamp_(-2, 2)
            if step == 2:
                break
