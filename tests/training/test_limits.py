"""What bounds memory and changes speed leaves the update as it is."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from tptopk import Plan, fit
from tptopk.data.digits import TRAINING, digits
from tptopk.models.digits import digits_cnn
from tptopk.privacy.refusal import Refusal


@pytest.mark.parametrize(("wrong", "message"), [
    ({"memory_limit": "4 gigs"}, "number of bytes"), ({"memory_limit": 100}, "one example of this model takes"),
    ({"precision": "fp16"}, "unknown precision"),
])  # fmt: skip
def test_bad_limits_and_precisions_are_refused_before_anything_is_charged(wrong, message, tmp_path):
    train_set, _ = digits()
    plan = Plan.calibrate(
        "dp-sgd", epsilon=3.0, delta=1e-5, batch_size=64, dataset_size=TRAINING, steps=3, accountant="rdp"
    )
    model = digits_cnn()
    with pytest.raises(Refusal, match=message):
        fit(
            model,
            train_set,
            plan,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=F.cross_entropy,
            out=tmp_path / "r",
            **wrong,
        )
    assert not (tmp_path / "r").exists()


def test_a_memory_limit_and_compiling_change_memory_and_time_and_not_the_update(monkeypatch):
    monkeypatch.setattr("tptopk.gradients.graphs._traced", lambda program, r: make_fx(program)(r.leaves, r.real))
    train_set, _ = digits()
    plan = Plan.calibrate(
        "tp-topk", epsilon=3.0, delta=1e-5, batch_size=64, dataset_size=TRAINING, steps=6, accountant="rdp"
    )
    weights = []
    for options in ({}, {"memory_limit": "2MiB"}, {"compile": True}):
        torch.manual_seed(0)
        model = digits_cnn()
        fit(
            model, train_set, plan, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, seed=1, **options
        )
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights[2], weights[0], rtol=1e-4, atol=1e-6)
