"""The Opacus-shaped engine on a GPU. Skipped where there is none."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.gradients.cases import Transformer
from tests.integrations.loops import N, network, private, records, sgd, weights
from tptopk.gradients.clipping import clipped_sum
from tptopk.integrations.opacus import PrivacyEngine
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.supports.support import Support

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 3)
    )


MODELS = {
    "mlp": (network, lambda: torch.randn(N, 6)),
    "cnn": (cnn, lambda: torch.randn(N, 3, 8, 8)),
    "transformer": (Transformer, lambda: torch.randint(0, 11, (N, 7))),
}


def loop(model, optimizer, loader, passes=1, autocast=False):
    given = []
    for _ in range(passes):
        for x, y in loader:
            given.append((x, y))
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            loss.backward()
            optimizer.step()
    return given


@pytest.mark.parametrize("name", MODELS)
def test_the_steps_are_those_of_the_clipped_sums(name, monkeypatch):
    monkeypatch.setattr(Streams, "normal", lambda self, shape, device, *place: torch.zeros(shape, device=device))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model = build()
    reference = copy.deepcopy(model)
    model.cuda()
    loader = DataLoader(TensorDataset(inputs(), torch.randint(0, 3, (N,))), batch_size=20, pin_memory=True)
    _, model, optimizer, loader = private(model=model, loader=loader)
    other = sgd(reference)
    for batch in loop(model, optimizer, loader):
        total = clipped_sum(reference, F.cross_entropy, batch, Support.full(reference), 1.0).values
        for key, p in reference.named_parameters():
            p.grad = total[key] / 20
        other.step()
    assert torch.allclose(weights(model).cpu(), weights(reference), atol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_support_holds_still_on_a_gpu(autocast):
    model = network().cuda()
    engine, model, optimizer, loader = private(model=model, method="tp-topk", active_ratio=0.25, warmup_steps=6)
    loop(model, optimizer, loader, autocast=autocast)
    before = weights(model)
    loop(model, optimizer, loader, passes=2, autocast=autocast)
    assert int((weights(model) != before).sum()) == math.floor(0.25 * len(before))
    assert len(engine.accountant) == 18


def test_a_module_on_another_device_is_refused():
    _, model, _, loader = private(loader=DataLoader(records(), batch_size=20))
    x, _ = next(iter(loader))
    model.cuda()
    with pytest.raises(Refusal, match="made private on cpu and has been moved"):
        model(x.cuda())
    split = network()
    split[2].cuda()
    loader = DataLoader(records(), batch_size=20)
    with pytest.raises(Refusal, match="several devices"):
        PrivacyEngine().make_private(
            module=split, optimizer=sgd(split), data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
