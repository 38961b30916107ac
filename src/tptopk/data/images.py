"""Folders of images, one folder a class, read with Pillow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tptopk.data.digits import Pair
from tptopk.privacy.refusal import Refusal, check_count, nearest

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
IGNORED = ("thumbs.db", "desktop.ini")
MODES = {"RGB": 3, "L": 1}

OnImage = Callable[[int, int], None]
"""Called with how many images are read, and how many there are."""


def read_folder(
    root: str | Path, *, size: int | None = None, mode: str = "RGB", on_image: OnImage | None = None
) -> tuple[Pair, Pair | None]:
    """(training, test or None): images [N, C, H, W] in [0, 1], and class numbers [N] in the order of the sorted folder names.

    `root` holds one folder a class, or `train` and, if there is one, `test` that do. With `size`, the short side becomes that
    long and the middle square is kept; without, all images must be of one size. `mode` is RGB or L (grey).
    """
    root = Path(root)
    if not root.is_dir():
        raise Refusal(f"there is no folder {root}; expected one that holds a folder of images a class")
    if mode not in MODES:
        raise Refusal(f"the image mode is {mode!r}{nearest(mode, MODES)}")
    if size is not None:
        check_count("image_size", size)
    split = (root / "train").is_dir()
    training_root = root / "train" if split else root
    classes = class_names(training_root)
    shape: list[tuple[str, tuple[int, int]]] = []  # the first image and its size, which all others must have
    training = _read_part(training_root, classes, size, mode, shape, on_image)
    if not split or not (root / "test").is_dir():
        return training, None
    for name in class_names(root / "test"):
        if name not in classes:
            raise Refusal(
                f"{root / 'test' / name} is a class that {training_root} does not have; it has {', '.join(classes)}"
            )
    return training, _read_part(root / "test", classes, size, mode, shape, on_image)


def folder_findings(root: str | Path) -> list[str]:
    """Class folders that leave nothing to learn: an empty one, or only one."""
    root = Path(root)
    root = root / "train" if (root / "train").is_dir() else root
    classes = class_names(root)
    found = [f"the class folder {root / name} holds no images" for name in classes if not _image_files(root / name)]
    if len(classes) == 1:
        found.append(f"there is only one class folder, {root / classes[0]}; expected one a class")
    return found


def class_names(folder: Path) -> list[str]:
    """The sorted names of the class folders."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise Refusal(f"{folder} holds no folders; expected a folder of images a class, such as {folder}/cat/1.png")
    return names


def read_images(
    paths: Sequence[Path],
    size: int | None,
    mode: str,
    shape: list[Any] | None = None,
    on_image: OnImage | None = None,
) -> np.ndarray[Any, Any]:
    """Images as bytes [N, C, H, W], all of one size."""
    shape = [] if shape is None else shape
    stacked: np.ndarray[Any, Any] | None = None
    for i, path in enumerate(paths):
        pixels = read_image(path, size, mode)  # [C, H, W]
        if not shape:
            shape.append((str(path), pixels.shape[1:]))
        if pixels.shape[1:] != shape[0][1]:
            raise Refusal(
                f"{path} is {_by(pixels.shape[1:])} pixels and {shape[0][0]} is {_by(shape[0][1])}: give a size for all "
                f"images, such as --image-size {min(*pixels.shape[1:], *shape[0][1])}"
            )
        if stacked is None:
            stacked = np.empty((len(paths), *pixels.shape), np.uint8)
        stacked[i] = pixels
        if on_image is not None:
            on_image(i + 1, len(paths))
    return np.empty((0, MODES[mode], 0, 0), np.uint8) if stacked is None else stacked


def read_image(path: Path, size: int | None, mode: str) -> np.ndarray[Any, Any]:
    """One image as bytes [C, H, W]; with `size`, its short side becomes that long and the middle square is kept."""
    image_module, too_large = _pillow()
    try:
        with image_module.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise Refusal(
                    f"{path} has more than 8 bits a channel (mode {image.mode}); scale it by a public constant to 8 bits first"
                )
            if size is not None:
                image.draft(mode, (2 * size, 2 * size))  # JPEG: decode no larger than needed
            picture = image.convert(mode)
    except FileNotFoundError as error:
        raise Refusal(f"there is no image {path}") from error
    except (OSError, SyntaxError, ValueError, too_large) as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"{path} cannot be read as an image: {error}") from error
    if size is not None:
        short = min(picture.size)
        width, height = (max(size, round(side * size / short)) for side in picture.size)
        left, top = (width - size) // 2, (height - size) // 2
        picture = picture.resize((width, height), image_module.Resampling.BILINEAR)
        picture = picture.crop((left, top, left + size, top + size))
    pixels = np.asarray(picture, np.uint8)
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def _read_part(
    folder: Path, classes: list[str], size: int | None, mode: str, shape: list[Any], on_image: OnImage | None
) -> Pair:
    paths: list[Path] = []
    labels: list[int] = []
    for number, name in enumerate(classes):
        files = _image_files(folder / name) if (folder / name).is_dir() else []
        paths += files
        labels += [number] * len(files)
    if not paths:
        raise Refusal(f"the class folders of {folder} hold no images; expected {', '.join(SUFFIXES)}")
    images = read_images(paths, size, mode, shape, on_image)
    return torch.from_numpy(images.astype(np.float32)).div_(255), torch.tensor(labels, dtype=torch.long)


def _image_files(folder: Path) -> list[Path]:
    files = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name.lower() in IGNORED:
            continue
        if path.is_dir() or path.suffix.lower() not in SUFFIXES:
            raise Refusal(f"{path} is not an image; a class folder holds only {', '.join(SUFFIXES)}: move it elsewhere")
        files.append(path)
    return files


def _by(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} × {shape[0]}"


def _pillow() -> tuple[Any, type[Exception]]:
    try:
        from PIL import Image
    except ImportError as error:
        raise Refusal(
            "reading images needs Pillow, which is not installed; type: python -m pip install 'tptopk[images]'"
        ) from error
    return Image, Image.DecompressionBombError
