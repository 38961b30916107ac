"""Every snippet of the documentation runs, page by page and in order, in an empty folder.

A block whose first line is `# name.ext` is a file of the reader's. A comment `<!-- not run: why -->` above a block leaves it out;
the commands and options in it must exist all the same.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import tptopk
from tptopk.cli import app, main
from tptopk.cli.loading import COMMANDS, command_named
from tptopk.report.reproduction import write

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n+)?^```(python|console|toml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w-]+\.\w+)\n")


def blocks(page: Path) -> list[tuple[bool, str, str]]:
    return [(not skipped, kind, text) for skipped, kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line[2:], comments=True) for line in text.splitlines() if line.startswith("$ ")]


def run(command: list[str], monkeypatch) -> None:
    if command[0] != "tptopk":
        subprocess.run(command, check=True)
        return
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, command


@pytest.mark.slow
@pytest.mark.filterwarnings("default::tptopk.privacy.plan.PrivacyWarning")
@pytest.mark.parametrize("page", PAGES[:-1], ids=lambda p: p.name)
def test_every_snippet_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("warnings.showwarning", lambda *a, **k: None)  # `main` puts its own in place
    names: dict[str, object] = {}
    for number, (runs, kind, text) in enumerate(blocks(page)):
        if found := FILE.match(text):
            Path(found[1]).write_text(text)
        elif runs and kind == "python":
            exec(compile(text, f"{page.name}, block {number}", "exec"), names)
        elif runs and kind == "console":
            for command in commands(text):
                run(command, monkeypatch)


def test_what_is_not_run_of_the_readme_says_why():
    """Its Python is run by `test_readme.py`, which looks at what comes out."""
    unmarked = [text for runs, kind, text in blocks(PAGES[-1]) if runs and kind != "toml"]
    assert len(unmarked) == 2 and "digits_cnn" in unmarked[0] and "TPTopKClassifier" in unmarked[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_and_option_on_a_page_exists(page):
    for _, kind, text in blocks(page):
        for words in commands(text) if kind == "console" else []:
            if Path(words[0]).name == "tptopk":
                known = get_command(app)
                rest = words[1:]
                if rest[0] in COMMANDS:
                    known = command_named(rest.pop(0))
                while rest and rest[0] in getattr(known, "commands", {}):
                    known = known.commands[rest.pop(0)]
                options = {name for parameter in known.params for name in parameter.opts} | {"--help"}
                assert not hasattr(known, "commands") or rest == ["--version"], words
                assert {word for word in rest if word.startswith("--")} <= options, words


def test_the_api_page_names_everything_public():
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert all(f":: {name}\n" in api or f"`tptopk.{name}`" in api for name in tptopk.__all__)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert all(f"\n{page.stem}\n" in index for page in PAGES[:-1] if page.stem != "index")


def test_the_committed_document_is_that_of_the_committed_runs(tmp_path):
    write(ROOT / "results", tmp_path / "reproduction.md")
    now, committed = ((folder / "reproduction.md").read_text(encoding="utf-8") for folder in (tmp_path, ROOT / "docs"))
    assert now == committed, "write it anew: tptopk reproduce all --render"
