"""A module that keeps what it was run on is no longer trained."""

from __future__ import annotations

import pytest
from torch.nn import functional as F

from tests.gradients.cases import LateMean
from tests.integrations.loops import network, private, train
from tptopk.gradients.traces import ModelChanged


@pytest.mark.parametrize("written", ["data", "copy_"])
def test_a_module_that_keeps_what_it_was_run_on_stops_the_training_for_good(tmp_path, written):
    engine, model, optimizer, loader = private(model=LateMean(network(), written))
    train(model, optimizer, loader, steps=1)
    model.armed = True
    with pytest.raises(ModelChanged, match="was changed while it was run on the batch"):
        train(model, optimizer, loader, steps=1)
    for further in (
        lambda: train(model, optimizer, loader, steps=1),
        lambda: engine.statement(1e-5),
        lambda: engine.save_checkpoint(path=tmp_path / "kept", module=model, optimizer=optimizer),
    ):
        with pytest.raises(ModelChanged):
            further()


def test_a_module_that_keeps_what_it_was_run_on_is_found_without_a_step():
    _, model, optimizer, loader = private(model=LateMean(network(), "data"))
    train(model, optimizer, loader, steps=1)
    model.armed = True
    with pytest.raises(ModelChanged):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
