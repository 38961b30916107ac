"""What a run was told of itself: its name, its data and its model, and when it began and ended.

None of it changes a figure or a decision, and none of it is proven: a name is what somebody typed, a time what a clock showed.
It is there so that a statement can be filed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from tptopk.privacy.refusal import Refusal

WORDS = ("run", "data", "schema", "columns", "model")  # what a description may hold
MOST = 1000  # characters of a name
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def now() -> str:
    """The time in UTC by the computer's clock; for reading, never for reckoning."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def describe(
    folder: object, model: object, config: Mapping[str, Any], schema: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Names, and the bounds that were declared of columns, from public settings: of a file its name, not where it lies."""
    found = {
        "run": "" if folder is None else PurePath(str(folder)).name,
        "data": _file_name(config.get("data")) + _planted(config.get("audit_canaries")),
        "schema": _file_name(config.get("schema")),
        "columns": _columns(schema or {}),
        "model": config.get("model") or type(model).__name__,
    }
    return {word: plain(name) for word, name in found.items() if isinstance(name, str) and plain(name)}


def _file_name(value: object) -> str:
    return PurePath(value).name if isinstance(value, str) else ""


def _planted(count: object) -> str:
    """The declared size counts them, and the model was trained on some."""
    return f", with {count} made-up records planted" if isinstance(count, int) and count else ""


def _columns(schema: Mapping[str, Any]) -> str:
    """What a table's schema declares of its columns: bounds, numbers of categories, the target."""
    try:
        found = [f"{name} ({low:g} to {high:g})" for name, (low, high) in schema.get("numeric", {}).items()]
        found += [f"{name} ({len(known)} categories)" for name, known in schema.get("categories", {}).items()]
    except (AttributeError, TypeError, ValueError):  # a schema of somebody's own kind, which the run folder keeps
        return "those that schema.json declares"
    if found and "target" in schema:
        found.append(f"target {schema['target']}")
    return ", ".join(found)


def plain(name: str) -> str:
    """A name as one line of text that no Markdown reader takes for anything else."""
    shown = "".join(c if c.isprintable() else " " for c in name)
    line = re.sub(r"[*|`<>\[\]#]", "_", " ".join(shown.split()))
    return line if len(line) <= MOST else line[: MOST - 1].strip() + "…"


def read_time(line: Mapping[str, Any]) -> str | None:
    """When a line of a ledger says it was written; None for ledgers of before lines said so."""
    time = line.get("time")
    if time is not None and not (isinstance(time, str) and _TIME.fullmatch(time)):
        raise Refusal(f"line {line['line'] + 1} holds a time that this version cannot read")
    return time


def read_description(line: Mapping[str, Any]) -> dict[str, str]:
    found = line.get("described", {})
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise Refusal(f"line {line['line'] + 1} holds a description that this version cannot read")
    return {word: plain(found[word]) for word in WORDS if word in found}


def together(first: Mapping[str, str], then: Mapping[str, str]) -> dict[str, str]:
    """What two attempts were told; where they differ both are named, in their order."""
    found = dict(first)
    for word, name in then.items():
        known = found.get(word, "")
        if name not in known.split(", then "):
            found[word] = f"{known}, then {name}" if known else name
    return found
