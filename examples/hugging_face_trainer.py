"""Hugging Face's Trainer, made private, killed and resumed: python examples/hugging_face_trainer.py

A small BERT from random weights learns whether a made-up patient liked the clinic. Half-way the process "dies"; a new trainer goes on
from the last checkpoint, and the steps that were lost stay charged. The output folder's `privacy` can be checked: tptopk verify runs/trainer/privacy
"""

import random
import sys
import zlib

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

from tptopk.integrations.hugging_face import PrivateTrainer

WHO = ["the nurse", "the surgeon", "the kitchen", "my doctor", "the night shift", "the front desk", "the ward"]
BAD = ["never listened", "was rude to us", "forgot me twice", "made it worse", "ignored my pain", "lost my papers"]
GOOD = ["was very kind", "listened to me", "explained it all", "helped at once", "kept its promise", "made me laugh"]
WHEN = ["on monday", "all week", "before the operation", "at night", "when i arrived", "as always", "for once", "again"]
LENGTH, WORDS = 12, 256


def record(chance: random.Random) -> dict[str, torch.Tensor]:
    """A sentence as token numbers, all of one public length: a hash, since a vocabulary made from the records would tell of them."""
    liked = chance.randrange(2)
    words = f"{chance.choice(WHO)} {chance.choice(GOOD if liked else BAD)} {chance.choice(WHEN)}".split()
    ids = torch.tensor([1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words] + [0] * (LENGTH - len(words)))
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": torch.tensor(liked)}


def trainer(folder: str, **more) -> PrivateTrainer:
    model = BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                   max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, initializer_range=0.2)
    )  # fmt: skip
    arguments = TrainingArguments(folder, per_device_train_batch_size=200, num_train_epochs=10, learning_rate=1e-2, save_steps=20,
                                  logging_steps=20, report_to="none", disable_tqdm=True, dataloader_pin_memory=False)  # fmt: skip
    return PrivateTrainer(model, arguments, train_dataset=train_set, eval_dataset=test_set, compute_metrics=accuracy,
                          target_epsilon=8.0, target_delta=1e-4, clip_norm=0.5, method="tp-topk", active_ratio=0.4,
                          dataset_size=2000, accountant="rdp", **more)  # fmt: skip


def accuracy(found) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


class PowerFailure(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        if state.global_step == 43:
            raise KeyboardInterrupt


chance = random.Random(0)
train_set, test_set = [record(chance) for _ in range(2000)], [record(chance) for _ in range(500)]
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/trainer"

try:
    trainer(folder, callbacks=[PowerFailure()]).train()
except KeyboardInterrupt:
    print("killed after 43 steps; the last checkpoint is of step 40")

resumed = trainer(folder)
resumed.train(resume_from_checkpoint=True)
resumed.save_model(f"{folder}/model")  # BertForSequenceClassification.from_pretrained reads it
facts = resumed.run.facts
print(
    f"{sum(facts.taken_steps)} steps, {sum(facts.charged_steps)} charged, at ε = {resumed.epsilon:.3f}, δ = {resumed.plan.delta:g}"
)
print(f"test accuracy {resumed.evaluate()['eval_accuracy']:.3f}")
print(resumed.run.statement())
