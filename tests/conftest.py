"""What every test needs and none should have to ask for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_module_outlives_its_test(tmp_path_factory):
    """Two tests may each write a `mynet.py` into their folder; without this the second would import the first one's."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path_factory.getbasetemp()):
            del sys.modules[name]
