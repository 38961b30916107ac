"""Small made-up datasets in the official layouts."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

RANDOM = np.random.default_rng(0)


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def make_mnist(root: Path, name: str = "MNIST", zipped: bool = True) -> dict[str, np.ndarray]:
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    arrays = {}
    for part, count in (("train", 20), ("t10k", 8)):
        arrays[f"{part}-images-idx3-ubyte"] = RANDOM.integers(0, 256, (count, 28, 28))
        arrays[f"{part}-labels-idx1-ubyte"] = np.arange(count) % 10
    for file, array in arrays.items():
        if zipped:
            (folder / f"{file}.gz").write_bytes(gzip.compress(idx_bytes(array), mtime=0))
        else:
            (folder / file).write_bytes(idx_bytes(array))
    return arrays


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 text, as the official batches have them."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)

    dispatch[bytes] = save_bytes


def make_cifar10(root: Path, batch_size: int = 4, protocol: int | None = None) -> tuple[np.ndarray, list[int]]:
    """Six batches; with a protocol, as Python 3 would write them. Returns the training rows and labels."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rows, labels = [], []
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        batch = {
            b"batch_label": name.encode(),
            b"data": RANDOM.integers(0, 256, (batch_size, 3072), dtype=np.uint8),
            b"labels": RANDOM.integers(0, 10, batch_size).tolist(),
            b"filenames": [b"a.png"] * batch_size,
        }
        with open(folder / name, "wb") as file:
            if protocol is None:
                Python2Pickler(file, protocol=2).dump(batch)
            else:
                pickle.dump(batch, file, protocol=protocol)
        if name != "test_batch":
            rows.append(batch[b"data"])
            labels += batch[b"labels"]
    return np.concatenate(rows), labels


def make_medmnist(path: Path, colour: bool = False, labels: int = 1, shape: tuple[int, ...] = (28, 28)) -> None:
    arrays = {}
    for part, count in (("train", 12), ("val", 3), ("test", 5)):
        arrays[f"{part}_images"] = RANDOM.integers(0, 256, (count, *shape, *((3,) if colour else ())), dtype=np.uint8)
        arrays[f"{part}_labels"] = RANDOM.integers(0, 2, (count, labels), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def make_image(path: Path, size: tuple[int, int] = (8, 8), mode: str = "RGB", colour: object = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if colour is None:
        pixels = RANDOM.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(path)
    else:
        Image.new(mode, size, colour).save(path)
