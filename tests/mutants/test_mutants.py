"""The ordinary suite catches every mutant: each test named for it fails, by an assertion, and passes on the shipped code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def outcomes() -> dict[str, tuple[int, str]]:
    """Mutant → exit code and output of its tests; "" → of all the named tests on the shipped code."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"COLUMNS": "1000", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.mutants"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_named_tests_pass_on_the_shipped_code(outcomes):
    code, output = outcomes[""]
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name, outcomes):
    code, output = outcomes[name]
    assert code == 1, output  # 0: it survived; 2 to 5: the tests did not run
    failed = dict(re.findall(r"^FAILED (\S+) - (.*)$", output, re.MULTILINE))
    assert set(failed) == set(MUTANTS[name].caught_by), output
    for reason in failed.values():  # a mutant that merely crashes shows nothing
        assert re.match(r"AssertionError|assert |Failed: DID NOT RAISE", reason), output
