"""The privacy tests are counted, to the last one: one that silently disappears is noticed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = (
    "tests/privacy",
    "tests/supports",
    "tests/gradients",
    "tests/training",
    "tests/mutants",
    "tests/experiments/test_audit.py",
)


def test_as_many_privacy_tests_are_collected_as_the_privacy_page_states():
    stated = re.search(r"privacy tests: (\d+)", (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8"))
    assert stated is not None
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n", "0", "-p", "no:cacheprovider", *PLACES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    collected = sum("::" in line for line in done.stdout.splitlines())
    assert collected == int(stated[1]), (
        f"docs/privacy.md counts {stated[1]} privacy tests, and {collected} are collected from {', '.join(PLACES)}: if that is what "
        f"you meant, write `privacy tests: {collected}` there. (Some need what `make test` installs, Opacus for one.)"
    )
