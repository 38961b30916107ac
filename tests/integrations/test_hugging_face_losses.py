"""Hugging Face's Trainer, made private: the loss, one number an example."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, TrainingArguments

from tests.integrations.trainers import LENGTH, SIZES, WORDS, network, private, records, with_sample
from tptopk.integrations.hugging_face import PrivateTrainer, losses
from tptopk.privacy.refusal import Refusal


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
