"""The same promises on a GPU. Skipped where there is none; CI machines have none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tptopk
from tests.gradients.cases import CASES, make
from tests.gradients.test_rules import flat, random_support
from tptopk.data.digits import TRAINING, digits
from tptopk.gradients.clipping import clipped_sum
from tptopk.models.digits import digits_cnn
from tptopk.privacy.methods import METHODS
from tptopk.privacy.randomness import Streams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("density", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("tf32", [False, True])
def test_capture_equals_the_reference(name, density, tf32):
    """Whatever the ambient matmul precision: tf32 changes the gradients a little, and never what is clipped to C."""
    model, (x, y) = make(name, 1, 7)
    support = random_support(model, density)
    slow = flat(clipped_sum(model, F.cross_entropy, (x, y), support, 0.1, engine="reference"))
    model, support = model.to(CUDA), support.to(CUDA)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        fast = flat(clipped_sum(model, F.cross_entropy, (x.to(CUDA), y.to(CUDA)), support, 0.1)).cpu()
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    assert (fast - slow).norm() <= (2e-2 if tf32 else 2e-5) * slow.norm() + 1e-6


@pytest.mark.parametrize("tf32", [False, True])
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(tf32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).to(CUDA)
    x, y = 10 * torch.randn(513, 64, device=CUDA), torch.randint(0, 10, (513,), device=CUDA)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        for density in (0.1, 1.0):
            support = random_support(model.cpu(), density).to(CUDA)
            model.to(CUDA)
            sums = [
                flat(clipped_sum(model, F.cross_entropy, (x[:n], y[:n]), support, 0.1)).double() for n in (512, 513)
            ]
            assert (sums[1] - sums[0]).norm() <= 0.1 * (1 + (2e-3 if tf32 else 1e-5))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_noise_on_the_device_is_standard_normal_and_never_repeats():
    """A million draws: mean and variance within 4.9 standard errors, once in a million runs each beyond."""
    streams = Streams("r")
    draws = streams.normal(1_000_000, CUDA, "noise", 0, 0, "w").double()
    assert draws.device.type == "cuda"
    assert abs(draws.mean()) < 4.9e-3 and abs(draws.var() - 1) < 4.9 * math.sqrt(2 / 1_000_000)
    places = [streams.normal(1000, CUDA, "noise", p, s, n) for p in range(2) for s in range(20) for n in ("w", "b")]
    correlation = torch.corrcoef(torch.stack(places)).fill_diagonal_(0)
    assert correlation.abs().max() < 6.5 / math.sqrt(1000)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_every_method_learns(method, precision):
    train_set, test_set = digits()
    plan = tptopk.Plan.calibrate(
        method, epsilon=8.0, delta=1e-5, batch_size=256, dataset_size=TRAINING, epochs=30, accountant="rdp"
    )
    model = digits_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    run = tptopk.fit(
        model, train_set, plan, optimizer, loss=F.cross_entropy, test_set=test_set, device="cuda", precision=precision
    )
    assert run.test["accuracy"] > 0.85 and next(model.parameters()).is_cuda
    if METHODS[method].private:
        assert run.engine == "capture" and run.epsilon <= 8.0
