"""MNIST and Fashion-MNIST in their official layout: idx files, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tptopk.data.constants import BENCHMARKS, missing
from tptopk.data.digits import Pair
from tptopk.privacy.refusal import Refusal

BYTES = 0x08  # the idx code of unsigned bytes
SIZE = (28, 28)
LARGEST = 1 << 30  # a head that promises more is damaged


def load_idx(name: str, root: Path) -> tuple[Pair, Pair]:
    """(training, test) of `mnist` or `fmnist`: images [N, 1, 28, 28] in [0, 1], labels [N]."""
    return _part(name, root, "train"), _part(name, root, "t10k")


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """The array of bytes in an idx file: a magic number, the sizes of its dimensions, then the bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:3] != bytes([0, 0, BYTES]) or not 1 <= head[3] <= 4:
                raise Refusal(f"{path} is not an idx file of bytes: it begins with {head.hex() or 'nothing'}")
            sizes = file.read(4 * head[3])
            shape = struct.unpack(f">{len(sizes) // 4}I", sizes[: len(sizes) // 4 * 4])
            count = math.prod(shape)
            content = file.read(count + 1) if len(shape) == head[3] and count <= LARGEST else b""
    except (OSError, EOFError, zlib.error) as error:
        raise Refusal(f"{path} cannot be read, it may be truncated: {error}; delete it and fetch again") from error
    if len(shape) != head[3] or len(content) != count:
        raise Refusal(
            f"{path} is truncated or damaged: its head promises {' × '.join(map(str, shape))} bytes; delete it and fetch again"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _part(name: str, root: Path, part: str) -> Pair:
    images = read_idx(_found(name, root, f"{part}-images-idx3-ubyte"))
    labels = read_idx(_found(name, root, f"{part}-labels-idx1-ubyte"))
    folder, classes = root / BENCHMARKS[name].folder, BENCHMARKS[name].classes or 0
    if images.shape[1:] != SIZE or labels.ndim != 1 or len(images) != len(labels):
        raise Refusal(
            f"{folder}: the {part} images have shape {images.shape} and the labels {labels.shape}; expected [N, 28, 28] and [N]"
        )
    if len(labels) and labels.max() >= classes:
        raise Refusal(f"{folder}: the {part} labels go up to {labels.max()}; there are {classes} classes, from 0")
    return torch.from_numpy(images.astype(np.float32) / 255)[:, None], torch.from_numpy(labels.astype(np.int64))


def _found(name: str, root: Path, file: str) -> Path:
    folder = root / BENCHMARKS[name].folder
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path
    raise missing(name, f"{BENCHMARKS[name].folder}/{file}(.gz)", root)
