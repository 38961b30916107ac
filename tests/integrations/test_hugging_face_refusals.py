"""Hugging Face's Trainer, made private: what is refused."""

from __future__ import annotations

import importlib
import sys

import pytest
from torch.nn import functional as F

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from tests.integrations.trainers import SIZES, network, private, records
from tptopk.integrations.hugging_face import PrivateTrainer
from tptopk.integrations.hugging_face.refusals import ARGUMENTS
from tptopk.privacy.refusal import Refusal

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
        ({"warmup": 0.2}, "does not use"),
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
