"""Files of JSON lines, each holding its number, the hash of the line before, and its own: what is written is never rewritten."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tptopk.privacy.refusal import Refusal

START = "0" * 64  # stands for the line before the first


def head_of(line: Mapping[str, Any]) -> str:
    """The hash of a line: SHA-256 of all of it but the hash, in the one form in which lines are written."""
    content = {key: value for key, value in line.items() if key != "hash"}
    return hashlib.sha256(_form(content).encode()).hexdigest()


def chained(number: int, before: str, content: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """A line that follows the one whose hash is `before`, and how it is written."""
    line = {"line": number, **content, "before": before}
    line["hash"] = head_of(line)
    return line, (_form(line) + "\n").encode()


def _form(line: Mapping[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=True, separators=(",", ":"), allow_nan=True)


def open_locked(path: Path, flags: int) -> int:
    """Open for appending, and keep every other process out until the file is closed."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | flags, 0o644)
    except OSError as error:
        raise Refusal(f"cannot open {path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise Refusal(f"another process is writing to {path}; it has one writer at a time") from error
    return file


def append_durably(file: int, text: bytes) -> None:
    """All of a line, on the disk when this returns; or none of it, and an OSError."""
    before = os.fstat(file).st_size
    try:
        if os.write(file, text) != len(text):
            raise OSError("the disk is full")
        os.fsync(file)
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, before)  # a half-written line pays for nothing
        raise


def read_chain(path: Path) -> tuple[list[dict[str, Any]], int, int]:
    """The lines of a chained file, the bytes of a last line that was never finished, and those of the lines that were."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror}") from error
    whole, _, tail = raw.rpartition(b"\n")
    lines: list[dict[str, Any]] = []
    head = START
    for number, text in enumerate(whole.split(b"\n") if whole else []):
        where = f"line {number + 1} of {path}"
        try:
            line = json.loads(text.decode("ascii"))
            intact = isinstance(line, dict) and _form(line).encode() == text and line["hash"] == head_of(line)
        except (ValueError, KeyError, RecursionError):
            intact = False
        if not intact:
            raise Refusal(f"{where} was changed: it does not have the hash that it states")
        if line.get("line") != number or line.get("before") != head:
            raise Refusal(f"{where} does not follow the line before it: lines were removed, added or moved")
        head = line["hash"]
        lines.append(line)
    return lines, len(tail), len(whole) + 1 if lines else 0
