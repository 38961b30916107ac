"""What is published about the benchmarks: sizes, channel statistics, addresses and checksums. None of it is read from private data."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, tensor

from tptopk.privacy.refusal import Refusal


@dataclass(frozen=True)
class RemoteFile:
    """A file to download: its address, its published checksum and, where that is published too, its size in bytes."""

    url: str
    md5: str
    size: int | None = None

    @property
    def name(self) -> str:
        return self.url.partition("?")[0].rpartition("/")[2]


@dataclass(frozen=True)
class Benchmark:
    """A public dataset: the folder under --data-dir that its official download has, and where that comes from.

    `files` is empty where no checksum is published; `unpacked` are the files that an archive's folder must hold.
    """

    title: str
    folder: str
    page: str
    files: tuple[RemoteFile, ...] = ()
    unpacked: tuple[str, ...] = ()
    classes: int | None = None
    training: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


def _idx_files(base: str, *entries: tuple[str, int]) -> tuple[RemoteFile, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        RemoteFile(f"{base}{name}-ubyte.gz", md5, size) for name, (md5, size) in zip(names, entries, strict=True)
    )


MEDMNIST_RECORD = "https://zenodo.org/record/6496656/files/"

BENCHMARKS = {
    "mnist": Benchmark(
        "MNIST",
        "MNIST/raw",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        _idx_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
            ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
            ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
            ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
        ),
        classes=10,
        training=60_000,
        mean=(0.1307,),
        std=(0.3081,),
    ),
    "fmnist": Benchmark(
        "Fashion-MNIST",
        "FashionMNIST/raw",
        "https://github.com/zalandoresearch/fashion-mnist",
        _idx_files(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
            ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
            ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
            ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
        ),
        classes=10,
        training=60_000,
        mean=(0.2860,),
        std=(0.3530,),
    ),
    "cifar10": Benchmark(
        "CIFAR-10",
        "cifar-10-batches-py",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (
            RemoteFile(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                "c58f30108f718f92721af3b95e74349a",
                170_498_071,
            ),
        ),
        unpacked=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
        classes=10,
        training=50_000,
        mean=(0.49140, 0.48216, 0.44653),
        std=(0.24703, 0.24349, 0.26159),
    ),
    "eyepacs": Benchmark(
        "EyePACS",
        "eyepacs",
        "https://www.kaggle.com/c/diabetic-retinopathy-detection/data",
        classes=2,
    ),
}

# MedMNIST 2.1, one archive each: the checksums that its authors publish in medmnist/info.py.
MEDMNIST = {
    "pathmnist": "a8b06965200029087d5bd730944a56c1",
    "chestmnist": "02c8a6516a18b556561a56cbdd36c4a8",
    "dermamnist": "0744692d530f8e62ec473284d019b0c7",
    "octmnist": "c68d92d5b585d8d81f7112f81e2d0842",
    "pneumoniamnist": "28209eda62fecd6e6a2d98b1501bb15f",
    "retinamnist": "bd4c0672f1bba3e3a89f0e4e876791e4",
    "breastmnist": "750601b1f35ba3300ea97c75c52ff8f6",
    "bloodmnist": "7053d0359d879ad8a5505303e11de1dc",
    "tissuemnist": "ebe78ee8b05294063de985d821c1c34b",
    "organamnist": "866b832ed4eeba67bfb9edee1d5544e6",
    "organcmnist": "0afa5834fb105f7705a7d93372119a21",
    "organsmnist": "e5c39f1af030238290b9557d9503af9d",
}
BENCHMARKS.update(
    {
        name: Benchmark(
            name,
            "",
            "https://medmnist.com",
            (RemoteFile(f"{MEDMNIST_RECORD}{name}.npz?download=1", md5),),
            training=4_708 if name == "pneumoniamnist" else None,
        )
        for name, md5 in MEDMNIST.items()
    }
)


def is_benchmark(name: str) -> bool:
    """Whether this is the name of a benchmark, and not of a file or folder; MedMNIST's larger sizes end in _64, _128, _224."""
    return name in BENCHMARKS or re.sub(r"_\d+$", "", name) in MEDMNIST


def published_size(name: str) -> int | None:
    """The number of training records where that is a published number; None where a user has to declare it."""
    return BENCHMARKS[name].training if name in BENCHMARKS else None


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Where benchmarks are: what was given, or TPTOPK_DATA, or the folder `data`."""
    return Path(data_dir or os.environ.get("TPTOPK_DATA") or "data")


def missing(name: str, found_no: str, folder: Path) -> Refusal:
    """The refusal for a dataset that is not there: what is missing where, and what to type."""
    benchmark = BENCHMARKS.get(name)
    if benchmark is not None and benchmark.files:
        get = f"type: tptopk data fetch {name} --data-dir {folder}"
    else:
        get = f"it has to be downloaded by hand, from {benchmark.page if benchmark else 'https://medmnist.com'}"
    title = benchmark.title if benchmark else name
    return Refusal(
        f"there is no {title} in {folder}: no {found_no}; {get}; or name the folder that has it, with --data-dir DIR "
        "(data_dir=) or TPTOPK_DATA"
    )


def normalised(inputs: Tensor, name: str) -> Tensor:
    """Images [N, C, H, W] in [0, 1], less the benchmark's published channel means, over its published deviations."""
    benchmark = BENCHMARKS.get(name)
    if benchmark is None or benchmark.mean is None or benchmark.std is None:
        known = ", ".join(sorted(n for n, b in BENCHMARKS.items() if b.mean is not None))
        raise Refusal(
            f"there are no published channel statistics for {name!r}, only for {known}; statistics of private data would "
            "have to be charged: scale by constants of your own, such as (x - 0.5) / 0.5"
        )
    if inputs.ndim != 4 or inputs.shape[1] != len(benchmark.mean):
        raise Refusal(f"{benchmark.title} has images [N, {len(benchmark.mean)}, H, W]; given {tuple(inputs.shape)}")
    mean = tensor(benchmark.mean).reshape(1, -1, 1, 1)  # [1, C, 1, 1]
    return (inputs - mean) / tensor(benchmark.std).reshape(1, -1, 1, 1)
