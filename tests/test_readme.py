"""What the README says, runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_the_ten_lines_of_python_run(capsys):
    code = next(code for code in PYTHON if "digits_cnn" in code)
    exec(compile(code, "README.md", "exec"), {})
    epsilon, ratio, accuracy = map(float, capsys.readouterr().out.splitlines()[0].split())
    assert 3.0 * 0.999 <= epsilon <= 3.0 and ratio == pytest.approx(0.4) and accuracy > 0.8


@pytest.mark.slow
def test_the_lines_for_scikit_learn_run(capsys):
    exec(compile(next(code for code in PYTHON if "TPTopKClassifier" in code), "README.md", "exec"), {})
    accuracy, epsilon = map(float, capsys.readouterr().out.splitlines()[0].split())
    assert accuracy > 0.85 and 3.0 * 0.999 <= epsilon <= 3.0


@pytest.mark.slow
def test_the_example_of_a_table_runs(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["table.py"])
    runpy.run_path(str(Path(__file__).parent.parent / "examples" / "table.py"))
    said = capsys.readouterr().out
    assert float(said.split()[2]) > 0.75 and "How the table was read" in said


def test_the_methods_table_is_complete():
    from tptopk import METHODS

    assert all(f"| `{name}` |" in README for name in METHODS)


def test_the_papers_table_is_that_of_the_results():
    from tptopk.experiments import published, recipes
    from tptopk.report.outcomes import read
    from tptopk.report.paper_tables import NAMES, cell

    main = read(Path(__file__).parent.parent / "results", "main")
    for dataset, epsilon in dict.fromkeys(place[:2] for place in published.MAIN):
        own = [cell(main, dataset=dataset, target_epsilon=epsilon, method=m, variant=recipes.PAPER) for m in recipes.METHODS]  # fmt: skip
        theirs = ", ".join(f"{published.MAIN[dataset, epsilon, method].mean:.2f}" for method in ("dp-sgd", "tp-topk"))
        assert f"| {' | '.join([NAMES[dataset], f'{epsilon:g}', *own, theirs])} |" in README


def test_what_was_tuned_further_is_that_of_the_results():
    from tptopk.experiments import published, recipes
    from tptopk.report.outcomes import read
    from tptopk.report.paper_tables import NAMES, cell

    further = read(Path(__file__).parent.parent / "results", "further")
    for dataset, epsilon in recipes.FURTHER_CELLS:
        own = [cell(further, dataset=dataset, target_epsilon=epsilon, method=m) for m in ("dp-sgd", "tp-rand", "tp-topk")]  # fmt: skip
        paper = published.MAIN[dataset, epsilon, "tp-topk"].mean
        assert f"| {' | '.join([NAMES[dataset], f'{epsilon:g}', *own, f'{paper:.2f}'])} |" in README
    document = (Path(__file__).parent.parent / "docs" / "reproduction.md").read_text(encoding="utf-8")
    part = document.split("## Tuned further")[1].split("\n## ")[0]
    gaps = [line.split(" | ") for line in part.splitlines() if "| tp-topk − " in line]
    said = " ".join(README.split())
    for other, name in (("the paper's", "the paper's"), ("dp-sgd", "DP-SGD"), ("tp-rand", "TP-Rand")):
        found = [
            cells[3].replace(" †", "").replace("-", "−").replace("0.", ".")
            for cells in gaps
            if cells[2] == f"tp-topk − {other}"
        ]
        assert re.search(
            rf"TP-TopK − {name} (is )?{re.escape(found[0])}, {re.escape(found[1])} and {re.escape(found[2])}", said
        )


def test_the_papers_averages_are_those_of_the_document():
    document = (Path(__file__).parent.parent / "docs" / "reproduction.md").read_text(encoding="utf-8")
    averages = document.split("Cell by cell:")[0]
    for label, name in {
        "TP-TopK − TP-Rand, each as tuned": "tp-topk − tp-rand",
        "TP-TopK − TP-Rand, TP-TopK's recipe for both": "tp-topk − tp-rand (TP-TopK's recipe)",
        "TP-TopK − DP-SGD": "tp-topk − dp-sgd",
        "ON-TopK − ON-Rand": "on-topk − on-rand",
        "ON-TopK − DP-SGD": "on-topk − dp-sgd",
    }.items():
        (found,) = (line.split(" | ") for line in averages.splitlines() if line.startswith(f"| {name} |"))
        ours, paper = (words.replace("-", "−").replace("0.", ".") for words in (found[2], found[4]))
        assert f"| {label} | {ours} | {paper} |" in README


def test_no_placeholder_is_left():
    assert "@@" not in README
