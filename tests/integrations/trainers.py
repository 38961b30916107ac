"""A small model, its records and a private trainer of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)

from tptopk.integrations.hugging_face import PrivateTrainer
from tptopk.training.sampling import PoissonSampler

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


def with_sample(monkeypatch, *chosen: int) -> None:
    monkeypatch.setattr(
        PoissonSampler, "sample", lambda self, phase, step, rate: torch.tensor(chosen, dtype=torch.long)
    )
