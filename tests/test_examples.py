"""Examples that need a package beside ours run as they are, where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS = {
    "tensorboard_metrics.py": "tensorboard",
    "hugging_face_loop.py": "transformers",
    "hugging_face_trainer.py": "accelerate",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "needed"), NEEDS.items())
def test_the_example_trains_privately_and_says_what_it_cost(name, needed, tmp_path):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{name} needs {needed}, which is not installed")
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "at ε = " in done.stdout
