"""On one batch, without noise, dp-sgd is what Opacus computes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.gradients.cases import Transformer, ids, normal
from tptopk.gradients.clipping import clipped_sum
from tptopk.supports.support import Support

opacus = pytest.importorskip("opacus")

MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3)), normal(20)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.Flatten(),
            nn.Linear(72, 3),
        ),
        normal(3, 8, 8),
    ),
    "transformer": (Transformer, ids(7)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
def test_the_clipped_sum_is_opacuss(name, clip_norm):
    torch.manual_seed(1)
    build, inputs = MODELS[name]
    model = build()
    x, y = inputs(16), torch.randint(0, 3, (16,))
    ours = clipped_sum(model, F.cross_entropy, (x, y), Support.full(model), clip_norm).values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
        optimizer = opacus.optimizers.DPOptimizer(
            torch.optim.SGD(theirs.parameters(), lr=1.0),
            noise_multiplier=0.0,
            max_grad_norm=clip_norm,
            expected_batch_size=16,
            loss_reduction="sum",
        )
        F.cross_entropy(theirs(x), y, reduction="sum").backward()
        optimizer.clip_and_accumulate()
    summed = {n.removeprefix("_module."): p.summed_grad for n, p in theirs.named_parameters()}
    error = torch.stack([(ours[n] - summed[n]).norm() for n in ours]).norm()
    scale = torch.stack([v.norm() for v in summed.values()]).norm()
    assert error <= 1e-5 * scale
