"""The wheel holds everything, installs by itself, and trains where nothing of the clone can be seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the clone."""
    pytest.importorskip("setuptools", "77", reason="the build backend is not installed, and nothing is downloaded here")
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", place, source, cwd=place)  # fmt: skip
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    package = {
        f.relative_to(ROOT / "src").as_posix()
        for f in (ROOT / "src" / "tptopk").rglob("*")
        if f.is_file() and "__pycache__" not in f.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert package == {name for name in names if not name.startswith(f"tptopk-{VERSION}.dist-info/")}
    assert "tptopk/py.typed" in names and f"tptopk-{VERSION}.dist-info/licenses/LICENSE" in names


@pytest.mark.slow
def test_the_installed_wheel_trains_in_an_empty_folder(installed, tmp_path):
    found = "import tptopk; print(tptopk.__file__, tptopk.__version__)"
    where, version = run(sys.executable, "-c", found, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert Path(where).is_relative_to(installed) and version == VERSION
    words = ("train", "--accountant", "rdp", "--steps", "5", "--json")
    said = run(sys.executable, "-m", "tptopk", *words, cwd=tmp_path, PYTHONPATH=str(installed), OMP_NUM_THREADS="1")
    outcome = json.loads(said)
    assert outcome["status"] == "finished" and outcome["versions"]["tptopk"] == VERSION
    assert (tmp_path / outcome["folder"] / "model.safetensors").exists()
    script = installed / "bin" / "tptopk"
    assert run(sys.executable, script, "--version", cwd=tmp_path, PYTHONPATH=str(installed)) == f"tptopk {VERSION}\n"


@pytest.mark.slow
def test_shell_completion_installs_and_completes(installed, tmp_path):
    command = (sys.executable, installed / "bin" / "tptopk")
    home = {"HOME": str(tmp_path), "PYTHONPATH": str(installed), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    run(*command, "--install-completion", "bash", cwd=tmp_path, **home)
    assert "_TPTOPK_COMPLETE" in (tmp_path / ".bash_completions" / "tptopk.sh").read_text()
    assert "tptopk.sh" in (tmp_path / ".bashrc").read_text()
    typed = {"_TPTOPK_COMPLETE": "complete_bash", "COMP_WORDS": "tptopk ver", "COMP_CWORD": "1"}
    assert run(*command, cwd=tmp_path, **home, **typed).split() == ["verify"]
