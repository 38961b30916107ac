"""idx files: read rightly, or refused with a clear word."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

from tests.data.made import idx_bytes, make_mnist
from tptopk.data.idx import load_idx, read_idx
from tptopk.privacy.refusal import Refusal


@pytest.mark.parametrize("zipped", [True, False])
def test_images_and_labels_are_those_of_the_files(tmp_path, zipped):
    arrays = make_mnist(tmp_path, zipped=zipped)
    (inputs, targets), (test_inputs, _) = load_idx("mnist", tmp_path)
    assert torch.equal((inputs[:, 0] * 255).round().long(), torch.from_numpy(arrays["train-images-idx3-ubyte"]))
    assert targets.tolist() == arrays["train-labels-idx1-ubyte"].tolist() and len(test_inputs) == 8


WHOLE = idx_bytes(np.arange(12).reshape(3, 2, 2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"<html>not found</html>", "not an idx file"),
        (WHOLE[:6], "truncated"),
        (WHOLE[:-1], "promises 3 × 2 × 2 bytes"),
        (WHOLE + b"x", "truncated or damaged"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "promises"),
    ],
)
def test_spoilt_files_are_refused(tmp_path, content, message):
    (tmp_path / "images").write_bytes(content)
    with pytest.raises(Refusal, match=message):
        read_idx(tmp_path / "images")


def test_a_truncated_gzip_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "images.gz"
    zipped = gzip.compress(WHOLE)
    for content in (zipped[:-12], zipped[:5], b"not gzip", zipped[:12] + b"\xff\xff" + zipped[14:]):
        path.write_bytes(content)
        with pytest.raises(Refusal, match="delete it and fetch again"):
            read_idx(path)


def test_labels_that_do_not_fit_the_images_are_refused(tmp_path):
    make_mnist(tmp_path, zipped=False)
    labels = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.arange(19) % 10))
    with pytest.raises(Refusal, match=r"\(20, 28, 28\) and the labels \(19,\)"):
        load_idx("mnist", tmp_path)
    labels.write_bytes(idx_bytes(np.full(20, 10)))
    with pytest.raises(Refusal, match="go up to 10; there are 10 classes"):
        load_idx("mnist", tmp_path)
