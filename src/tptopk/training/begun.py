"""A run that was begun: whether a folder holds one, whether it is finished or has lost lines, and what to type to go on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tptopk.privacy.refusal import Refusal

# the command line writes all its settings down, these among them
WORDS = {"data", "model", "optimizer", "learning_rate"}


def run_folder(path: str | Path) -> Path:
    """The path of a folder that holds a run; any other is refused, with the nearest name beside it."""
    folder = Path(path)
    if any((folder / name).exists() for name in ("ledger.jsonl", "run.json")):
        return folder
    near = get_close_matches(folder.name, _runs_in(folder.parent), n=1)
    within = _runs_in(folder)
    hint = ""
    if near:
        hint = f"; did you mean {folder.parent / near[0]}?"
    elif within:
        hint = f"; there is one in {folder / within[0]}"
    raise Refusal(f"there is no run in {path}{hint}")


def _runs_in(folder: Path) -> list[str]:
    return sorted(ledger.parent.name for ledger in folder.glob("*/ledger.jsonl"))


def summary_in(folder: str | Path) -> dict[str, Any]:
    """What run.json says; nothing if it cannot be read."""
    try:
        found = json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def ledger_named_by(weights: Path) -> str:
    """How many lines the ledger had when the weights were saved, and the last one's hash; nothing without weights."""
    try:
        with safe_open(str(weights), "pt") as file:
            return str((file.metadata() or {}).get("tptopk.ledger", ""))
    except (OSError, SafetensorError):
        return ""


def cut_off(folder: Path, lines: Sequence[Mapping[str, Any]]) -> str | None:
    """In words, how it shows that a run's ledger has lost lines at its end: what the run left knows of more than are there.

    `run.json` is marked as running after an attempt's first line, and as anything else after a closing line.
    """
    status, closed = summary_in(folder).get("status", "running"), [n for n, v in enumerate(lines) if v["kind"] == "end"]
    if status != "running":
        since = [line["kind"] for line in lines[closed[-1] + 1 :]] if closed else ["everything"]
        if not closed or lines[closed[-1]]["status"] != status or any(kind != "attempt" for kind in since):
            return f"run.json says that the run is {status}, which is said after the closing line: lines are missing"
    number, _, head = ledger_named_by(folder / "model.safetensors").partition(" ")
    known = number.isdigit() and 0 < int(number) <= len(lines) and lines[int(number) - 1]["hash"] == head
    if number and not known:
        return "model.safetensors names a line that the ledger does not have: lines are missing"
    return None


def begun_with(folder: str | Path) -> dict[str, Any]:
    """The plain values that whoever began the run kept with it; nothing if there are none."""
    config = summary_in(folder).get("config")
    return config if isinstance(config, dict) else {}


def config_of(folder: str | Path) -> dict[str, Any] | None:
    """The settings that the command line wrote into a run; None for a run that was begun in Python."""
    config = begun_with(folder)
    return config if config.keys() >= WORDS else None


def how_to_resume(folder: str | Path) -> str:
    """What to type to go on with a run."""
    if config_of(folder) is not None:
        return f"tptopk train --resume {folder}"
    config = begun_with(folder)
    if "trainer" in config:
        return "trainer.train(resume_from_checkpoint=True)"
    if config.get("model") == "TPTopKClassifier":
        return f"TPTopKClassifier(…, out={str(folder)!r}, resume=True).fit(…)"
    return f"tptopk.fit(…, out={str(folder)!r}, resume=True)"


def what_instead(folder: str | Path) -> str:
    """What to do where a new run was to be begun in a folder that holds one."""
    if summary_in(folder).get("status") == "finished":
        return "it is finished: choose another folder"
    return f"choose another folder, or go on with it: {how_to_resume(folder)}"


def refuse_finished(folder: str | Path, end: Any) -> None:
    """Refuse to go on with a run whose ledger has the closing line `end` of a finished one."""
    if end is not None and end["status"] == "finished":
        raise Refusal(f"{folder} holds a run that is finished; begin another in another folder")
