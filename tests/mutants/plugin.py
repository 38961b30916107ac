"""`-p tests.mutants.plugin --mutant NAME`: run any tests on a mutant."""

from __future__ import annotations

import pytest

from tests.mutants.mutants import MUTANTS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mutant", choices=sorted(MUTANTS), help="break the shipped code this way before collecting tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("--mutant"):
        MUTANTS[name].apply()
