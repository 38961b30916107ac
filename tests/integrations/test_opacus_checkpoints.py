"""The Opacus-shaped engine: checkpoints, what they keep and what they refuse."""

from __future__ import annotations

import json

import pytest
import torch

from tests.integrations.loops import network, private, sgd, train, weights
from tptopk.integrations.opacus import PrivacyEngine
from tptopk.privacy.ledger import BudgetSpent
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.training.checkpoint import load_checkpoint, save_checkpoint


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk"])
def test_a_checkpoint_keeps_charges_noise_and_support(method, tmp_path):
    options = {"method": method, "target_epsilon": 3.0, "target_delta": 1e-4, "epochs": 3}
    model = network()
    engine, model, optimizer, loader = private(model=model, optimizer=sgd(model, momentum=0.9), **options)
    train(model, optimizer, loader)
    train(model, optimizer, loader, steps=1)
    engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1})
    saved, support = weights(model), optimizer._private_steps.policy.current
    momentum = [s["momentum_buffer"].clone() for s in optimizer.original_optimizer.state.values()]

    other = network()
    second, other, its, fresh = private(model=other, optimizer=sgd(other, momentum=0.9), **options)
    assert second.load_checkpoint(path=tmp_path / "c.pt", module=other, optimizer=its) == {"epoch": 1}
    assert torch.equal(weights(other), saved) and other.training
    assert second.accountant.history == engine.accountant.history
    assert its.noise_multiplier == optimizer.noise_multiplier
    assert its._private_steps.policy.current == support
    kept = [s["momentum_buffer"] for s in its.original_optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, momentum, strict=True))
    train(other, its, fresh, steps=5)
    train(other, its, fresh)
    assert 3.0 * 0.998 <= second.get_epsilon(1e-4) <= 3.0
    with pytest.raises(BudgetSpent):
        train(other, its, fresh, steps=1)
    if method == "tp-topk":
        active = torch.cat([m.flatten() for m in support.masks.values()])
        assert torch.equal(weights(other)[~active], saved[~active])


def test_going_back_to_a_checkpoint_takes_no_charge_back_and_repeats_no_noise(tmp_path, monkeypatch):
    drawn, normal = [], Streams.normal

    def listened(self, *place):
        drawn.append(normal(self, *place))
        return drawn[-1].clone()

    monkeypatch.setattr(Streams, "normal", listened)
    engine, model, optimizer, loader = private(target_epsilon=3.0, target_delta=1e-4, epochs=2)
    train(model, optimizer, loader, steps=2)
    engine.save_checkpoint(path=tmp_path, module=model, optimizer=optimizer)
    train(model, optimizer, loader, steps=3)
    engine.load_checkpoint(path=tmp_path, module=model, optimizer=optimizer)
    assert len(engine.accountant) == 5
    train(model, optimizer, loader, steps=3)
    assert len(engine.accountant) == 8
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    with pytest.raises(BudgetSpent):  # the three lost steps are not to be had again
        for _ in range(2):
            train(model, optimizer, loader)
    assert engine.get_epsilon(1e-4) <= 3.0 and len(engine.accountant) == 12


def test_another_trainings_charges_are_added(tmp_path):
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path, module=model)
    second, other, its, fresh = private()
    train(other, its, fresh, steps=2)
    second.load_checkpoint(path=tmp_path, module=other)
    assert len(second.accountant) == 6 + 2


def test_charges_of_processes_that_load_each_others_checkpoints_are_all_counted_and_once(tmp_path):
    a, model, optimizer, loader = private()
    b, other, its, fresh = private()
    train(model, optimizer, loader, steps=2)
    a.save_checkpoint(path=tmp_path / "A", module=model)
    train(model, optimizer, loader, steps=4)
    b.load_checkpoint(path=tmp_path / "A", module=other)
    train(other, its, fresh, steps=5)
    b.save_checkpoint(path=tmp_path / "B", module=other)
    a.load_checkpoint(path=tmp_path / "B", module=model)
    assert len(b.accountant) == 2 + 5 and len(a.accountant) == 2 + 4 + 5
    train(model, optimizer, loader, steps=1)
    for _ in range(2):  # whatever it loads, and however often
        for path in ("A", "B"):
            a.load_checkpoint(path=tmp_path / path, module=model)
            assert len(a.accountant) == 2 + 4 + 5 + 1
    a.save_checkpoint(path=tmp_path / "C", module=model)
    b.load_checkpoint(path=tmp_path / "C", module=other)
    assert len(b.accountant) == 2 + 4 + 5 + 1


