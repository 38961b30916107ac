"""A run that was begun: whether a folder holds one, whether it is finished, and what to type to go on with it."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

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
