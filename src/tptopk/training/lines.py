"""Whether a ledger has lost lines at its end, which its chain cannot tell: what else the run left knows of more than are there."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from tptopk.privacy.ledger_record import LedgerRecord
from tptopk.training.begun import summary_in


def missing_lines(folder: Path, record: LedgerRecord) -> str | None:
    """In words, by what it shows that lines are missing; nothing where it does not.

    `run.json` is marked as running after an attempt's first line, and as anything else after a closing line; weights name the last
    line when they were saved; a step's metrics are written after its charge.
    """
    lines, status = record.lines, summary_in(folder).get("status", "running")
    if status != "running":
        closed = [n for n, line in enumerate(lines) if line["kind"] == "end"]
        since = {line["kind"] for line in lines[closed[-1] + 1 :]} if closed else set()
        if not closed or lines[closed[-1]].get("status") != status or not since <= {"attempt"}:
            return f"run.json says that the run is {status}, which is said after the closing line: lines are missing"
    named = ledger_named_by(folder / "model.safetensors")
    if named and not holds_line(record, *named.partition(" ")[::2]):
        return "model.safetensors names a line that the ledger does not have: lines are missing"
    taken, charged = _metrics_in(folder), sum(record.charged.values())
    if taken > charged:
        return f"metrics.jsonl holds {taken} steps, and the ledger charges {charged}: lines are missing"
    return None


def holds_line(record: LedgerRecord, number: object, head: object) -> bool:
    """Whether line `number` of a ledger, counted from 1, has that hash; nothing was written yet at 0."""
    if not str(number).isdecimal():
        return False
    place = int(str(number))
    return place == 0 or (place <= len(record.lines) and record.lines[place - 1]["hash"] == head)


def ledger_named_by(weights: Path) -> str:
    """How many lines the ledger had when the weights were saved, and the last one's hash; nothing without weights."""
    try:
        with safe_open(str(weights), "pt") as file:
            return str((file.metadata() or {}).get("tptopk.ledger", ""))
    except (OSError, SafetensorError):
        return ""


def _metrics_in(folder: Path) -> int:
    """Steps of which the metrics were written to the end of the line."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0
