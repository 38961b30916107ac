"""Folders of images: mixed sizes, mixed modes, damaged files."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.made import make_image
from tptopk.data.images import read_folder, read_image
from tptopk.privacy.refusal import Refusal


def test_classes_are_the_sorted_folder_names(tmp_path):
    for part, count in (("train", 3), ("test", 1)):
        for number, name in enumerate(("cat", "ant")):
            for i in range(count):
                make_image(tmp_path / part / name / f"{i}.png", colour=(100 * number, 0, 255))
    (tmp_path / "train" / "ant" / ".DS_Store").write_bytes(b"")
    seen = []
    (inputs, targets), test = read_folder(tmp_path, on_image=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 6), (2, 6), (3, 6), (4, 6), (5, 6), (6, 6), (1, 2), (2, 2)]
    assert inputs.shape == (6, 3, 8, 8) and targets.tolist() == [0, 0, 0, 1, 1, 1] and test[1].tolist() == [0, 1]
    assert inputs[0, :, 0, 0].tolist() == pytest.approx([100 / 255, 0, 1]) and inputs[3, 0, 0, 0] == 0


def test_one_folder_is_a_training_set(tmp_path):
    make_image(tmp_path / "a" / "1.jpg")
    make_image(tmp_path / "b" / "1.JPEG")
    training, test = read_folder(tmp_path, mode="L")
    assert training[0].shape == (2, 1, 8, 8) and test is None


def test_mixed_sizes_need_a_size(tmp_path):
    make_image(tmp_path / "a" / "1.png", (30, 20))
    make_image(tmp_path / "b" / "1.png", (16, 40))
    with pytest.raises(Refusal, match=r"16 × 40.*30 × 20.*--image-size 16"):
        read_folder(tmp_path)
    for size in (16, 50):
        assert read_folder(tmp_path, size=size)[0][0].shape == (2, 3, size, size)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "CMYK"])
def test_modes_are_converted(tmp_path, mode):
    make_image(tmp_path / f"1.{'jpg' if mode == 'CMYK' else 'png'}", mode=mode)
    (path,) = tmp_path.iterdir()
    assert read_image(path, None, "RGB").shape == (3, 8, 8) and read_image(path, None, "L").shape == (1, 8, 8)


def test_the_middle_square_is_kept(tmp_path):
    pixels = np.zeros((10, 30), np.uint8)
    pixels[:, 10:20] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    assert (read_image(tmp_path / "wide.png", 10, "L") == 200).all()


def test_what_is_no_image_is_refused_by_name(tmp_path):
    make_image(tmp_path / "a" / "1.png", (64, 64))
    whole = (tmp_path / "a" / "1.png").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"text"):
        (tmp_path / "a" / "1.png").write_bytes(content)
        with pytest.raises(Refusal, match=r"1\.png cannot be read as an image"):
            read_folder(tmp_path)
    Image.fromarray(np.full((4, 4), 60_000, np.uint16)).save(tmp_path / "a" / "1.png")
    with pytest.raises(Refusal, match="more than 8 bits"):
        read_folder(tmp_path)
    (tmp_path / "a" / "notes.txt").write_text("x")
    (tmp_path / "a" / "1.png").unlink()
    with pytest.raises(Refusal, match=r"notes\.txt is not an image"):
        read_folder(tmp_path)


def test_folders_without_classes_or_images_are_refused(tmp_path):
    with pytest.raises(Refusal, match="there is no folder"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(Refusal, match="holds no folders"):
        read_folder(tmp_path)
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(Refusal, match="hold no images"):
        read_folder(tmp_path)
    make_image(tmp_path / "train" / "a" / "1.png")
    make_image(tmp_path / "test" / "b" / "1.png")
    with pytest.raises(Refusal, match="a class that .* does not have; it has a"):
        read_folder(tmp_path)
    with pytest.raises(Refusal, match="did you mean 'RGB'"):
        read_folder(tmp_path, mode="RGBA")
    with pytest.raises(Refusal, match="image_size is 0"):
        read_folder(tmp_path, size=0)


def test_a_test_set_without_one_of_the_classes_keeps_the_numbers(tmp_path):
    for path in ("train/a/1.png", "train/b/1.png", "test/b/1.png"):
        make_image(tmp_path / path)
    assert read_folder(tmp_path)[1][1].tolist() == [1]


def test_without_pillow_the_refusal_says_what_to_install(tmp_path, monkeypatch):
    make_image(tmp_path / "a" / "1.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(Refusal, match=r"tptopk\[images\]"):
        read_folder(tmp_path)


def test_images_are_the_same_whatever_else_is_in_the_folder(tmp_path):
    """No statistic of the data: an image's values do not depend on the others."""
    make_image(tmp_path / "a" / "1.png")
    alone = read_folder(tmp_path)[0][0][0]
    make_image(tmp_path / "a" / "2.png", colour=(255, 255, 255))
    assert torch.equal(read_folder(tmp_path)[0][0][0], alone)
