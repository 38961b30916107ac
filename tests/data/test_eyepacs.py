"""EyePACS in its competition's layout, with made-up photographs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.data.made import make_image
from tptopk.data import load
from tptopk.data.eyepacs import load_eyepacs
from tptopk.privacy.refusal import Refusal

PATIENTS = 40


@pytest.fixture
def root(tmp_path):
    lines = ["image,level"]
    for patient in range(PATIENTS):
        for side in ("left", "right"):
            make_image(
                tmp_path / "eyepacs" / "train" / f"{patient}_{side}.jpeg",
                (24 + patient % 3, 16),
                colour=(5 * patient,) * 3,
            )
            lines.append(f"{patient}_{side},{patient % 5}")
    (tmp_path / "eyepacs" / "trainLabels.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def patient_of(image: torch.Tensor) -> int:
    return round(float(image.mean() * 255 / 5))


def test_any_retinopathy_is_the_label_and_no_person_is_on_both_sides(root):
    training, test = load("eyepacs", root, image_size=8)
    assert training[0].shape[1:] == (3, 8, 8) and len(training[1]) + len(test[1]) == 2 * PATIENTS
    people = [{patient_of(image) for image in inputs} for inputs, _ in (training, test)]
    assert not people[0] & people[1] and people[1], "a made-up photograph is as bright as its patient's number"
    for inputs, targets in (training, test):
        assert targets.tolist() == [int(patient_of(image) % 5 > 0) for image in inputs]


def test_the_competitions_own_test_set_is_used_where_it_is(root):
    make_image(root / "eyepacs" / "test" / "900_left.jpeg", (20, 20))
    (root / "eyepacs" / "retinopathy_solution.csv").write_text("image,level,Usage\n900_left,3,Private\n")
    training, test = load_eyepacs(root, 8)
    assert len(training[1]) == 2 * PATIENTS and test[1].tolist() == [1]


def test_resized_photographs_are_cached_under_a_name_that_says_how(root, monkeypatch):
    first = load_eyepacs(root, 8)
    kept = sorted(path.name for path in (root / "eyepacs" / ".cache").iterdir())
    assert len(kept) == 2 and all("any-dr-8px-rgb" in name for name in kept)
    with monkeypatch.context() as without:
        without.setattr("tptopk.data.eyepacs.read_images", lambda *_, **__: pytest.fail("decoded again"))
        again = load_eyepacs(root, 8)
    assert torch.equal(first[0][0], again[0][0]) and torch.equal(first[1][1], again[1][1])
    load_eyepacs(root, 10, cache_dir=root / "elsewhere")
    assert len(list((root / "elsewhere").iterdir())) == 2


def test_a_spoilt_or_stale_cache_is_made_anew(root):
    first = load_eyepacs(root, 8)
    for path in (root / "eyepacs" / ".cache").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(load_eyepacs(root, 8)[0][0], first[0][0])
    for path in (root / "eyepacs" / ".cache").iterdir():
        np.savez(path, images=np.zeros((1, 3, 8, 8), np.uint8))
    assert torch.equal(load_eyepacs(root, 8)[0][0], first[0][0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("900_left,", "1 of 81 records have no level from 0 to 4"),
        ("900_left,5", "1 of 81 records have no level from 0 to 4"),
        ("900_left,1", "1 of 81 photographs .* the first is 900_left.jpeg"),
        ("0_left,1", "1 photographs are named more than once"),
        ("../secret,1", "1 names of photographs are paths"),
        ("900_left", "line 82: 1 values"),
    ],
)
def test_bad_labels_are_refused_with_their_number(root, line, message):
    with open(root / "eyepacs" / "trainLabels.csv", "a") as file:
        file.write(line + "\n")
    with pytest.raises(Refusal, match=message):
        load_eyepacs(root, 8)


def test_a_damaged_photograph_is_named(root):
    (root / "eyepacs" / "train" / "7_left.jpeg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(Refusal, match=r"7_left\.jpeg cannot be read"):
        load_eyepacs(root, 8)
