"""Scripts written for Opacus run with one line changed, and back."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
OURS, THEIRS = "from tptopk.integrations.opacus import PrivacyEngine\n", "from opacus import PrivacyEngine\n"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script; the ε that it reports last, and its accuracy."""

    def running(path: Path) -> tuple[float, float]:
        less = ["--records", "400", "--batch-size", "100"] if "cifar" in path.name else []
        monkeypatch.setattr(sys, "argv", [str(path), "--epochs", "2", *less])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(path), run_name="__main__")
        said = capsys.readouterr().out
        return float(re.findall(r"ε = ([\d.]+)", said)[-1]), float(re.findall(r"accuracy ([\d.]+)", said)[0])

    return running


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opacus_mnist.py", "opacus_cifar.py", "opacus_text.py"])
def test_an_example_runs_here_and_with_its_import_changed_in_opacus(name, tmp_path, run):
    pytest.importorskip("opacus")
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    assert source.count(OURS) == 1 and source.count("tptopk") == 1  # nothing else is ours
    (tmp_path / name).write_text(source.replace(OURS, THEIRS), encoding="utf-8")
    epsilon, accuracy = run(EXAMPLES / name)
    their_epsilon, _ = run(tmp_path / name)
    assert epsilon == pytest.approx(their_epsilon, rel=0.02)  # two accountants, each an upper bound
    assert 0 <= accuracy <= 1
