"""What a page shows of one run, read from its folder. Whatever is missing or damaged is a sentence, not an error."""

from __future__ import annotations

import json
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tptopk.privacy import accounting
from tptopk.privacy.ledger_record import LedgerRecord, read_ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal, is_number
from tptopk.privacy.statement import statement
from tptopk.supports.advice import Advice, Candidate, advise
from tptopk.supports.scores import SCORES
from tptopk.supports.support import Support
from tptopk.supports.warmup import FILE as WARMUP
from tptopk.training.verify import Verdict, verify, warmup_in

POINTS = 40  # of ε over the steps
PATIENCE = 8.0  # seconds for them, of which the ends and the switches come first
Found = TypeVar("Found")
DAMAGE = (Refusal, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError)


@dataclass
class Steps:
    """The columns of `metrics.jsonl`, and how many of its lines could not be read."""

    step: array[float] = field(default_factory=lambda: array("d"))
    norm: array[float] = field(default_factory=lambda: array("d"))  # NaN where a run is not private
    active: array[float] = field(default_factory=lambda: array("d"))
    damaged: int = 0


@dataclass
class Sheet:
    """One run, as far as its folder tells."""

    name: str
    verdict: Verdict
    summary: dict[str, Any]
    record: LedgerRecord | None
    steps: Steps
    spent: list[tuple[int, float]]  # (steps charged, ε after them)
    support: Support | None
    advice: Advice | None
    kept: list[Candidate]  # by the run's own score, from the fewest coordinates to all
    chosen: Candidate | None  # the run's own support among them
    audit: dict[str, Any] | None
    statement: str | None
    missing: dict[str, str] = field(default_factory=dict)  # what → why it is not shown
    path: Path = Path()

    @property
    def plan(self) -> Plan | None:
        return self.record.plan if self.record else None

    @property
    def status(self) -> str:
        """finished, crashed (no closing line), another word of the ledger's, or unknown."""
        return self.verdict.facts.status if self.verdict.facts else "unknown"

    @property
    def seeded(self) -> bool:
        return bool(self.record and self.record.seeded)

    @property
    def private(self) -> bool:
        return self.plan is None or self.plan.spec.private

    @property
    def test(self) -> dict[str, float]:
        """The test metrics that are numbers."""
        found = self.summary.get("test")
        items = found.items() if isinstance(found, dict) else ()
        return {str(name): float(value) for name, value in items if is_number(value)}

    @property
    def delta_too_large(self) -> bool:
        return self.plan is not None and self.plan.delta_too_large

    @property
    def told(self) -> dict[str, str]:
        """Names of the run's data and model, as far as its ledger or its settings have them."""
        found = {word: str(self.config[word]) for word in ("data", "model") if self.config.get(word)}
        return {**found, **(self.record.described if self.record else {})}

    @property
    def config(self) -> dict[str, Any]:
        found = self.summary.get("config")
        return found if isinstance(found, dict) else {}


def read_sheet(path: str | Path) -> Sheet:
    """Read a run folder, finished or not, whole or damaged; refuse what is no run folder at all."""
    folder = Path(path)
    if not any((folder / name).exists() for name in ("ledger.jsonl", "run.json")):
        raise Refusal(f"{folder} is not a run folder: it holds neither ledger.jsonl nor run.json")
    missing: dict[str, str] = {}

    def tried(what: str, read: Callable[[], Found]) -> Found | None:
        try:
            return read()
        except DAMAGE as error:
            missing[what] = str(error) or type(error).__name__
            return None

    record = tried("ledger", lambda: read_ledger(folder / "ledger.jsonl"))
    verdict = tried("checks", lambda: verify(folder))
    if verdict is None:
        verdict = Verdict()
        verdict.add("checks", False, missing["checks"])
    summary = tried("run.json", lambda: _object(folder / "run.json")) or {}
    steps = tried("metrics", lambda: _steps(folder / "metrics.jsonl")) or Steps()
    private = record is not None and record.plan.spec.private
    spent = tried("spent", lambda: _spent(record)) if record is not None and private else None
    support = tried("support", lambda: _support(folder / "support.safetensors"))
    config = summary.get("config")
    score = str(config.get("score")) if isinstance(config, dict) else ""
    curve = tried("advice", lambda: _advice(folder, record, support, score)) if record is not None else None
    audit = None
    if (folder / "audit.json").exists():
        audit = tried("audit", lambda: _object(folder / "audit.json"))
    facts = verdict.facts
    words = tried("statement", lambda: statement(record.plan, facts)) if record is not None and facts else None
    advice, kept, chosen = curve or (None, [], None)
    name = folder.resolve().name
    return Sheet(
        name, verdict, summary, record, steps, spent or [], support, advice, kept, chosen, audit, words, missing, folder
    )


