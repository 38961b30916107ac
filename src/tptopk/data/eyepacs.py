"""EyePACS in the layout of its public competition: labels in CSV files, photographs of retinas in folders."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from tptopk.data.constants import missing
from tptopk.data.digits import Pair
from tptopk.data.images import OnImage, read_images
from tptopk.data.tables import text_columns
from tptopk.privacy.refusal import Refusal, check_count

LABELS, TEST_LABELS = "trainLabels.csv", "retinopathy_solution.csv"
FOLDERS = ("eyepacs", "diabetic-retinopathy-detection", "")
LEVELS = {"0", "1", "2", "3", "4"}
HELD_OUT = 5  # without the competition's test labels, one patient in five is held out

Labelled = list[tuple[Path, int]]


def load_eyepacs(
    root: Path, size: int = 64, cache_dir: Path | None = None, on_image: OnImage | None = None
) -> tuple[Pair, Pair]:
    """(training, test): photographs [N, 3, size, size] in [0, 1]; label 1 for any retinopathy (level above 0), else 0.

    The test set is the competition's own where its labels (retinopathy_solution.csv) and its folder `test` are there;
    otherwise the photographs of a fifth of the patients, chosen by a fixed hash of their numbers, so that the two eyes of a
    person are never on both sides. Resized photographs are kept in `cache_dir` (beside the labels if not given), under a
    name that says how they were made and from what.

    Formal guarantees: a record is a photograph. A person has two, so (ε, δ) for a record is (2ε, (1 + e^ε) δ) for a person.
    """
    check_count("image_size", size)
    folder = next((root / name for name in FOLDERS if (root / name / LABELS).is_file()), None)
    if folder is None:
        raise missing("eyepacs", f"eyepacs/{LABELS}", root)
    training = _labelled(folder, LABELS, "train")
    if (folder / TEST_LABELS).is_file() and (folder / "test").is_dir():
        test = _labelled(folder, TEST_LABELS, "test")
    else:
        test = [entry for entry in training if _held_out(entry[0].stem)]
        training = [entry for entry in training if not _held_out(entry[0].stem)]
    if not training or not test:
        raise Refusal(
            f"{folder / LABELS} has too few patients for a training and a test set: {len(training) + len(test)} records"
        )
    cache = folder / ".cache" if cache_dir is None else Path(cache_dir)
    return _pair(training, size, cache, "train", on_image), _pair(test, size, cache, "test", on_image)


def _held_out(image: str) -> bool:
    patient = image.partition("_")[0]
    return int.from_bytes(hashlib.sha256(patient.encode()).digest()[:8]) % HELD_OUT == 0


def _labelled(folder: Path, labels: str, images: str) -> Labelled:
    """Each photograph with its label, in the order of the labels."""
    columns = text_columns(folder / labels, ["image", "level"])
    names, levels = columns["image"], columns["level"]
    wrong = sum(level not in LEVELS for level in levels)
    if wrong:
        raise Refusal(f"{folder / labels}: {wrong} of {len(levels)} records have no level from 0 to 4")
    if len(set(names)) != len(names):
        raise Refusal(f"{folder / labels}: {len(names) - len(set(names))} photographs are named more than once")
    unsafe = sum(Path(name).name != name for name in names)
    if unsafe:
        raise Refusal(f"{folder / labels}: {unsafe} names of photographs are paths; expected names such as 10_left")
    photographs = _photographs(folder, images, names[0])
    absent = [name for name in names if name not in photographs]
    if absent:
        raise Refusal(
            f"{len(absent)} of {len(names)} photographs of {folder / labels} are not there, the first is {absent[0]}.jpeg; "
            "unpack all parts of the download"
        )
    return [(photographs[name], int(level != "0")) for name, level in zip(names, levels, strict=True)]


def _photographs(folder: Path, images: str, first: str) -> dict[str, Path]:
    """The photographs by name, in the folder `images` or in whichever folder has the first one."""
    others = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    for candidate in (folder / images, *others, folder):
        if any((candidate / f"{first}{suffix}").is_file() for suffix in (".jpeg", ".jpg", ".png")):
            return {path.stem: path for path in candidate.iterdir() if path.suffix in (".jpeg", ".jpg", ".png")}
    return {}


def _pair(entries: Labelled, size: int, cache: Path, part: str, on_image: OnImage | None) -> Pair:
    labels = np.array([label for _, label in entries], dtype=np.int64)
    content = hashlib.sha256(repr([(path.name, path.stat().st_size, label) for path, label in entries]).encode())
    kept = cache / f"eyepacs-{part}-any-dr-{size}px-rgb-{content.hexdigest()[:16]}.npz"
    images = _cached(kept, (len(entries), 3, size, size))
    if images is None:
        images = read_images([path for path, _ in entries], size, "RGB", on_image=on_image)
        _keep(kept, images)
    return torch.from_numpy(images.astype(np.float32)).div_(255), torch.from_numpy(labels)


def _cached(path: Path, shape: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
    try:
        with np.load(path, allow_pickle=False) as archive:
            images: np.ndarray[Any, Any] = archive["images"]
    except (OSError, ValueError, KeyError, BadZipFile, EOFError):
        return None
    return images if images.shape == shape and images.dtype == np.uint8 else None


def _keep(path: Path, images: np.ndarray[Any, Any]) -> None:
    """Write the cache under its name only when it is whole; a folder that cannot be written to costs time, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            try:
                np.savez(file, images=images)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError:
        return
