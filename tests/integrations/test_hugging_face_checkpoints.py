"""Hugging Face's Trainer, made private: what survives a crash."""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainerCallback

from tests.integrations.trainers import network, private, weights
from tptopk.gradients.traces import ModelChanged
from tptopk.integrations.hugging_face import loader
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.training.facts import facts_in
from tptopk.training.sampling import PoissonSampler
from tptopk.training.trained import TRAINED
from tptopk.training.verify import verify


class Crash(TrainerCallback):
    """Ends the training after a step, once a checkpoint of that step would have been written."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == self._step:
            raise KeyboardInterrupt


SAVING = {"save_strategy": "steps", "optim": "adamw_torch", "learning_rate": 0.02, "lr_scheduler_type": "linear"}


@pytest.mark.parametrize("how", ["logged", "measured afterwards"])
def test_a_loss_that_the_first_attempt_showed_is_in_the_statement_of_the_second(how, tmp_path):
    saving, privacy = {**SAVING, "save_steps": 2, "max_steps": 4}, tmp_path / "privacy"

    class Copy(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            shutil.copytree(privacy, tmp_path / f"killed at {state.global_step}")  # what a kill would leave

    with pytest.warns(PrivacyWarning), pytest.raises(KeyboardInterrupt):
        first = private(tmp_path, args=saving, callbacks=[Crash(2), Copy()], log_training_loss=how == "logged")
        try:
            first.train()
        finally:
            first.evaluate(first.train_dataset) if how != "logged" else None
    killed = tmp_path / "killed at 1"
    assert facts_in(killed, read_ledger(killed / "ledger.jsonl")).training_loss == (how == "logged")
    second = private(tmp_path, args=saving, secure_noise=True)
    second.train(resume_from_checkpoint=True)
    text = second.run.statement()
    assert "showed its training loss" in text and "Philox streams" in text and second.run.facts.attempts == 2
    assert verify(privacy).holds
    (privacy / "run.json").unlink()  # the ledger alone says so
    facts = facts_in(privacy, read_ledger(privacy / "ledger.jsonl"))
    assert facts.training_loss and facts.generator == "philox"


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")  # of steps that the budget does not pay
def test_a_run_is_resumed_again_and_again_after_its_warm_up(tmp_path):
    saving, going_on = {**SAVING, "save_steps": 1, "max_steps": 12}, None
    for at in (6, 8, 10):
        with pytest.raises(KeyboardInterrupt):
            private(tmp_path, method="tp-topk", args=saving, callbacks=[Crash(at)]).train(
                resume_from_checkpoint=going_on
            )
        going_on = True
    last = private(tmp_path, method="tp-topk", args=saving)
    last.train(resume_from_checkpoint=True)
    assert last.run.status == "finished" and last.run.facts.attempts == 4 and verify(tmp_path / "privacy").holds


@pytest.mark.slow
@pytest.mark.parametrize(("method", "at"), [("tp-topk", 2), ("tp-topk", 6), ("on-topk", 6)])
def test_a_resumed_run_is_the_uninterrupted_one_if_randomness_is(method, at, tmp_path, monkeypatch):
    """Samples, supports, optimizer and schedule go on exactly; randomness, fresh for each attempt, is made repeatable for this."""
    monkeypatch.setattr(loader, "Streams", lambda run, secure: Streams("", seed=3))
    whole = private(tmp_path / "whole", method=method, args=SAVING)
    whole.train()
    saving = {**SAVING, "save_steps": at}
    broken = private(tmp_path / "broken", method=method, args=saving, callbacks=[Crash(at)])
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    assert broken.run.status == "interrupted" and sum(broken.run.facts.charged_steps) == at
    resumed = private(tmp_path / "broken", method=method, args=saving)
    output = resumed.train(resume_from_checkpoint=True)
    assert output.global_step == 12 and resumed.epsilon == whole.epsilon
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.run.support == whole.run.support
    assert [record.step for record in resumed.run.history] == list(range(1, 13))
    assert verify(tmp_path / "broken" / "privacy").holds


def test_a_crash_loses_no_charge_and_no_noise_or_sample_is_drawn_again(tmp_path, monkeypatch):
    noise, samples = [], []
    normal, sample = Streams.normal, PoissonSampler.sample

    def noisy(self, shape, device, *place):
        noise.append(normal(self, shape, device, *place))
        return noise[-1].clone()  # the mechanism writes into it

    def drawn(self, phase, step, rate):
        samples.append((step, tuple(sample(self, phase, step, rate).tolist())))
        return torch.tensor(samples[-1][1], dtype=torch.long)

    monkeypatch.setattr(Streams, "normal", noisy)
    monkeypatch.setattr(PoissonSampler, "sample", drawn)
    saving = {**SAVING, "save_steps": 5}
    with pytest.raises(KeyboardInterrupt):
        private(tmp_path, args=saving, callbacks=[Crash(8)]).train()
    first = dict(samples)
    resumed = private(tmp_path, args=saving)
    with pytest.warns(PrivacyWarning, match="the last 3 of 12 steps were dropped"):
        output = resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert output.global_step == 9 and resumed.run.status == "finished"
    assert resumed.run.facts.charged_steps == [12] and resumed.run.facts.taken_steps == [9]
    assert resumed.epsilon == resumed.plan.epsilon() <= 8.0
    assert len(noise) == 12 and len({tuple(z.tolist()) for z in noise}) == 12
    again = dict(samples[len(first) :])
    assert any(again[n] != first[n] for n in again if n in first)  # ten of forty twice alike: once in 1e9 runs
    assert verify(tmp_path / "privacy").holds and "3 steps were charged and lost" in resumed.run.statement()


def test_a_model_that_another_part_of_the_library_trained_is_refused(tmp_path):
    model = network()
    TRAINED.add(model)  # as fit and PrivacyEngine do
    with pytest.raises(Refusal, match="its weights carry that run's cost"):
        private(tmp_path, model).train()
    part_of = network()
    TRAINED.add(part_of.bert)
    with pytest.raises(Refusal, match="its weights carry that run's cost"):
        private(tmp_path, part_of).train()
    own = private(tmp_path, args={"max_steps": 1})
    own.train()
    assert own.model in TRAINED


def test_a_notebook_goes_on_with_the_same_trainer(tmp_path, monkeypatch):
    noise, normal = [], Streams.normal

    def noisy(self, shape, device, *place):
        noise.append(normal(self, shape, device, *place))
        return noise[-1].clone()  # the mechanism writes into it

    monkeypatch.setattr(Streams, "normal", noisy)
    crash = Crash(7)
    trainer = private(tmp_path, args={**SAVING, "save_steps": 5}, callbacks=[crash])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(Refusal, match="this model was trained before"):
        trainer.train()
    crash._step = -1
    with pytest.warns(PrivacyWarning, match="dropped"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.run.facts.charged_steps == [12] and len({tuple(z.tolist()) for z in noise}) == 12


def test_what_is_not_this_runs_checkpoint_is_refused_and_charges_nothing(tmp_path):
    saving = {**SAVING, "save_steps": 5}
    with pytest.raises(Refusal, match="no checkpoint to resume from"):
        private(tmp_path, args=saving).train(resume_from_checkpoint=True)
    with pytest.raises(KeyboardInterrupt):
        private(tmp_path, args=saving, callbacks=[Crash(6)]).train()
    ledger = tmp_path / "privacy" / "ledger.jsonl"
    before = ledger.read_bytes()
    for given, words in (({"target_epsilon": 9.0}, "another plan"), ({"clip_norm": 0.5}, "another plan")):
        with pytest.raises(Refusal, match=words):
            private(tmp_path, args=saving, **given).train(resume_from_checkpoint=True)
    with pytest.raises(Refusal, match="already holds a run"):
        private(tmp_path, args=saving).train()
    state = tmp_path / "checkpoint-5" / "trainer_state.json"
    written = state.read_text()
    state.write_text(written.replace('"global_step": 5', '"global_step": 4'))
    with pytest.raises(Refusal, match="stands at step 4 and its privacy state at step 5"):
        private(tmp_path, args=saving).train(resume_from_checkpoint=True)
    state.write_text(written)
    (tmp_path / "checkpoint-5" / "privacy" / "checkpoint.json").rename(tmp_path / "checkpoint.json")
    with pytest.raises(Refusal, match="no privacy state"):
        private(tmp_path, args=saving).train(resume_from_checkpoint=True)
    assert ledger.read_bytes() == before
    (tmp_path / "checkpoint.json").rename(tmp_path / "checkpoint-5" / "privacy" / "checkpoint.json")
    with pytest.warns(PrivacyWarning, match="dropped"):
        private(tmp_path, args=saving).train(resume_from_checkpoint=True)
    with pytest.raises(Refusal, match="finished"):
        private(tmp_path, args=saving).train(resume_from_checkpoint=True)


def test_a_model_that_keeps_what_it_was_run_on_is_not_saved(tmp_path):
    model, armed = network(), []
    model.register_buffer("seen", torch.zeros(()))
    model.register_forward_pre_hook(lambda *_: model.seen.data.add_(1) if armed else None)

    class Arm(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            armed.append(state.global_step)

    with pytest.raises(ModelChanged, match="must not be saved or released"):
        private(tmp_path, model, callbacks=[Arm()]).train()
    assert armed == [1] and not (tmp_path / "privacy" / "model.safetensors").exists()
    assert read_ledger(tmp_path / "privacy" / "ledger.jsonl").end is None
