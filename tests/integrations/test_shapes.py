"""Each shape of somebody else's library stands alone."""

from __future__ import annotations

import pytest

from tests.test_rooms import FILES, SOURCE, imports

ROOM = SOURCE / "integrations"
SHAPES = {"opacus", "hugging_face", "sklearn"}


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_using_one_shape_loads_no_other(shape):
    files = [f for f in FILES if f.is_relative_to(ROOM / shape) or f == ROOM / f"{shape}.py"]
    shared = [f for f in FILES if f.parent == ROOM and f.stem not in SHAPES]
    assert files
    for path in files + shared:
        found = {name.split(".")[2] for name in imports(path) if name.startswith("tptopk.integrations.")}
        assert not found & (SHAPES - {shape} if path in files else SHAPES), path
