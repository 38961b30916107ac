"""CIFAR-10's batches, Python and binary."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from tests.data.made import make_cifar10
from tptopk.data.cifar import load_cifar10
from tptopk.privacy.refusal import Refusal


@pytest.mark.parametrize("protocol", [None, 2, 3, 4])
def test_rows_become_channels_first_images(tmp_path, protocol):
    rows, labels = make_cifar10(tmp_path, protocol=protocol)
    (inputs, targets), (test_inputs, _) = load_cifar10(tmp_path)
    assert inputs.shape == (20, 3, 32, 32) and test_inputs.shape == (4, 3, 32, 32)
    assert torch.equal((inputs * 255).round().byte().flatten(1), torch.from_numpy(rows)) and targets.tolist() == labels


def test_the_binary_version_is_the_same_data(tmp_path):
    make_cifar10(tmp_path / "python")
    folder = tmp_path / "binary" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for path in (tmp_path / "python" / "cifar-10-batches-py").iterdir():
        batch = pickle.loads(path.read_bytes(), encoding="bytes")
        records = np.concatenate([np.array(batch[b"labels"], np.uint8)[:, None], batch[b"data"]], 1)
        (folder / f"{path.name}.bin").write_bytes(records.tobytes())
    for one, other in zip(load_cifar10(tmp_path / "python"), load_cifar10(tmp_path / "binary"), strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    (folder / "test_batch.bin").write_bytes(b"\x00" * 3072)
    with pytest.raises(Refusal, match="not a multiple of 3073"):
        load_cifar10(tmp_path / "binary")
    (folder / "test_batch.bin").write_bytes(b"\x0a" * 3073)
    with pytest.raises(Refusal, match="labels up to 10"):
        load_cifar10(tmp_path / "binary")


DATA = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "expected a dictionary"),
        ({b"labels": [1, 2]}, "'data' must be bytes"),
        ({b"data": DATA.astype(np.float32), b"labels": [1, 2]}, "'data' must be bytes"),
        ({b"data": DATA[:, :100], b"labels": [1, 2]}, "'data' must be bytes"),
        ({b"data": DATA, b"labels": [1, 10]}, "from 0 to 9"),
        ({b"data": DATA, b"labels": [1, -1]}, "from 0 to 9"),
        ({b"data": DATA, b"labels": ["1", "2"]}, "from 0 to 9"),
        ({b"data": DATA, b"labels": [1]}, "2 images and 1 labels"),
        ({b"data": DATA[:0], b"labels": []}, "0 images"),
    ],
)
def test_a_spoilt_batch_is_refused(tmp_path, batch, message):
    make_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(Refusal, match=message):
        load_cifar10(tmp_path)


def test_a_missing_batch_is_named(tmp_path):
    make_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(Refusal, match="no cifar-10-batches-py/data_batch_4.*tptopk data fetch cifar10"):
        load_cifar10(tmp_path)
