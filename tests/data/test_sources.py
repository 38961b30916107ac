"""Benchmarks by name, and whatever else `--data` may name."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from tests.data.made import make_cifar10, make_image, make_medmnist, make_mnist
from tptopk.data import load, normalised
from tptopk.data.constants import BENCHMARKS, data_folder, published_size
from tptopk.data.sources import read_source, read_source_inputs
from tptopk.privacy.refusal import Refusal

REAL = os.environ.get("TPTOPK_DATA")
PUBLISHED = {  # training, test, image
    "mnist": (60_000, 10_000, (1, 28, 28)),
    "fmnist": (60_000, 10_000, (1, 28, 28)),
    "cifar10": (50_000, 10_000, (3, 32, 32)),
    "pneumoniamnist": (4_708, 624, (1, 28, 28)),
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with every benchmark, in place of whatever the environment names."""
    monkeypatch.delenv("TPTOPK_DATA", raising=False)
    make_mnist(tmp_path)
    make_mnist(tmp_path, "FashionMNIST", zipped=False)
    make_cifar10(tmp_path)
    make_medmnist(tmp_path / "pneumoniamnist.npz")
    make_medmnist(tmp_path / "bloodmnist_64.npz", colour=True, shape=(64, 64))
    make_medmnist(tmp_path / "newmnist.npz")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "training", "test", "image"),
    [
        ("mnist", 20, 8, (1, 28, 28)),
        ("fmnist", 20, 8, (1, 28, 28)),
        ("cifar10", 20, 4, (3, 32, 32)),
        ("pneumoniamnist", 12, 5, (1, 28, 28)),
        ("bloodmnist_64", 12, 5, (3, 64, 64)),
        ("newmnist", 12, 5, (1, 28, 28)),
    ],
)
def test_every_benchmark_is_floats_up_to_one_and_class_numbers(root, name, training, test, image):
    pairs = load(name, root)
    assert [tuple(inputs.shape) for inputs, _ in pairs] == [(training, *image), (test, *image)]
    for inputs, targets in pairs:
        assert inputs.dtype == torch.float32 and inputs.min() >= 0 and 0.9 < inputs.max() <= 1
        assert targets.dtype == torch.int64 and targets.shape == inputs.shape[:1]


def test_the_folder_comes_from_the_argument_then_the_environment(root, monkeypatch, tmp_path):
    monkeypatch.setenv("TPTOPK_DATA", str(root))
    assert len(load("mnist")[0][1]) == 20
    assert data_folder("elsewhere").name == "elsewhere"
    with pytest.raises(Refusal, match="no MNIST in elsewhere"):
        load("mnist", "elsewhere")


@pytest.mark.parametrize("name", ["mnist", "fmnist", "cifar10", "pneumoniamnist"])
def test_a_missing_benchmark_says_what_to_type(tmp_path, name):
    with pytest.raises(Refusal, match=f"tptopk data fetch {name} --data-dir {tmp_path}"):
        load(name, tmp_path)


def test_what_cannot_be_fetched_says_where_it_is(tmp_path):
    with pytest.raises(Refusal, match="kaggle.com/c/diabetic-retinopathy-detection"):
        load("eyepacs", tmp_path)
    with pytest.raises(Refusal, match="by hand, from https://medmnist.com"):
        load("bloodmnist_64", tmp_path)


def test_unknown_names_get_a_hint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ask in (load, read_source):
        with pytest.raises(Refusal, match="did you mean 'cifar10'"):
            ask("cifar-10")
    with pytest.raises(Refusal, match="only eyepacs and folders"):
        load("mnist", tmp_path, image_size=32)


def test_published_sizes_are_known_for_public_benchmarks_only():
    assert {name: published_size(name) for name in PUBLISHED} == {name: sizes[0] for name, sizes in PUBLISHED.items()}
    assert published_size("eyepacs") is None and published_size("mine.npz") is None


