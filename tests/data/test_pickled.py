"""Pickle files are read as data and never run."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.made import Python2Pickler
from tptopk.data.pickled import read_pickled
from tptopk.privacy.refusal import Refusal

PLAIN = {
    "text": "ä",
    "bytes": b"\x00\xff",
    "numbers": [0, 1, 255, 256, -1, 2**40, 1.5, None, True, False],
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "twice": [[7]] * 2,
    "empty": [{}, []],
}


@pytest.mark.parametrize("protocol", range(5))
def test_plain_data_is_read_as_python_reads_it(tmp_path, protocol):
    path = tmp_path / "data"
    known = {**PLAIN, "bytes": "x"} if protocol < 3 else PLAIN  # older protocols write b"\xff" by a call of its own
    path.write_bytes(pickle.dumps(known, protocol=protocol))
    assert read_pickled(path) == known


@pytest.mark.parametrize("protocol", range(2, 5))
@pytest.mark.parametrize("kind", ["u1", "i8", "<f4", ">i4"])
def test_arrays_are_read_as_numpy_reads_them(tmp_path, protocol, kind):
    array = np.arange(24).reshape(2, 3, 4).astype(kind)
    for given_array in (array, np.asfortranarray(array), array[:0]):
        (tmp_path / "data").write_bytes(pickle.dumps([given_array], protocol=protocol))
        (read,) = read_pickled(tmp_path / "data")
        assert np.array_equal(read, given_array) and read.dtype == given_array.dtype


CPICKLE = (  # as Python 2's cPickle wrote the official batches
    b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x06K\x09eU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06"
    b"K\x00\x85U\x01b\x87Rq\x07(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09(K\x03U\x01|NNNJ\xff\xff\xff\xff"
    b"J\xff\xff\xff\xffK\x00tbI00\nU\x06abcdeftbu."
)


def test_what_python_2_wrote_is_read(tmp_path):
    (tmp_path / "data").write_bytes(CPICKLE)
    read = read_pickled(tmp_path / "data")
    assert read[b"labels"] == [6, 9] and read[b"data"].tolist() == [[97, 98, 99], [100, 101, 102]]


class Harmful:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_in_a_file_is_ever_called(tmp_path, protocol):
    target = tmp_path / "made-by-the-file"
    for harmful in (Harmful(os.mkdir, str(target)), Harmful(eval, f"__import__('os').mkdir({str(target)!r})")):
        (tmp_path / "data").write_bytes(pickle.dumps({"data": [harmful]}, protocol=protocol))
        with pytest.raises(Refusal, match="not plain data|more than plain data"):
            read_pickled(tmp_path / "data")
        assert not target.exists()


def test_objects_and_arrays_of_objects_are_refused(tmp_path):
    for value in (np.array([{}], dtype=object), Exception("x"), range(3), {1, 2}):
        (tmp_path / "data").write_bytes(pickle.dumps(value, protocol=2))
        with pytest.raises(Refusal):
            read_pickled(tmp_path / "data")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_spoilt_file_is_refused_or_read_but_never_crashes(tmp_path, data):
    path = tmp_path / "data"
    with open(path, "wb") as file:
        Python2Pickler(file, protocol=2).dump({b"data": np.zeros((2, 3), np.uint8), b"labels": [1, 2], b"n": (b"a",)})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
    path.write_bytes(bytes(content))
    try:
        read_pickled(path)
    except Refusal as refusal:
        assert str(path) in str(refusal)
