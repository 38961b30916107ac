"""Hugging Face's Trainer, made private: what a step is, what it costs, what is shown, and what survives a crash."""

from __future__ import annotations

import copy
import importlib
import json
import math
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tptopk.integrations.hugging_face import PrivateTrainer, loader, losses
from tptopk.integrations.hugging_face.refusals import ARGUMENTS
from tptopk.privacy import accounting
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.plan import Phase, Plan, PrivacyWarning
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.training.sampling import PoissonSampler
from tptopk.training.trained import TRAINED
from tptopk.training.verify import facts_in, verify

N, BATCH, LENGTH, WORDS, RATE = 40, 10, 6, 24, 0.5
SIZES = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
         "max_position_embeddings": LENGTH, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip

transformers.logging.set_verbosity_error()


def records(kind: str = "class", count: int = N) -> list[dict[str, torch.Tensor]]:
    """Texts of different lengths, padded to one: a class for each, for each of its words, or its next words to foretell."""
    generator, found = torch.Generator().manual_seed(1), []
    for i in range(count):
        ids = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < 2 + i % (LENGTH - 1)).long()
        target = {
            "class": torch.tensor(i % 2),
            "words": torch.where(mask == 1, ids % 3, -100),
            "next": torch.where(mask == 1, ids, -100),
        }
        found.append({"input_ids": ids * mask, "attention_mask": mask, "labels": target[kind]})
    return found


def network(kind: str = "class") -> nn.Module:
    torch.manual_seed(0)
    if kind == "next":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                       attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
        )  # fmt: skip
    if kind == "words":
        return BertForTokenClassification(BertConfig(num_labels=3, **SIZES))
    return BertForSequenceClassification(BertConfig(**SIZES))


def private(folder: Path, model: nn.Module | None = None, kind: str = "class", **given) -> PrivateTrainer:
    """A trainer of four steps an epoch, with arguments of `TrainingArguments` in `args`."""
    args = {"per_device_train_batch_size": BATCH, "max_steps": 12, "save_strategy": "no", "optim": "sgd", "learning_rate": RATE,
            "lr_scheduler_type": "constant", "use_cpu": True, "disable_tqdm": True, **given.pop("args", {})}  # fmt: skip
    keywords = {"target_epsilon": 8.0, "target_delta": 1e-3, "dataset_size": N, "accountant": "rdp", "micro_batch_size": 64,
                "train_dataset": records(kind), **given}  # fmt: skip
    return PrivateTrainer(model or network(kind), TrainingArguments(str(folder), **args), **keywords)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


@pytest.fixture
def no_noise(monkeypatch):
    monkeypatch.setattr(Streams, "normal", lambda self, shape, device, *place: torch.zeros(shape, device=device))


def with_sample(monkeypatch, *chosen: int) -> None:
    monkeypatch.setattr(
        PoissonSampler, "sample", lambda self, phase, step, rate: torch.tensor(chosen, dtype=torch.long)
    )