def _object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} does not hold an object")
    return found


def _steps(path: Path) -> Steps:
    """Line by line, in a few numbers a step: a run may have millions."""
    found = Steps()
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                values = json.loads(line)
                step, active, norm = values["step"], values["support_size"], values["gradient_norm"]
                if not (is_number(step) and is_number(active) and (norm is None or is_number(norm))):
                    raise ValueError(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                found.damaged += 1
                continue
            found.step.append(step)
            found.active.append(active)
            found.norm.append(math.nan if norm is None else norm)
    return found


def _support(path: Path) -> Support:
    if not path.exists():
        raise Refusal("the run has not saved its support")
    return Support.load(path)


def _spent(record: LedgerRecord) -> list[tuple[int, float]]:
    """ε after so many charged steps, by the plan's accountant, in the order in which the ledger charged them."""
    plan = record.plan
    charges = [(line["phase"], line["count"]) for line in record.lines if line["kind"] == "steps"]
    total = sum(count for _, count in charges)
    switches, after = [], 0
    for place, (phase, count) in enumerate(charges):
        if place and phase != charges[place - 1][0]:
            switches.append(after)
        after += count
    grid = [round(i * total / (POINTS - 1)) for i in range(POINTS)]
    # ends first, then ever finer: where patience runs out the points still span the run
    order = [0, total, *switches[:4], *(grid[i] for stride in (8, 4, 2, 1) for i in range(0, POINTS, stride))]
    found: dict[int, float] = {}
    started = time.monotonic()
    for point in order:
        if point in found:
            continue
        if len(found) >= POINTS or (len(found) > 6 and time.monotonic() - started > PATIENCE):
            break
        found[point] = accounting.epsilon(_first(plan, charges, point), plan.delta, plan.accountant)
    return sorted((point, value) for point, value in found.items() if math.isfinite(value))


def _first(plan: Plan, charges: Iterable[tuple[int, int]], steps: int) -> list[accounting.Segment]:
    """The queries and the first so many steps."""
    counts = Counter[int]()
    for phase, count in charges:
        counts[phase] += min(count, steps)
        steps -= min(count, steps)
    return plan.segments(counts)


def _advice(
    folder: Path, record: LedgerRecord, support: Support | None, score: str
) -> tuple[Advice, list[Candidate], Candidate | None]:
    """The advisor's answer, and what the run's own score keeps at each ratio, its own support among them."""
    if not record.plan.spec.warmup and len(record.plan.phases) < 2:
        raise Refusal(f"{record.plan.method} trains in one phase and has no warm-up to learn from.")
    if not (folder / WARMUP).exists():
        raise Refusal("It left no record of one: it did not get to its end, or was made before such records were kept.")
    warmup = warmup_in(folder)
    advice = advise(warmup)
    score = score if score in SCORES else "paper"
    kept = {c.active: c for c in advice.candidates if c.score == score}
    active = support.size if support is not None else record.plan.active_coordinates(warmup.total)
    if active not in kept and 0 < active <= warmup.total:
        (kept[active],) = (c for c in advise(warmup, ratios=[active / warmup.total]).candidates if c.score == score)
    ranked = record.plan.spec.ranking == "score"
    return advice, [kept[k] for k in sorted(kept)], kept.get(active) if ranked else None
