"""What a ledger says: the file read back, its chain checked and every charge compared with the plan's own numbers.

The form of the lines is here, for who writes them (`ledger.py`) and who reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tptopk.privacy.chain import read_chain
from tptopk.privacy.description import read_description, read_time, together
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal, check_number

FORMAT = 1


def weaker(before: str | None, now: str | None) -> str | None:
    """The generator that may be claimed for attempts by both; None where neither says which it was."""
    return now if now == before else "philox"


def query_line(plan: Plan, index: int) -> dict[str, Any]:
    query = plan.queries[index]
    return {
        "kind": "query",
        "query": index,
        "name": query.name,
        "steps": query.steps,
        "noise_multiplier": query.noise_multiplier,
        "sample_rate": query.sample_rate,
    }


def charge_line(plan: Plan, attempt: int, phase: int, first: int, count: int, support_size: int) -> dict[str, Any]:
    p = plan.phases[phase]
    return {
        "kind": "steps",
        "attempt": attempt,
        "phase": phase,
        "first": first,
        "count": count,
        "noise_multiplier": p.noise_multiplier,
        "sample_rate": p.sample_rate,
        "clip_norm": p.clip_norm if plan.spec.private else None,
        "divisor": plan.expected_batch_size(p),
        "support_size": support_size,
        "adjacency": plan.adjacency,
    }


@dataclass
class LedgerRecord:
    """A ledger that was read and whose chain holds."""

    plan: Plan
    lines: list[dict[str, Any]]
    attempts: int
    charged: Counter[int]  # phase index → steps, of all attempts
    queries: bool
    seeded: bool
    end: dict[str, Any] | None  # the closing line, if it is the last
    torn: int  # bytes of a line that was never finished
    size: int  # bytes of the lines that were
    problems: list[str] = field(default_factory=list)  # charges that are not the plan's
    versions: dict[str, str] = field(default_factory=dict)  # of the software, in the last attempt
    account_order: float | None = None  # the Rényi order at which an account paid for the plan
    payment: str | None = None  # which of its payments it was
    described: dict[str, str] = field(default_factory=dict)  # what the attempts were told of the run
    begun: list[str | None] = field(default_factory=list)  # when each attempt began, if it says so
    ended: str | None = None
    generator: str | None = None  # chacha20 if all attempts say so; None if none says what it used
    training_loss: bool = False  # whether an attempt showed it

    @property
    def head(self) -> str:
        return str(self.lines[-1]["hash"])


def read_ledger(path: Path) -> LedgerRecord:
    """Read a ledger; refuse one that was changed anywhere but for a torn last line."""
    lines, torn, size = read_chain(path)
    if not lines:
        raise Refusal(f"{path} is empty: the run ended before anything was charged; delete its folder and begin anew")
    return _understood(path, lines, torn, size)


def _understood(path: Path, lines: list[dict[str, Any]], torn: int, size: int) -> LedgerRecord:
    first = lines[0]
    if first.get("kind") != "plan":
        raise Refusal(f"{path} does not begin with a plan")
    if first.get("format") != FORMAT:
        raise Refusal(
            f"{path} was written by another version of tptopk (format {first.get('format')!r}, here {FORMAT})"
        )
    try:
        plan = Plan.from_dict(first["plan"])
    except (Refusal, KeyError, TypeError, ValueError) as error:
        raise Refusal(f"{path} holds no plan that this version can read: {error}") from error
    record = LedgerRecord(plan, lines, 0, Counter(), False, False, None, torn, size)
    queries = 0
    try:
        for line in lines[1:]:
            record.training_loss |= bool(line.get("training_loss", False))
            if line["kind"] == "attempt":
                told = line.get("generator")
                record.generator = weaker(record.generator, told) if record.begun else told
                record.attempts = line["attempt"]
                record.seeded |= line["seeded"]
                record.account_order = line.get("account_order", record.account_order)
                record.payment = line.get("payment", record.payment)
                if record.account_order is not None:
                    check_number("account_order", record.account_order, above=1)
                record.versions = {str(name): str(value) for name, value in line["versions"].items()}
                record.begun.append(read_time(line))
                record.described = together(record.described, read_description(line))
            elif line["kind"] == "steps":
                _take_charge(record, line)
            elif line["kind"] == "query":
                if queries == len(plan.queries):
                    raise Refusal(f"line {line['line'] + 1} of {path} charges a query that the plan does not have")
                _compare(record, line, query_line(plan, queries))
                queries += 1
            elif line["kind"] == "end":
                str(line["status"])
            else:
                raise Refusal(f"line {line['line'] + 1} of {path} is of a kind that this version does not know")
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise Refusal(f"{path} holds a line that this version cannot read: {error!r}") from error
    record.queries = queries > 0 or not plan.queries
    record.end = lines[-1] if lines[-1]["kind"] == "end" and not torn else None
    record.ended = read_time(record.end) if record.end else None
    return record


def _take_charge(record: LedgerRecord, line: Mapping[str, Any]) -> None:
    phase, count = line["phase"], line["count"]
    if not (isinstance(phase, int) and 0 <= phase < len(record.plan.phases) and isinstance(count, int) and count > 0):
        raise Refusal(f"line {line['line'] + 1} charges no step of the plan")
    _compare(record, line, charge_line(record.plan, line["attempt"], phase, line["first"], count, line["support_size"]))
    record.charged[phase] += count


def _compare(record: LedgerRecord, line: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for key, value in expected.items():
        if line[key] != value:
            record.problems.append(f"line {line['line'] + 1}: {key} is {line[key]!r}, and the plan says {value!r}")