def test_normalising_uses_published_constants_alone():
    images = torch.rand(5, 3, 4, 4)
    assert torch.allclose(normalised(images, "cifar10")[:, 0], (images[:, 0] - 0.49140) / 0.24703)
    assert torch.equal(normalised(images, "cifar10")[:2], normalised(images[:2], "cifar10")), (
        "no statistics of the batch"
    )
    with pytest.raises(Refusal, match="would have to be charged"):
        normalised(images, "eyepacs")
    with pytest.raises(Refusal, match="3, H, W"):
        normalised(images[:, :1], "cifar10")


def test_a_source_is_a_benchmark_a_file_or_a_folder(root, monkeypatch):
    monkeypatch.chdir(root)
    (root / "table.csv").write_text("age,ill\n30,no\n60,yes\n")
    (root / "table.toml").write_text(
        'target = "ill"\nclasses = ["no", "yes"]\ntest = "later.csv"\n[numeric]\nage = [0, 120]\n'
    )
    (root / "later.csv").write_text("age,ill\n90,no\n")
    (root / "unlabelled.csv").write_text("age\n90\n")
    for name in ("cat", "dog"):
        make_image(root / "pets" / name / "1.png")
    np.savez(root / "mine.npz", x_train=np.zeros((3, 2)), y_train=np.zeros(3, int), x=np.zeros((7, 2)))
    sizes = {
        source: [None if pair is None else len(pair[1]) for pair in read_source(source, data_dir=str(root))]
        for source in ("digits", "mnist", "pneumoniamnist.npz", "table.csv", "pets", "mine.npz")
    }
    assert sizes == {
        "digits": [1437, 360],
        "mnist": [20, 8],
        "pneumoniamnist.npz": [12, 5],
        "table.csv": [2, 1],
        "pets": [2, None],
        "mine.npz": [3, None],
    }
    inputs = {
        source: len(
            read_source_inputs(source, data_dir=str(root), schema="table.toml" if source == "unlabelled.csv" else None)
        )
        for source in ("digits", "mnist", "pneumoniamnist.npz", "unlabelled.csv", "pets", "mine.npz")
    }
    assert list(inputs.values()) == [360, 8, 5, 1, 2, 7]
    for ask in (read_source, read_source_inputs):
        with pytest.raises(Refusal, match="mine.npz is an archive that has no use for --schema"):
            ask("mine.npz", schema="table.toml")
        with pytest.raises(Refusal, match="table.csv is a table that has no use for --image-size"):
            ask("table.csv", image_size=8)
        with pytest.raises(Refusal, match="mnist is a benchmark that has no use for --image-mode"):
            ask("mnist", image_mode="L")
    with pytest.raises(Refusal, match="needs a schema.*--schema"):
        read_source("later.csv")
    with pytest.raises(Refusal, match="there is no table tables.csv; did you mean table.csv"):
        read_source("tables.csv")
    (root / "table.toml").write_text(
        'target = "sick"\nclasses = ["no", "yes"]\ntest = "later.csv"\n[numeric]\nage = [0, 120]\n'
    )
    with pytest.raises(Refusal, match="^table.csv has no column 'sick'"):
        read_source("table.csv")


@pytest.mark.skipif(REAL is None, reason="TPTOPK_DATA does not name a folder with the real benchmarks")
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_real_benchmarks_have_their_published_sizes_and_statistics(name):
    try:
        (inputs, targets), (test_inputs, _) = load(name)
    except Refusal as refusal:
        if "there is no" not in str(refusal):
            raise
        pytest.skip(str(refusal))
    training, test, image = PUBLISHED[name]
    assert tuple(inputs.shape) == (training, *image) and tuple(test_inputs.shape) == (test, *image)
    if name == "pneumoniamnist":
        assert targets.bincount().tolist() == [1214, 3494]
        return
    mean, std = BENCHMARKS[name].mean, BENCHMARKS[name].std
    channels = inputs.transpose(0, 1).flatten(1).double()
    assert channels.mean(1).tolist() == pytest.approx(mean, abs=1e-4)
    assert channels.std(1).tolist() == pytest.approx(std, abs=1e-4)
