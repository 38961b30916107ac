"""Promise 3, second half: inactive coordinates never move, whatever the optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tptopk.privacy.refusal import Refusal
from tptopk.supports.selection import top_k
from tptopk.supports.support import Support, trainable
from tptopk.training.updates import Updater, WeightAverage, check_optimizer

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    "muon": lambda p: torch.optim.Muon(p, lr=0.1, momentum=0.9, weight_decay=0.1),  # of matrices alone
}


def network(optimizer: str) -> nn.Module:
    bias = optimizer != "muon"
    return nn.Sequential(nn.Linear(7, 5, bias=bias), nn.Linear(5, 3, bias=bias))


def supports(model: nn.Module, count: int) -> list[Support]:
    generator = torch.Generator().manual_seed(0)
    total = Support.full(model).total
    return [
        top_k({n: torch.rand(p.shape, generator=generator) for n, p in trainable(model).items()}, total // 3)
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inactive_coordinates_never_move(name):
    torch.manual_seed(0)
    model = network(name)
    updater = Updater(model, OPTIMIZERS[name](model.parameters()))
    everything = Support.full(model)
    for _ in range(5):  # a dense warm-up fills the optimizer's state everywhere
        updater.apply({n: torch.randn_like(p) for n, p in trainable(model).items()}, everything)
    for support in supports(model, 3):
        before = {n: p.detach().clone() for n, p in trainable(model).items()}
        for _ in range(4):
            updater.apply({n: support.keep(n, torch.randn_like(p)) for n, p in trainable(model).items()}, support)
        for n, p in trainable(model).items():
            assert torch.equal(p.detach()[~support[n]], before[n][~support[n]])
            assert not support.sizes[n] or not torch.equal(p.detach()[support[n]], before[n][support[n]])


@pytest.mark.parametrize("name", ["momentum", "decay", "adam", "adamw", "muon"])
def test_optimizer_state_is_projected_when_the_support_changes(name):
    torch.manual_seed(0)
    model = network(name)[0]
    optimizer = OPTIMIZERS[name](model.parameters())
    updater = Updater(model, optimizer)
    old, new = supports(model, 2)
    for _ in range(3):
        updater.apply({n: old.keep(n, torch.randn_like(p)) for n, p in trainable(model).items()}, old)
    optimizer.step = lambda: None  # look at the state as the new support finds it
    updater.apply({n: torch.zeros_like(p) for n, p in trainable(model).items()}, new)
    kept = old["weight"] & new["weight"]
    for value in optimizer.state[model.weight].values():
        if torch.is_tensor(value) and value.shape == model.weight.shape:
            assert not value[~kept].any() and value[kept].any()


def test_a_dense_step_is_the_optimizers_own():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    updater = Updater(ours, OPTIMIZERS["adamw"](ours.parameters()))
    optimizer = OPTIMIZERS["adamw"](theirs.parameters())
    for _ in range(5):
        gradient = {n: torch.randn_like(p) for n, p in ours.named_parameters()}
        updater.apply(gradient, Support.full(ours))
        for n, p in theirs.named_parameters():
            p.grad = gradient[n].clone()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_an_interrupt_inside_the_optimizer_leaves_inactive_coordinates_alone():
    class Interrupted(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise KeyboardInterrupt

    model = nn.Linear(4, 4)
    (support,) = supports(model, 1)
    before = model.weight.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        Updater(model, Interrupted(model.parameters(), lr=1.0, weight_decay=0.5)).apply(
            {n: torch.zeros_like(p) for n, p in trainable(model).items()}, support
        )
    assert torch.equal(model.weight.detach()[~support["weight"]], before[~support["weight"]])


def test_leftover_gradients_are_never_applied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=1.0))
    updater.apply({n: torch.zeros_like(p) for n, p in trainable(model).items()}, Support.full(model))
    assert torch.equal(model[0].weight, before)


def test_unfit_optimizers_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(Refusal, match=r"does not hold parameter 1\.weight and 1 more"):
        check_optimizer(torch.optim.SGD(model[0].parameters(), lr=1.0), model)
    with pytest.raises(Refusal, match="not the model's"):
        check_optimizer(torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=1.0), model)
    with pytest.raises(Refusal, match="LBFGS"):
        check_optimizer(torch.optim.LBFGS(model.parameters()), model)
    with pytest.raises(Refusal, match="SparseAdam"):
        check_optimizer(torch.optim.SparseAdam(list(model.parameters())), model)
    with pytest.raises(Refusal, match="must be a torch.optim.Optimizer"):
        check_optimizer("sgd", model)
    used = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    used.step()
    with pytest.raises(Refusal, match="taken steps before"):
        check_optimizer(used, model)


def test_the_average_follows_the_weights():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = WeightAverage(model, 0.5)
    expected = 0.0
    for step in range(1, 30):
        nn.init.constant_(model.weight, float(step))
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    average.write_to_model()
    assert model.weight.item() == pytest.approx(expected, rel=1e-5)
