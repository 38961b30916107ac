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


MECHANISM, RANDOMNESS, MADE_UP = "training/mechanism.py", "privacy/randomness.py", "gradients/made_up.py"


def named(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


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


@pytest.mark.parametrize("path", [f for f in FILES if room(f) in ALLOWED], ids=named)
def test_imports_keep_to_the_rooms(path):
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("tptopk.")}
    assert ours <= ALLOWED[room(path)] | {room(path)}
    if room(path) == "gradients":
        assert not {n for n in imports(path) if n.startswith("tptopk.supports") and n != "tptopk.supports.support"}


def test_every_file_is_in_a_room():
    assert {room(path) for path in FILES} - set(ALLOWED) == {"__init__", "__main__"}


def test_only_accounting_imports_dp_accounting():
    importing = [named(p) for p in FILES if any(n.split(".")[0] == "dp_accounting" for n in imports(p))]
    assert importing == ["privacy/accounting.py"]


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


def copies_with(path: Path, field: str) -> bool:
    """Whether a copy is made with another value of that field, or the field is written over."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            words = [word.arg for word in node.keywords]
            if name in ("replace", "__replace__", "_replace") and field in words:
                return True
            if name == "__setattr__" and any(isinstance(a, ast.Constant) and a.value == field for a in node.args):
                return True
    return False


def renames(path: Path, name: str) -> bool:
    return any(
        isinstance(node, ast.alias) and node.name == name and node.asname not in (None, name)
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_only_the_mechanism_makes_private_gradients():
    """By calling the class under its own name, and no other way: no copy of one holds other values."""
    assert [named(p) for p in FILES if calls(p, "PrivateGradient")] == [MECHANISM]
    assert not [named(p) for p in FILES if renames(p, "PrivateGradient") or copies_with(p, "values")]


def test_only_the_mechanism_draws_noise():
    """Normal numbers are drawn by the mechanism, from streams; made-up examples are no data of anybody's."""
    assert [named(p) for p in FILES if calls(p, "normal")] == [MECHANISM]
    assert [named(p) for p in FILES if calls(p, "randn", "standard_normal", "randn_like", "normal_")] == [
        MADE_UP,
        RANDOMNESS,
    ]


def test_nothing_is_pickled():
    for path in FILES:
        assert not imports(path) & {"pickle", "dill", "cloudpickle", "joblib", "shelve"}
        assert "torch.save" not in path.read_text() and "torch.load" not in path.read_text()
