"""Run every mutant against the tests that must catch it, each in a process of its own; print the outcomes as JSON.

The processes are forked from this one once it has imported what is slow to import, and before anything is computed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile

import hypothesis  # noqa: F401
import pytest
import scipy.stats  # noqa: F401
import torch._dynamo  # noqa: F401  # what every optimizer imports when it is made

from tests.mutants.mutants import MUTANTS

OPTIONS = ["-p", "tests.mutants.plugin", "-p", "no:cacheprovider", "-q", "-n", "0", "--tb=no", "-rf"]


def run(name: str | None, tests: list[str], output: int) -> None:
    """In the child: pytest, with everything it prints going to the file."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = pytest.main([*OPTIONS, *(["--mutant", name] if name else []), *tests])
    sys.stdout.flush()  # `_exit` does not
    os._exit(code)


def outcome(name: str | None, tests: list[str]) -> tuple[int | None, str]:
    """Exit code and output of pytest on these tests, on the mutant or (None) on the shipped code."""
    with tempfile.TemporaryFile("w+") as file:
        child = multiprocessing.get_context("fork").Process(target=run, args=(name, tests, file.fileno()))
        child.start()
        child.join()
        file.seek(0)
        return child.exitcode, file.read()


if __name__ == "__main__":
    everything = sorted({test for mutant in MUTANTS.values() for test in mutant.caught_by})
    outcomes = {"": outcome(None, everything)}
    outcomes |= {name: outcome(name, list(MUTANTS[name].caught_by)) for name in sys.argv[1:] or MUTANTS}
    print(json.dumps(outcomes))
