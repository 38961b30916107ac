"""Hugging Face's Trainer, made private: what is shown of private records, and what is said of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integrations.trainers import network, private, records
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.refusal import Refusal
from tptopk.training.verify import verify


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
