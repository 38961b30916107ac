"""The walls of the house: which room may import which, and who may make noise."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tptopk"
TRAINING = {"privacy", "supports", "gradients"}
ALLOWED = {
    "privacy": set(),
    "supports": {"privacy"},
    "gradients": {"supports", "privacy"},
    "training": TRAINING,
    "data": {"privacy"},
    "models": set(),
    "theory": {"privacy", "supports"},
    "diagnostics": {"privacy", "supports", "theory"},
    "settings": {"data", "privacy", "models"},
    "experiments": {*TRAINING, "training", "data", "models", "theory", "diagnostics"},
    "integrations": {*TRAINING, "training", "models", "data"},
    "report": {*TRAINING, "training", "theory", "experiments"},
    "cli": {*TRAINING, "training", "data", "models", "report", "settings", "experiments", "theory"},
}
FILES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        found |= set(names)
    return found


@pytest.mark.parametrize("path", [f for f in FILES if room(f) in ALLOWED], ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_keep_to_the_rooms(path):
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("tptopk.")}
    assert ours <= ALLOWED[room(path)] | {room(path)}
    if room(path) == "gradients":
        assert not {n for n in imports(path) if n.startswith("tptopk.supports") and n != "tptopk.supports.support"}


def test_every_file_is_in_a_room():
    assert {room(path) for path in FILES} - set(ALLOWED) == {"__init__", "__main__"}


def test_only_accounting_imports_dp_accounting():
    assert [p.name for p in FILES if any(n.split(".")[0] == "dp_accounting" for n in imports(p))] == ["accounting.py"]


def test_the_reference_imports_no_rule():
    path = SOURCE / "gradients" / "reference.py"
    assert {n for n in imports(path) if n.startswith("tptopk")} == {
        "tptopk.gradients.examples",
        "tptopk.supports.support",
    }


def calls(path: Path, *names: str) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in names:
                return True
    return False


def test_only_the_mechanism_makes_private_gradients():
    assert [p.name for p in FILES if calls(p, "PrivateGradient")] == ["mechanism.py"]


def test_only_the_mechanism_draws_noise():
    """Normal numbers are drawn by the mechanism, from streams; the probe's made-up examples are no data of anybody's."""
    assert [p.name for p in FILES if calls(p, "normal")] == ["mechanism.py"]
    assert [p.name for p in FILES if calls(p, "randn", "standard_normal", "randn_like", "normal_")] == [
        "probe.py",
        "randomness.py",
    ]


def test_nothing_is_pickled():
    for path in FILES:
        assert not imports(path) & {"pickle", "dill", "cloudpickle", "joblib", "shelve"}
        assert "torch.save" not in path.read_text() and "torch.load" not in path.read_text()
