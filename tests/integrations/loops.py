"""A small training made private, and the usual loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

from tptopk.integrations.opacus import PrivacyEngine
from tptopk.privacy.plan import PrivacyWarning

N, BATCH = 120, 20


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def records(count: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def sgd(model: nn.Module, **keywords) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, **keywords)


def private(engine=None, model=None, optimizer=None, loader=None, **keywords):
    engine, model = engine or PrivacyEngine(accountant="rdp"), model or network()
    optimizer, loader = optimizer or sgd(model), loader or DataLoader(records(), batch_size=BATCH, shuffle=True)
    make = engine.make_private_with_epsilon if "target_epsilon" in keywords else engine.make_private
    if make == engine.make_private:
        keywords.setdefault("noise_multiplier", 1.0)
    with pytest.warns(PrivacyWarning, match="Poisson"):
        found = make(module=model, optimizer=optimizer, data_loader=loader, max_grad_norm=1.0, **keywords)
    return engine, *found


def train(model, optimizer, batches, steps: int | None = None) -> int:
    done = 0
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        done += 1
        if done == steps:
            break
    return done


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def with_samples(monkeypatch, optimizer, *samples: list[int]) -> None:
    left, found = list(samples), {}
    steps, drawn = optimizer._private_steps, optimizer._private_steps.sample

    def sample(place: int) -> torch.Tensor:
        if place not in found:
            found[place] = torch.tensor(left.pop(0), dtype=torch.long) if left else drawn(place)
        return found[place]

    monkeypatch.setattr(steps, "sample", sample)
