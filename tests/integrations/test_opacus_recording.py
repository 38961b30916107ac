"""The Opacus-shaped engine: what it makes of the loop's backward passes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.integrations.loops import BATCH, private, records, sgd, train, weights, with_samples
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal


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