def own_clipped_sum(model: nn.Module, chosen: list[dict[str, torch.Tensor]], clip_norm: float) -> list[torch.Tensor]:
    """What the model itself says of each record alone, differentiated by plain autograd, clipped and added up."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for record in chosen:
        loss = model(**{name: value[None] for name, value in record.items()}).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for sum_, g in zip(total, gradients, strict=True):
            sum_ += g * min(1.0, clip_norm / float(norm))
    return total


# A step.


@pytest.mark.parametrize(
    ("kind", "engine", "micro_batch_size"),
    [("class", "capture", 64), ("class", "capture", 2), ("words", "capture", 64), ("next", "vmap", 3)],
)
def test_a_step_without_noise_is_the_reference_clipped_sum(
    kind, engine, micro_batch_size, tmp_path, monkeypatch, no_noise
):
    chosen, clip_norm = [0, 3, 4, 11, 17], 0.9
    with_sample(monkeypatch, *chosen)
    model = network(kind)
    before = copy.deepcopy(model)
    trainer = private(
        tmp_path, model, kind, clip_norm=clip_norm, micro_batch_size=micro_batch_size, args={"max_steps": 1}
    )
    trainer.train()
    assert trainer.run.engine == engine
    total = own_clipped_sum(before, [records(kind)[i] for i in chosen], clip_norm)
    expected = torch.cat([(p - RATE * g / BATCH).flatten() for p, g in zip(before.parameters(), total, strict=True)])
    assert torch.allclose(weights(model), expected, atol=1e-6)
    assert float((weights(model) - weights(before)).norm()) > 1e-3


@pytest.mark.parametrize(("kind", "bad"), [("class", 999), ("words", -100)])
def test_one_record_moves_a_step_by_no_more_than_the_clip(kind, bad, tmp_path, monkeypatch, no_noise):
    """Whatever it is: long, with a label that is no class, or without any target."""
    data = records(kind)
    data[7] = {**data[7], "labels": torch.full_like(data[7]["labels"], bad)}
    moved = {}
    for extra in ([], [4], [7]):
        with_sample(monkeypatch, 1, 2, *extra)
        model = network(kind)
        private(tmp_path / f"{extra}", model, kind, clip_norm=0.05, train_dataset=data, args={"max_steps": 1}).train()
        moved[tuple(extra)] = weights(model)
    assert float((moved[(4,)] - moved[()]).norm()) == pytest.approx(RATE * 0.05 / BATCH, rel=1e-3)
    assert torch.equal(moved[(7,)], moved[()])


def test_a_sample_without_records_is_a_charged_noisy_step(tmp_path, monkeypatch):
    with_sample(monkeypatch)
    model = network()
    before = weights(model)
    trainer = private(tmp_path, model, args={"max_steps": 2})
    trainer.train()
    noise = (weights(model) - before).double()
    plan = trainer.plan
    expected = 2 * (RATE * plan.noise_std(plan.phases[0])) ** 2
    assert read_ledger(tmp_path / "privacy" / "ledger.jsonl").charged == {0: 2}
    # of 1,000 draws, within 6 standard errors: a false alarm once in 1e8 runs
    assert abs(float(noise.square().mean()) / expected - 1) < 6 * math.sqrt(2 / len(noise))


def test_the_chosen_coordinates_alone_move_after_the_warm_up(tmp_path):
    model, seen = network(), []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            seen.append(weights(model))

    arguments = {"optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 0.01}
    trainer = private(
        tmp_path, model, method="tp-topk", active_ratio=0.25, warmup=0.5, args=arguments, callbacks=[Look()]
    )
    trainer.train()
    assert int((seen[-1] != seen[5]).sum()) == math.floor(0.25 * len(seen[0])) == trainer.run.support.size
    assert bool((seen[5] != seen[4]).all())
    assert (tmp_path / "privacy" / "warmup.safetensors").exists()  # `tptopk advise` reads it


# The loss.


@pytest.mark.parametrize(
    ("model", "reading", "labels"),
    [
        (BertForSequenceClassification(BertConfig(**SIZES)), "class_of_each", torch.tensor([1])),
        (BertForSequenceClassification(BertConfig(num_labels=1, **SIZES)), "squares", torch.tensor([0.3])),
        (BertForSequenceClassification(BertConfig(num_labels=3, **SIZES)), "yes_or_no", torch.tensor([[0.0, 1.0, 1.0]])),
        (BertForMaskedLM(BertConfig(**SIZES)), "class_of_each", torch.zeros(1, LENGTH, dtype=torch.long)),
        (network("next"), "next_token", torch.zeros(1, LENGTH, dtype=torch.long)),
    ],
)  # fmt: skip
def test_the_models_own_loss_is_recognised_by_what_it_says_of_one_example(model, reading, labels):
    ids = torch.randint(1, WORDS, (1, LENGTH))
    found = losses.own_losses(
        model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}, ["labels"]
    )
    assert found[0]._reading.__name__ == reading


def test_where_an_answer_begins_and_ends_is_a_loss_too():
    model = transformers.BertForQuestionAnswering(BertConfig(**SIZES))
    ids, place = torch.randint(1, WORDS, (1, LENGTH)), torch.tensor([2])
    one = {"input_ids": ids, "start_positions": place, "end_positions": place}
    found = losses.own_losses(model, one, ["start_positions", "end_positions"])
    assert found[0]._reading is losses.first_and_last


def test_a_model_whose_own_loss_is_of_another_kind_is_refused(tmp_path):
    class Margin(BertForSequenceClassification):
        def forward(self, input_ids=None, labels=None, position_ids=None):
            output = super().forward(input_ids, position_ids=position_ids)
            output.loss = output.logits.square().sum() if labels is not None else None
            return output

    with pytest.raises(Refusal, match="give loss="):
        private(tmp_path, Margin(BertConfig(**SIZES))).train()
    assert not (tmp_path / "privacy").exists()


def test_a_loss_of_your_own_is_trained_by(tmp_path, monkeypatch, no_noise):
    def loss(model, batch):
        positions = torch.arange(LENGTH).expand_as(batch["input_ids"])
        logits = model(input_ids=batch["input_ids"], position_ids=positions).logits
        return (logits[:, 0] - 3.0).square()

    with_sample(monkeypatch, *range(10))
    model = network()
    texts = {"input_ids": torch.stack([record["input_ids"] for record in records()])}
    before = loss(model, texts).mean().item()
    private(tmp_path, model, loss=loss, clip_norm=10.0, args={"learning_rate": 0.1}).train()
    assert loss(model, texts).mean().item() < 0.5 * before


def test_losses_of_a_whole_batch_are_refused(tmp_path):
    class Own(PrivateTrainer):
        def compute_loss(self, model, inputs, **others):
            return super().compute_loss(model, inputs, **others)

    with pytest.raises(Refusal, match="compute_loss_func gives one loss a batch"):
        private(tmp_path, compute_loss_func=lambda outputs, labels, **others: outputs.logits.mean())
    with pytest.raises(Refusal, match="compute_loss gives one loss a batch"):
        Own(network(), TrainingArguments(str(tmp_path)), target_epsilon=1.0, target_delta=1e-3, train_dataset=records())
    with pytest.raises(Refusal, match="depends on the other examples"):
        private(tmp_path, loss=lambda model, batch: _normalised(model, batch)).train()


def _normalised(model, batch):
    positions = torch.arange(LENGTH).expand_as(batch["input_ids"])
    logits = model(input_ids=batch["input_ids"], position_ids=positions).logits[:, 0]
    return (logits - logits.mean()).square()


def test_padding_to_the_longest_of_a_batch_is_refused_where_it_changes_a_loss(tmp_path):
    lists = [{"input_ids": r["input_ids"][: 2 + i % 3].tolist(), "labels": i % 2} for i, r in enumerate(records())]

    def pad(batch):
        length = max(len(r["input_ids"]) for r in batch)
        ids = torch.tensor([r["input_ids"] + [0] * (length - len(r["input_ids"])) for r in batch])
        return {"input_ids": ids, "labels": torch.tensor([r["labels"] for r in batch])}

    with pytest.raises(Refusal, match="padded to the longest"):
        private(tmp_path, train_dataset=lists, data_collator=pad).train()


# What is shown.


def figures(folder: Path, trainer: Trainer, output) -> str:
    """Every name of a number that training left anywhere."""
    states = [json.loads(path.read_text()) for path in folder.glob("checkpoint-*/trainer_state.json")]
    logs = [entry for state in states for entry in state["log_history"]] + trainer.state.log_history
    return " ".join(name for entry in [*logs, output.metrics] for name in entry if not name.startswith("eval_"))


def test_no_training_loss_is_computed_logged_saved_or_returned(tmp_path, capsys, monkeypatch):
    shown = []

    class Look(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            shown.append(dict(logs))

    arguments = {
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 6,
    }
    trainer = private(tmp_path, callbacks=[Look()], eval_dataset=records(), args=arguments)
    monkeypatch.setattr(trainer, "compute_loss", Trainer.compute_loss.__get__(trainer))
    output = trainer.train()
    for name in ("loss", "grad_norm", "train_loss"):
        assert name not in figures(tmp_path, trainer, output).split()
        assert not any(name in logs for logs in shown)
    assert math.isnan(output.training_loss) and trainer.state.total_flos == 0 == trainer.state.num_input_tokens_seen
    assert "learning_rate" in figures(tmp_path, trainer, output).split() and any("eval_loss" in logs for logs in shown)
    assert "'loss'" not in capsys.readouterr().out
    assert trainer._total_loss_scalar == 0.0  # what Trainer itself saw
    assert output.metrics["epsilon"] == trainer.epsilon
    assert "This library shows none" in trainer.run.statement() and "metrics on the test set" in trainer.run.statement()


def test_the_training_loss_is_shown_to_who_asks_and_the_statement_says_so(tmp_path):
    with pytest.warns(PrivacyWarning, match="does not cover it"):
        trainer = private(tmp_path, log_training_loss=True, args={"logging_steps": 1, "max_steps": 3})
    output = trainer.train()
    shown = figures(tmp_path, trainer, output).split()
    assert shown.count("loss") == 3 and "grad_norm" not in shown and output.training_loss > 0
    assert "This run showed its training loss" in trainer.run.statement()
    assert verify(tmp_path / "privacy").holds


def test_the_train_dataset_is_refused_as_one_to_evaluate_on(tmp_path):
    """`load_best_model_at_end` would choose the released model by losses of private records."""
    same = records()
    for others in (same, {"other": records(), "own": same}):
        with pytest.raises(Refusal, match="eval_dataset is the train_dataset"):
            private(tmp_path, train_dataset=same, eval_dataset=others)
    trainer = private(tmp_path, train_dataset=same, eval_dataset=records())
    trainer.eval_dataset = same
    with pytest.raises(Refusal, match="eval_dataset is the train_dataset"):
        trainer.train()
    assert not list(tmp_path.rglob("ledger.jsonl"))


@pytest.mark.parametrize(
    "measure",
    [
        lambda trainer: trainer.evaluate(trainer.train_dataset),
        lambda trainer: trainer.evaluate({"own": trainer.train_dataset}),
        lambda trainer: trainer.predict(trainer.train_dataset),
    ],
    ids=["evaluate", "among several", "predict"],
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_measuring_the_train_dataset_warns_and_the_statement_says_so(measure, after, tmp_path):
    trainer = private(tmp_path, args={"max_steps": 2})
    if after:
        trainer.train()
        assert "showed its training loss" not in trainer.run.statement()
    with pytest.warns(PrivacyWarning, match="its own train_dataset"):
        measure(trainer)
    if not after:
        trainer.train()
    assert "showed its training loss" in trainer.run.statement()
    assert "showed its training loss" in (tmp_path / "privacy" / "statement.md").read_text()
    assert verify(tmp_path / "privacy").holds


def test_evaluation_is_untouched(tmp_path):
    model = network()
    args = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True)
    expected = Trainer(model, args, eval_dataset=records()).evaluate()["eval_loss"]
    trainer = private(tmp_path, model, eval_dataset=records())
    assert trainer.evaluate()["eval_loss"] == expected
    assert torch.equal(
        torch.tensor(trainer.predict(records()).predictions),
        torch.tensor(Trainer(model, args).predict(records()).predictions),
    )


# What it costs.


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk"])
def test_epsilon_is_the_plans(method, tmp_path):
    arguments = {"max_steps": -1, "num_train_epochs": 2.5, "lr_scheduler_type": "linear", "optim": "adamw_torch_fused"}
    trainer = private(tmp_path, method=method, args=arguments)
    assert trainer.plan.steps == 10 and trainer.epsilon == 0
    output = trainer.train()
    assert output.global_step == 10 and trainer.run.status == "finished"
    assert trainer.epsilon == trainer.plan.epsilon() == trainer.run.epsilon <= 8.0
    segments = [phase.segment for phase in trainer.plan.phases]
    assert trainer.epsilon == accounting.epsilon(segments, 1e-3, "rdp")
    verdict = verify(tmp_path / "privacy")
    assert verdict.holds and verdict.epsilon == trainer.epsilon


# Sampling.


def test_samples_are_poisson_and_no_loader_of_accelerates(tmp_path):
    """Inclusions of each record over 600 draws are binomial: χ² over 40 records, a false alarm once in 1e6 runs."""
    data = [{**record, "labels": torch.tensor(i)} for i, record in enumerate(records())]
    trainer = private(tmp_path, train_dataset=data)
    batches = trainer.get_train_dataloader()
    assert type(batches) is torch.utils.data.DataLoader and len(batches) == N // BATCH
    counts, sizes = np.zeros(N), []
    for _ in range(150):
        for batch in batches:
            counts[batch["labels"].numpy()] += 1
            sizes.append(len(batch["labels"]))
    q, draws = BATCH / N, 600
    assert chi2.sf(((counts - q * draws) ** 2 / (draws * q * (1 - q))).sum(), N) > 1e-6
    assert np.var(sizes) == pytest.approx(N * q * (1 - q), rel=0.4)  # of a shuffle's fixed batches it would be 0


@pytest.mark.parametrize("workers", [0, 2])
def test_no_sample_is_drawn_twice_even_if_epochs_are_broken_off(workers, tmp_path, monkeypatch):
    numbers, sample = [], PoissonSampler.sample

    def drawn(self, phase, step, rate):
        numbers.append(step)
        return sample(self, phase, step, rate)

    class BreakOff(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_epoch_stop = state.global_step % 3 == 0

    monkeypatch.setattr(PoissonSampler, "sample", drawn)
    arguments = {"num_train_epochs": 3, "max_steps": -1, "dataloader_num_workers": workers}
    trainer = private(tmp_path, callbacks=[BreakOff()], args=arguments)
    trainer.train()
    assert trainer.state.global_step == 9 and trainer.run.status == "interrupted"
    assert len(numbers) == len(set(numbers)) >= 9


def test_the_dataset_must_be_one_whose_records_can_be_drawn(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(records())

    with pytest.raises(Refusal, match="IterableDataset"):
        private(tmp_path, train_dataset=Stream())
    with pytest.raises(Refusal, match="declares a dataset of 41"):
        private(tmp_path, dataset_size=41)
    with pytest.warns(PrivacyWarning, match="40 records is thereby declared public"):
        private(tmp_path, dataset_size=None)
    trainer = private(tmp_path)
    trainer.train_dataset.append(records()[0])
    with pytest.raises(Refusal, match="has 41"):
        trainer.train()


# Checkpoints.


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
    with pytest.raises(Refusal, match="its weights carry that cost"):
        private(tmp_path, model).train()
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
    with pytest.raises(Refusal, match="trained privately before"):
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


# What is refused.

ASKED = {
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.3,
    "bf16": True,
    "bf16_full_eval": True,
    "auto_find_batch_size": True,
    "gradient_checkpointing": True,
    "torch_compile": True,
    "use_liger_kernel": True,
    "neftune_noise_alpha": 5,
    "label_smoothing_factor": 0.1,
    "train_sampling_strategy": "group_by_length",
    "dataloader_drop_last": True,
    "data_seed": 3,
    "include_num_input_tokens_seen": "all",
    "skip_memory_metrics": False,
    "debug": "underflow_overflow",
    "enable_jit_checkpoint": True,
}


@pytest.mark.parametrize("name", ASKED)
def test_an_argument_that_cannot_be_kept_is_refused_with_its_reason(name, tmp_path):
    with pytest.raises(Refusal, match=name):
        private(tmp_path, args={name: ASKED[name]})


@pytest.mark.parametrize("name", sorted(set(ARGUMENTS) - set(ASKED)))
def test_so_is_one_that_these_arguments_cannot_be_built_with_here(name, tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    setattr(args, name, "something")
    with pytest.raises(Refusal, match=name):
        PrivateTrainer(network(), args, train_dataset=records(), target_epsilon=1.0, target_delta=1e-3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "non-private"}, "not private"),
        ({"warmup": 0.2}, "does not read"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"engine": "captur"}, "did you mean 'capture'"),
        ({"train_dataset": None}, "no dataset"),
        ({"args": {"per_device_train_batch_size": 64}}, "more than dataset_size"),
    ],
)
def test_other_refusals_come_when_the_trainer_is_built(given, words, tmp_path):
    with pytest.raises(Refusal, match=words):
        private(tmp_path, **given)
    assert not (tmp_path / "privacy").exists()


def test_arguments_changed_later_are_refused_too(tmp_path):
    trainer = private(tmp_path)
    trainer.args.max_steps = 20
    with pytest.raises(Refusal, match="take 20 steps and the plan pays for 12"):
        trainer.train()
    trainer = private(tmp_path)
    trainer.args.gradient_accumulation_steps = 4
    with pytest.raises(Refusal, match="gradient_accumulation_steps"):
        trainer.train()
    assert not (tmp_path / "privacy").exists()


def test_a_model_that_compares_examples_is_refused(tmp_path):
    class Compared(BertForSequenceClassification):
        def forward(self, input_ids=None, labels=None, position_ids=None):
            output = super().forward(input_ids, position_ids=position_ids)
            output.logits = output.logits - output.logits.mean(0)
            output.loss = None if labels is None else F.cross_entropy(output.logits, labels)
            return output

    with pytest.raises(Refusal, match="none that is known here as one number an example"):
        private(tmp_path, Compared(BertConfig(**SIZES))).train()
    assert not (tmp_path / "privacy").exists()


def test_a_model_that_no_engine_follows_is_refused_with_what_to_do(tmp_path):
    model = network("next")
    model.set_attn_implementation("sdpa")
    with pytest.raises(Refusal, match="(?s)engine='reference' works for any model.*attn_implementation='eager'"):
        private(tmp_path, model, "next").train()
    private(tmp_path, model, "next", engine="reference", args={"max_steps": 1}).train()


def test_without_transformers_the_import_says_what_to_install(monkeypatch):
    name = "tptopk.integrations.hugging_face"
    for found in [module for module in sys.modules if module.startswith(name)]:
        monkeypatch.delitem(sys.modules, found)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tptopk\[hugging-face\]'"):
        importlib.import_module(name)


def test_what_a_collate_function_draws_is_secret_and_moves_no_generator():
    """Trainer saves the state of the global generators with every checkpoint: it must not tell how many records were drawn."""
    plan = Plan(
        phases=(Phase(steps=4, sample_rate=0.5, noise_multiplier=1.0, clip_norm=1.0),), delta=1e-4, dataset_size=20
    )
    found, after = [], []
    for size in (20, 20, 5):
        fetch = loader.Fetch(
            [torch.zeros(3)] * 20, lambda records: torch.stack(records) + torch.rand(3), loader.Samples(plan).streams
        )
        torch.manual_seed(42)
        found.append(fetch(list(range(size))))
        after.append(torch.get_rng_state())
        assert not torch.equal(found[-1][:1], fetch([0])), "each batch has its own"
    assert not torch.equal(found[0], found[1])
    assert torch.equal(after[0], after[1]) and torch.equal(after[0], after[2])
    assert pickle.loads(pickle.dumps(loader.Fetch([], list, loader.Samples(plan).streams)))._streams is None


def test_generators_that_trainer_saves_do_not_depend_on_the_sample(tmp_path):
    """Two runs with dropout and different samples leave torch's generator in one state."""
    states = []
    for n in range(2):
        model = network()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
        private(tmp_path / str(n), model).train()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