def test_a_checkpoint_of_before_charges_were_kept_apart_is_added_to_what_is_known(tmp_path):
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader, steps=2)
    engine.save_checkpoint(path=tmp_path, module=model)
    found = load_checkpoint(tmp_path)
    counts = {"run": found.values["counts"]["run"], "taken": {"0": 2}, "charged": {"0": 3}}
    save_checkpoint(
        tmp_path,
        {part: found.part(part) for part in ("model", "optimizer", "policy")},
        {**found.values, "counts": counts},
    )
    other, another, _, _ = private()
    other.load_checkpoint(path=tmp_path, module=another)
    assert len(other.accountant) == 3
    engine.load_checkpoint(path=tmp_path, module=model)
    assert len(engine.accountant) == 2 + 3


def test_a_statement_after_a_checkpoint_says_what_is_not_counted(tmp_path):
    """A process that died after its last checkpoint took its charges with it, and may have released models."""
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader, steps=2)
    once = engine.statement()
    assert "resumed" not in once and "are not counted" not in once and "chosen supports." in once
    for attempt in (2, 3):
        engine.save_checkpoint(path=tmp_path / str(attempt), module=model)
        train(model, optimizer, loader, steps=2)  # and dies
        engine, model, optimizer, loader = private()
        engine.load_checkpoint(path=tmp_path / str(attempt), module=model)
        train(model, optimizer, loader, steps=1)
        text = engine.statement()
        assert f"resumed {attempt - 1} time(s)" in text and f"Begun, {attempt} attempts: 2" in text
        assert (
            f"not on record of the {attempt} attempts" in text
            and "died after its last checkpoint are not counted" in text
        )
        assert "up to the checkpoint that was gone on from" in text
    for attempt in (4, 5):  # the same process goes back to a checkpoint, twice
        engine.load_checkpoint(path=tmp_path / "3", module=model)
        assert f"not on record of the {attempt} attempts" in engine.statement()
    found = load_checkpoint(tmp_path / "2")
    of_before = {name: value for name, value in found.values.items() if name != "begun"}  # when it was not kept
    save_checkpoint(tmp_path / "2", {part: found.part(part) for part in ("model", "optimizer", "policy")}, of_before)
    engine, model, _, _ = private()
    engine.load_checkpoint(path=tmp_path / "2", module=model)
    assert "Begun, 2 attempts: not on record, 2" in engine.statement()


def test_noise_of_two_generators_is_not_stated_as_of_the_better(tmp_path):
    said = []
    for number, secure in enumerate((True, True, False, True)):
        engine, model, optimizer, loader = private(PrivacyEngine(accountant="rdp", secure_mode=secure))
        if number:
            engine.load_checkpoint(path=tmp_path, module=model)
        train(model, optimizer, loader, steps=1)
        engine.save_checkpoint(path=tmp_path, module=model)
        said.append("ChaCha20" in engine.statement())
    assert said == [True, True, False, False]


def test_a_checkpoint_holds_no_secret_and_nothing_pickled(tmp_path):
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path, module=model, optimizer=optimizer)
    secret = optimizer._private_steps._streams._secret
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        assert secret not in content and secret.hex().encode() not in content and not content.startswith(b"PK")
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    engine, model, optimizer, loader = private()
    with pytest.raises(Refusal, match="holds no checkpoint"):
        engine.load_checkpoint(path=tmp_path / "none", module=model)
    train(model, optimizer, loader, steps=1)
    engine.save_checkpoint(path=tmp_path / "a", module=model)
    with pytest.raises(Refusal, match="without an optimizer"):
        engine.load_checkpoint(path=tmp_path / "a", module=model, optimizer=optimizer)
    other, another, its, _ = private(noise_multiplier=0.9)
    with pytest.raises(Refusal, match="its noise_multiplier is 1, here 0.9"):
        other.load_checkpoint(path=tmp_path / "a", module=another)
    with pytest.raises(Refusal, match="not the one that this engine"):
        engine.save_checkpoint(path=tmp_path / "b", module=another)
    with pytest.raises(Refusal, match="make_private returned"):
        engine.save_checkpoint(path=tmp_path / "b", module=model, optimizer=its)
    with pytest.raises(Refusal, match="call make_private first"):
        PrivacyEngine().save_checkpoint(path=tmp_path / "b", module=model)
    with pytest.raises(Refusal, match="no keywords for torch"):
        engine.save_checkpoint(path=tmp_path / "b", module=model, torch_save_kwargs={})
    with pytest.raises(Refusal, match="cannot hold"):
        engine.save_checkpoint(path=tmp_path / "b", module=model, checkpoint_dict={"x": object()})
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refusal, match="is a file"):
        engine.save_checkpoint(path=tmp_path / "file", module=model)
    index = json.loads((tmp_path / "a" / "checkpoint.json").read_text())
    (tmp_path / "a" / index["current"]["file"]).write_bytes(b"junk")
    with pytest.raises(Refusal, match="no checkpoint in"):
        engine.load_checkpoint(path=tmp_path / "a", module=model)
