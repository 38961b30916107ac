"""What the README says, runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.slow
def test_the_ten_lines_of_python_run(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    epsilon, ratio, accuracy = map(float, capsys.readouterr().out.splitlines()[0].split())
    assert 3.0 * 0.999 <= epsilon <= 3.0 and ratio == pytest.approx(0.4) and accuracy > 0.8


def test_the_methods_table_is_complete():
    from tptopk import METHODS

    assert all(f"| `{name}` |" in README for name in METHODS)


def test_no_placeholder_is_left():
    assert "@@" not in README
