"""NumPy archives, MedMNIST's among them, and what an operator is told."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.data.made import make_medmnist
from tptopk.data.files import findings, read_archive, read_inputs, read_medmnist
from tptopk.privacy.refusal import Refusal


def test_medmnist_archives_are_read_without_their_validation_images(tmp_path):
    make_medmnist(tmp_path / "a.npz", colour=True)
    (inputs, targets), (test_inputs, _) = read_medmnist(tmp_path / "a.npz")
    raw = np.load(tmp_path / "a.npz")
    assert torch.equal(
        (inputs * 255).round().byte(), torch.from_numpy(raw["train_images"].transpose(0, 3, 1, 2).copy())
    )
    assert targets.tolist() == raw["train_labels"][:, 0].tolist() and len(test_inputs) == 5
    assert torch.equal(read_archive(tmp_path / "a.npz")[0][0], inputs)
    assert torch.equal(read_inputs(tmp_path / "a.npz"), test_inputs)


def test_several_labels_a_record_stay_several(tmp_path):
    make_medmnist(tmp_path / "chestmnist.npz", labels=14)
    assert read_medmnist(tmp_path / "chestmnist.npz")[0][1].shape == (12, 14)


def test_other_archives_are_refused_as_medmnist(tmp_path):
    make_medmnist(tmp_path / "solid.npz", shape=(28, 28, 28))
    with pytest.raises(Refusal, match="only MedMNIST's 2-D sets"):
        read_medmnist(tmp_path / "solid.npz")
    np.savez(tmp_path / "other.npz", x_train=np.zeros(3))
    with pytest.raises(Refusal, match="not in MedMNIST's layout.*it holds: x_train"):
        read_medmnist(tmp_path / "other.npz")
    whole = (tmp_path / "other.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refusal, match="cannot be read"):
        read_medmnist(tmp_path / "cut.npz")
    arrays = dict(np.load(tmp_path / "solid.npz"))
    arrays["train_images"] = np.zeros((3, 28, 28), np.uint8)
    np.savez(tmp_path / "short.npz", **arrays)
    with pytest.raises(Refusal, match="3 train_images and 12 train_labels"):
        read_medmnist(tmp_path / "short.npz")


def test_constant_columns_are_found():
    inputs = torch.rand(5, 4)
    inputs[:, 2] = 1
    assert findings((inputs, torch.zeros(5, dtype=torch.long))) == [
        "1 columns are the same in all records (of column numbers, from 0: 2)"
    ]
    assert findings((inputs[:0], torch.zeros(0, dtype=torch.long))) == ["there are no records"]
    assert findings((torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.long))) == ["all records have the same inputs"]


@pytest.mark.parametrize(("bad", "words"), [(1, "1 record has"), (2, "2 records have")])
def test_one_record_is_not_several(bad, words):
    inputs = torch.rand(5, 4)
    inputs[:bad, 0] = torch.nan
    assert findings((inputs, torch.arange(5))) == [f"{words} inputs that are not finite and will contribute nothing"]
