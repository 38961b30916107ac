"""Scattering features of a benchmark, made once: nothing is learnt from the data, so they cost no privacy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from tptopk.data import load
from tptopk.models.scattering import Scattering

PIECE = {"cpu": 16, "cuda": 2048}  # images transformed at once


@dataclass(frozen=True)
class Features:
    """[N, V, channels, h, w] features of V views of each image, class numbers [N], and public scales of the channels."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    scale: Tensor
    digest: str  # of all images and labels as they were read


@lru_cache(maxsize=1)
def features(dataset: str, data_dir: str | None, views: int, shift: int, records: int | None, device: str) -> Features:
    """What `seen` makes of each image; of the training set the first `records`, and of the test set as many."""
    (x, y), (x_test, y_test) = load(dataset, data_dir)
    place = torch.device(device)
    transform = Scattering(*x.shape[2:]).to(place)

    def transformed(images: Tensor) -> Tensor:
        of_one = transform(seen(images[:1], views, shift)[0].to(place))
        shape = (len(images), *of_one.shape)
        found = torch.empty(shape, device=place)  # gigabytes: written in place, not put together from pieces
        for into, piece in zip(*(torch.split(whole, PIECE[place.type]) for whole in (found, images)), strict=True):
            for view, image in enumerate(seen(piece, views, shift).unbind(1)):
                into[:, view] = transform(image.to(place))
        return found

    with torch.no_grad():
        return Features(
            transformed(x[:records]),
            y[:records].to(place),
            transformed(x_test[:records]),
            y_test[:records].to(place),
            public_scale(x.shape[1], tuple(x.shape[2:]), device),
            digest_of(x, y, x_test, y_test),
        )


def seen(images: Tensor, views: int, shift: int) -> Tensor:
    """[N, V, …]: each image, and its mirror if there are 2 views; of each of these, moved, two if there is a shift.

    What a move leaves bare has the values of the nearest edge. The mirror is of moved images: all four diagonals are there.
    """
    if shift:
        height, width = images.shape[-2:]
        wide = F.pad(images, [shift] * 4, mode="replicate")
        moved = [wide[..., at : at + height, at : at + width] for at in (2 * shift, 0)]
    else:
        moved = [images]
    return torch.stack([*moved, *(image.flip(-1) for image in moved)][: views * len(moved)], 1)


def digest_of(*tensors: Tensor) -> str:
    """The same for the same bytes of images and the same classes, in the same order, however their files were packed."""
    found = hashlib.sha256()
    for tensor in tensors:
        whole = (tensor * 255).round().to(torch.uint8) if tensor.is_floating_point() else tensor
        found.update(repr(tuple(whole.shape)).encode() + whole.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def public_scale(channels: int, size: tuple[int, ...], device: str) -> Tensor:
    """How large each feature usually is, from made-up images with the 1/f spectrum of natural ones: no data is read."""
    transform = Scattering(*size).to(device)
    typical: Tensor = transform(pink_images(256, size).to(device)).mean((0, 2, 3))
    return typical.repeat(channels)


def pink_images(count: int, size: tuple[int, ...]) -> Tensor:
    """[count, 1, *size] of mean .5 and deviation .25, amplitudes falling with frequency."""
    noise = torch.rand(count, 1, *size, generator=torch.Generator().manual_seed(0)) - 0.5
    frequency = (torch.fft.fftfreq(size[0])[:, None] ** 2 + torch.fft.fftfreq(size[1])[None] ** 2).sqrt()
    frequency[0, 0] = 1 / min(size)
    image: Tensor = torch.fft.ifft2(torch.fft.fft2(noise) / frequency).real
    image = image - image.mean((2, 3), keepdim=True)
    return (0.5 + 0.25 * image / image.std((2, 3), keepdim=True)).clamp(0, 1)
