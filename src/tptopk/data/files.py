"""Data in files that need no download: NumPy archives."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from tptopk.data.digits import Pair
from tptopk.data.tables import Schema
from tptopk.privacy.refusal import Refusal

LAYOUT = "a NumPy archive (.npz) with x_train and y_train, and if there is a test set x_test and y_test"
MEDMNIST_KEYS = {"train_images", "train_labels", "test_images", "test_labels"}


def read_archive(path: str | Path) -> tuple[Pair, Pair | None]:
    """(training, test or None) of an .npz archive, as tensors; also in MedMNIST's layout."""
    arrays = _arrays(path)
    if set(arrays) >= MEDMNIST_KEYS:
        return _medmnist_part(arrays, "train", path), _medmnist_part(arrays, "test", path)
    missing = {"x_train", "y_train"} - set(arrays)
    if missing:
        raise Refusal(
            f"{path} has no {sorted(missing)[0]}; expected {LAYOUT}; it holds: {', '.join(sorted(arrays)) or 'nothing'}"
        )
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise Refusal(f"{path} has one of x_test and y_test without the other")
    test = _pair(arrays, "test", path) if "x_test" in arrays else None
    return _pair(arrays, "train", path), test


def read_medmnist(path: str | Path) -> tuple[Pair, Pair]:
    """(training, test) of a 2-D MedMNIST archive: images [N, C, H, W] in [0, 1], labels [N] ([N, L] where there are several).

    The validation images are in neither.
    """
    arrays = _arrays(path)
    if not set(arrays) >= MEDMNIST_KEYS:
        raise Refusal(
            f"{path} is not in MedMNIST's layout: expected {', '.join(sorted(MEDMNIST_KEYS))}; it holds: {', '.join(sorted(arrays)) or 'nothing'}"
        )
    return _medmnist_part(arrays, "train", path), _medmnist_part(arrays, "test", path)


def read_inputs(path: str | Path) -> Tensor:
    """The inputs of an archive to predict for: x, or x_test."""
    arrays = _arrays(path)
    if set(arrays) >= MEDMNIST_KEYS:
        return _medmnist_part(arrays, "test", path)[0]
    for key in ("x", "x_test"):
        if key in arrays:
            return inputs_tensor(arrays[key])
    raise Refusal(f"{path} has neither x nor x_test; it holds: {', '.join(sorted(arrays)) or 'nothing'}")


def _arrays(path: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    if not Path(path).is_file():
        raise Refusal(f"there is no file {path}; expected {LAYOUT}")
    try:
        archive = np.load(path, allow_pickle=False)
        return {key: archive[key] for key in archive.files}
    except (ValueError, OSError, BadZipFile, EOFError, AttributeError) as error:
        raise Refusal(f"{path} cannot be read as {LAYOUT}: {error}") from error


def _medmnist_part(arrays: dict[str, np.ndarray[Any, Any]], part: str, path: str | Path) -> Pair:
    images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
        raise Refusal(
            f"{path}: {part}_images is {images.dtype} of shape {images.shape}; only MedMNIST's 2-D sets are read: "
            "uint8 [N, H, W] or [N, H, W, 3]"
        )
    if len(images) != len(labels):
        raise Refusal(f"{path}: {len(images)} {part}_images and {len(labels)} {part}_labels; expected equally many")
    images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)  # [N, C, H, W]
    return inputs_tensor(images), _targets_tensor(labels)


def _pair(arrays: dict[str, np.ndarray[Any, Any]], part: str, path: str | Path) -> Pair:
    x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise Refusal(
            f"{path}: x_{part} has shape {x.shape} and y_{part} {y.shape}; they must hold one entry a record each"
        )
    return inputs_tensor(x), _targets_tensor(y)


def inputs_tensor(x: np.ndarray[Any, Any]) -> Tensor:
    """Bytes become floats in [0, 1] (a public scale), other integers stay ids, floats become float32.

    What is too large for float32 becomes infinite without a warning: a warning would tell of one record.
    """
    if x.dtype == np.uint8:
        return torch.from_numpy(x.astype(np.float32) / 255)
    if np.issubdtype(x.dtype, np.integer):
        return torch.from_numpy(x.astype(np.int64))
    if np.issubdtype(x.dtype, np.floating):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return torch.from_numpy(x.astype(np.float32))
    raise Refusal(f"inputs of type {x.dtype} cannot be trained on; give numbers")


def _targets_tensor(y: np.ndarray[Any, Any]) -> Tensor:
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if np.issubdtype(y.dtype, np.integer) or y.dtype == np.bool_:
        return torch.from_numpy(y.astype(np.int64))
    if not np.issubdtype(y.dtype, np.floating):
        raise Refusal(f"targets of type {y.dtype} cannot be trained on; number the classes from 0")
    return inputs_tensor(y)


def findings(pair: Pair, classes: int | None = None, schema: Schema | None = None) -> list[str]:
    """What an operator should know about data before training. Not private: never write this into a run."""
    inputs, targets = pair
    found = [] if schema is None else schema.findings(inputs)
    if len(targets) == 0:
        return [*found, "there are no records"]
    if inputs.is_floating_point():
        bad = int((~torch.isfinite(inputs.flatten(1))).any(1).sum())
        if bad:
            whose = "1 record has" if bad == 1 else f"{bad} records have"
            found.append(f"{whose} inputs that are not finite and will contribute nothing")
        constant = inputs.flatten(1)
        if len(constant) > 1 and bool((constant == constant[0]).all()):
            found.append("all records have the same inputs")
        elif schema is None and inputs.ndim == 2 and len(inputs) > 1:
            same = (inputs == inputs[0]).all(0).nonzero().flatten().tolist()
            if same:
                shown = ", ".join(map(str, same[:10])) + (", …" if len(same) > 10 else "")
                found.append(f"{len(same)} columns are the same in all records (of column numbers, from 0: {shown})")
    if targets.is_floating_point():
        if not bool(torch.isfinite(targets).all()):
            found.append("some targets are not finite; their records will contribute nothing")
    else:
        found += _label_findings(targets, classes)
    return found


def _label_findings(targets: Tensor, classes: int | None) -> list[str]:
    """Labels that are no classes: training gives their records no part, without a word; a test set with them is refused."""
    low, high = int(targets.min()), int(targets.max())
    found = [f"labels start at {low}; classes are numbered from 0"] if low != 0 else []
    strange = (targets < 0) | (targets >= (high + 1 if classes is None else classes))
    count = int(strange.reshape(len(targets), -1).any(1).sum())
    if count:
        whose = (
            "1 record has a label that is no class and"
            if count == 1
            else f"{count} records have a label that is no class and"
        )
        known = (
            "classes are numbered from 0"
            if classes is None
            else f"{classes} classes are numbered from 0 to {classes - 1}"
        )
        found.append(f"{whose} would contribute nothing to training, silently: labels are {low} to {high}, {known}")
    return found
