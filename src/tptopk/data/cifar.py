"""CIFAR-10 in its official layouts: the Python version's batches and the binary version's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tptopk.data.constants import BENCHMARKS, missing
from tptopk.data.digits import Pair
from tptopk.data.pickled import read_pickled
from tptopk.privacy.refusal import Refusal

PYTHON, BINARY = "cifar-10-batches-py", "cifar-10-batches-bin"
*TRAINING_BATCHES, TEST_BATCH = BENCHMARKS["cifar10"].unpacked
PIXELS = 3 * 32 * 32
CLASSES = BENCHMARKS["cifar10"].classes or 0

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def load_cifar10(root: Path) -> tuple[Pair, Pair]:
    """(training, test): images [N, 3, 32, 32] in [0, 1], labels [N]."""
    binary = not (root / PYTHON).is_dir() and (root / BINARY).is_dir()
    return _part(root, TRAINING_BATCHES, binary), _part(root, [TEST_BATCH], binary)


def _part(root: Path, batches: list[str], binary: bool) -> Pair:
    paths = [root / BINARY / f"{batch}.bin" if binary else root / PYTHON / batch for batch in batches]
    for path in paths:
        if not path.is_file():
            raise missing("cifar10", str(path.relative_to(root)), root)
    read = [_binary_batch(path) if binary else read_batch(path) for path in paths]
    rows = np.concatenate([rows for rows, _ in read])  # [N, 3072]
    labels = np.concatenate([labels for _, labels in read])  # [N]
    images = torch.from_numpy(rows.astype(np.float32)).div_(255).reshape(-1, 3, 32, 32)
    return images, torch.from_numpy(labels.astype(np.int64))


def read_batch(path: Path) -> Arrays:
    """Rows [N, 3072] and labels [N] of one batch of the Python version."""
    try:
        return _pickled_batch(path)
    except Refusal as refusal:
        raise Refusal(f"{refusal}; delete {path.parent} and fetch again") from refusal


def _pickled_batch(path: Path) -> Arrays:
    batch = read_pickled(path)
    if not isinstance(batch, dict):
        raise Refusal(f"{path} is no batch of CIFAR-10: it holds a {type(batch).__name__}, expected a dictionary")
    batch = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    rows, labels = batch.get("data"), batch.get("labels")
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != PIXELS:
        raise Refusal(f"{path} is no batch of CIFAR-10: 'data' must be bytes of shape [N, {PIXELS}]")
    if not isinstance(labels, list) or not all(isinstance(label, int) and 0 <= label < CLASSES for label in labels):
        raise Refusal(
            f"{path} is no batch of CIFAR-10: 'labels' must be a list of whole numbers from 0 to {CLASSES - 1}"
        )
    return _checked(path, rows, np.array(labels, dtype=np.int64))


def _binary_batch(path: Path) -> Arrays:
    content = np.fromfile(path, np.uint8)
    if len(content) % (1 + PIXELS):
        raise Refusal(f"{path} is truncated: {len(content)} bytes, not a multiple of {1 + PIXELS}")
    records = content.reshape(-1, 1 + PIXELS)  # a label, then red, green and blue
    return _checked(path, records[:, 1:], records[:, 0])


def _checked(path: Path, rows: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Arrays:
    if len(rows) != len(labels) or len(rows) == 0:
        raise Refusal(
            f"{path} holds {len(rows)} images and {len(labels)} labels; expected equally many, and at least one"
        )
    if labels.max() >= CLASSES:
        raise Refusal(f"{path} has labels up to {labels.max()}; there are {CLASSES} classes, from 0")
    return rows, labels
