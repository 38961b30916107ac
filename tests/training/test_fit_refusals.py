"""What `fit` refuses, before anything is charged."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tptopk
from tests.training.test_fit import SIZE, data, fit, network, plan
from tptopk.privacy.refusal import Refusal


class Growing(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.reads = 0

    def __len__(self):
        return SIZE + (self.reads > 500)

    def __getitem__(self, i):
        self.reads += 1
        return data()[0][i % SIZE], i % 3


class WithState(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        return None


class Sentences(torch.utils.data.Dataset):
    """Records of different lengths."""

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return torch.arange(2 + i % 5) % 9 + 1, i % 3


def padded(records):
    return torch.nn.utils.rnn.pad_sequence([r[0] for r in records], batch_first=True), torch.tensor(
        [r[1] for r in records]
    )


class Pooling(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.words, self.head, self.masked = nn.Embedding(30, 4), nn.Linear(4, 3), masked

    def forward(self, ids):
        words = self.words(ids)
        if not self.masked:
            return self.head(words.mean(1))
        real = (ids != 0).float()[..., None]
        return self.head((words * real).sum(1) / real.sum(1).clamp(min=1))


def test_padding_that_lets_one_record_change_another_is_refused():
    with pytest.raises(Refusal, match="Pad every record to one public length"):
        fit(Pooling(masked=False), Sentences(), collate=padded)
    assert fit(Pooling(masked=True), Sentences(), collate=padded).status == "finished"


def part(model):
    return torch.optim.SGD(model[0].parameters(), lr=1.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_set": data(SIZE - 1)}, "declares a dataset of 300 records and this one has 299"),
        ({"train_set": (torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))}, "empty"),
        ({"train_set": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()))}, "not a DataLoader"),
        ({"model": nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))}, "tptopk.fix"),
        ({"loss": lambda m, b: F.cross_entropy(m(b[0]), b[1])}, "one number an example"),
        ({"loss": 3}, "loss is 3"),
        ({"scaler": object()}, "no gradient scaler"),
        ({"schedular": None}, "did you mean 'scheduler'"),
        ({"epsilon": 3.0}, "it belongs to the plan: Plan.calibrate\\(…, epsilon=…\\)"),
        ({"noise_multiplier": 3.0}, "it belongs to the plan: Phase"),
        ({"engine": "fast"}, "unknown engine"),
        ({"precision": "fp16"}, "unknown precision"),
        ({"score": "papr"}, "did you mean 'paper'"),
        ({"ratio_schedule": "constand"}, "did you mean 'constant'"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"ema": 1.0}, "ema"),
        ({"the_plan": plan(active_ratio=0.001)}, "k = 0"),
        ({"test_set": (torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))}, "test set is empty"),
        ({"test_set": (torch.zeros(5, 7), torch.zeros(5, dtype=torch.long))}, "a test record"),
        ({"test_set": (data()[0], data()[1] + 1)}, "of 300 test records have a label that is no class"),
        ({"test_set": [(x, int(y) - 1) for x, y in zip(*data(5), strict=True)]}, "of 5 test records have a label"),
        ({"out": "/proc/nothing/here"}, "cannot write"),
        ({"model": nn.Sequential(WithState(6, 3)), "out": "{tmp}"}, "only tensors can be saved"),
        (
            {
                "the_plan": tptopk.Plan(
                    phases=[tptopk.Phase(steps=2, sample_rate=0.1, noise_multiplier=1e-5, clip_norm=1.0)],
                    delta=1e-5,
                    dataset_size=SIZE,
                    accountant="pld",
                )
            },
            "infinite",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_charged(tmp_path, monkeypatch, options, words):
    def never(*args):
        raise AssertionError("charged")

    monkeypatch.setattr("tptopk.privacy.ledger.Ledger.charge", never)
    if options.get("out") == "{tmp}":
        options = {**options, "out": tmp_path / "run"}
    with pytest.raises(Refusal, match=words):
        fit(**options)
    assert not (tmp_path / "run").exists()


def test_an_optimizer_over_part_of_the_model_is_refused():
    model = network()
    with pytest.raises(Refusal, match="does not hold parameter"):
        fit(model, optimizer=part(model))


def test_a_metric_scheduler_is_refused():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    short = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
    with pytest.raises(Refusal, match="the scheduler ends after 5 steps"):
        fit(model, optimizer=optimizer, scheduler=short)
    with pytest.raises(Refusal, match="ReduceLROnPlateau"):
        fit(model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_a_dataset_whose_length_changes_stops_the_run(tmp_path):
    with pytest.raises(Refusal, match="must be right throughout"):
        fit(train_set=Growing(), out=tmp_path / "run")
    assert tptopk.load(tmp_path / "run", network()).status == "failed"
