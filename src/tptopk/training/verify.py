"""Checks a run folder against itself: what its ledger says, and whether everything else agrees with it."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from tptopk.privacy import accounting, second_opinion
from tptopk.privacy.accounting import Segment, round_up
from tptopk.privacy.ledger_record import LedgerRecord, read_ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal
from tptopk.privacy.statement import Facts, charged_segments, statement
from tptopk.supports.warmup import FILE as WARMUP
from tptopk.supports.warmup import WarmUp
from tptopk.training.begun import how_to_resume, run_folder, summary_in
from tptopk.training.checkpoint import load_checkpoint, sha256_of
from tptopk.training.facts import facts_in, facts_in_run_json
from tptopk.training.lines import holds_line, ledger_named_by, missing_lines
from tptopk.training.run import SCHEMA

AGREEMENT = 0.02  # relative; two right accountants differ by less
UNCHECKED = (
    "that the data was the data described, and its size the one declared",
    "that the software was run unmodified, drew its samples and noise as it says, and kept its secret",
    "that no other run on the same data was made, or looked at before this one was chosen",
    "that the whole folder was not written anew by somebody: a ledger proves its own integrity, not its author",
)


@dataclass
class Verdict:
    """Each check with its outcome, and the ε that the ledger supports."""

    # what, whether it holds (None: open, it could not be checked), in words
    checks: list[tuple[str, bool | None, str]] = field(default_factory=list)
    epsilons: dict[str, float] = field(default_factory=dict)  # by accountant
    delta: float = math.nan
    facts: Facts | None = None

    @property
    def holds(self) -> bool:
        """Whether nothing that was checked fails; what is open is charged in full."""
        return bool(self.checks) and all(ok is not False for _, ok, _ in self.checks)

    @property
    def epsilon(self) -> float:
        """What may be claimed where everything holds: the plan's accountant's figure, which the others confirm."""
        return next(iter(self.epsilons.values()), math.inf)

    def add(self, what: str, ok: bool | None, words: str) -> None:
        self.checks.append((what, ok, words))


def verify(path: str | Path) -> Verdict:
    """Recompute ε from the ledger alone, twice, and check chain, plan, model, support and statement."""
    folder = Path(path)
    verdict = Verdict()
    try:
        record = read_ledger(folder / "ledger.jsonl")
    except Refusal as refusal:
        verdict.add("ledger", False, str(refusal))
        return verdict
    words = f"{len(record.lines)} lines, unbroken"
    verdict.add(
        "ledger", True, words + (f"; a last line of {record.torn} bytes was never finished" if record.torn else "")
    )
    verdict.add("charges", not record.problems, record.problems[0] if record.problems else "all of them the plan's own")
    facts = _facts(record, folder, verdict)
    verdict.facts, verdict.delta = facts, record.plan.delta
    _recompute(record, facts, verdict)
    _check_plan(record, folder, verdict)
    _check_files(record, folder, verdict)
    _check_statement(record, folder, facts, verdict)
    return verdict


def _facts(record: LedgerRecord, folder: Path, verdict: Verdict) -> Facts:
    """What was charged; without a closing line the larger of ledger, checkpoint and plan."""
    facts = facts_in(folder, record)
    if record.end is not None:
        verdict.add("end", True, f"the run closed its ledger: {record.end['status']}")
        return facts
    verdict.add(
        "end",
        None,
        "the run did not close its ledger: it crashed, or is still going on; the larger of ledger, checkpoint and plan is charged; if it "
        f"crashed, go on with: {how_to_resume(folder)}",
    )
    try:
        found = load_checkpoint(folder)
        taken = {int(phase): int(count) for phase, count in found.values["taken"].items()} if found else {}
        known = found is None or holds_line(record, found.values["length"], found.values["head"])
        if not known or any(count > record.charged[phase] for phase, count in taken.items()):
            verdict.add("checkpoint", False, "it knows of more than the ledger holds: lines of the ledger are missing")
    except (Refusal, KeyError, ValueError, TypeError, AttributeError) as error:
        verdict.add("checkpoint", False, str(error))
    return facts


def warmup_in(path: str | Path) -> WarmUp:
    """The warm-up that a run kept for advice; refused where it is not the file that the run's ledger names."""
    folder = run_folder(path)
    record = read_ledger(folder / "ledger.jsonl")
    if not (folder / WARMUP).exists():
        raise Refusal(
            f"{folder} holds no {WARMUP}: {record.plan.method} has no warm-up, or it was not finished; "
            "tptopk advise without a run makes one, and charges it"
        )
    files = record.end.get("files") if record.end is not None else None
    if isinstance(files, dict) and WARMUP in files and files[WARMUP] != sha256_of(folder / WARMUP):
        raise Refusal(f"{folder / WARMUP} is not the file that the run left")
    found = WarmUp.load(folder / WARMUP)
    if found.plan.phases[0] != record.plan.phases[0] or found.plan.dataset_size != record.plan.dataset_size:
        raise Refusal(f"{folder / WARMUP} is of another plan than the run's ledger")
    if not found.complete and (record.end is None or record.end["status"] != "finished"):
        raise Refusal(
            f"the warm-up in {folder} was not finished; go on with it, then ask again: {how_to_resume(folder)}"
        )
    return found


def _recompute(record: LedgerRecord, facts: Facts, verdict: Verdict) -> None:
    plan = record.plan
    if not plan.spec.private:
        verdict.add("privacy", False, "the method is 'non-private': there is no guarantee to verify")
        return
    segments = charged_segments(plan, facts)
    verdict.epsilons[f"{plan.accountant}, dp-accounting"] = accounting.epsilon(segments, plan.delta, plan.accountant)
    verdict.epsilons["our own, pld"] = second_opinion.epsilon(segments, plan.delta)
    prv = _opacus_prv(segments, plan.delta)
    gave_up = f"; Opacus's prv gave up: {prv}" if isinstance(prv, str) else ""
    if isinstance(prv, float):
        verdict.epsilons["prv, Opacus"] = prv
    claimed = verdict.epsilons[f"{plan.accountant}, dp-accounting"]
    worst = max(verdict.epsilons, key=lambda name: verdict.epsilons[name])
    ok = verdict.epsilons[worst] <= claimed * (1 + AGREEMENT) + 0.01
    words = ", ".join(f"ε = {round_up(value)} ({name})" for name, value in verdict.epsilons.items())
    tighter = "" if plan.accountant == "pld" else "; all are upper bounds, and pld is the tighter calculation"
    verdict.add("accounting", ok, words + tighter + gave_up)
    budget = plan.target_epsilon
    if budget is not None:
        # of a run that goes on, what it has charged: it stops before it charges more than its budget
        charged = plan.segments(record.charged, queries=record.queries)
        spent = claimed if record.end else accounting.epsilon(charged, plan.delta, plan.accountant)
        words = f"ε = {round_up(spent)} of a budget of {budget:g}{'' if record.end else ', so far'}"
        verdict.add("budget", spent <= budget * (1 + 1e-9), words)


def _opacus_prv(segments: list[Segment], delta: float) -> float | str | None:
    """A third opinion; None where Opacus is not installed, and its error where it gives up, as on noise that the others can do."""
    try:
        from opacus.accountants import PRVAccountant
    except ModuleNotFoundError:
        return None
    accountant = PRVAccountant()
    accountant.history = [(s.noise_multiplier, s.sample_rate, s.steps) for s in segments if s.steps]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(accountant.get_epsilon(delta))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _check_plan(record: LedgerRecord, folder: Path, verdict: Verdict) -> None:
    try:
        plan = Plan.from_dict(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
        verdict.add(
            "plan",
            plan == record.plan,
            "plan.json is the ledger's" if plan == record.plan else "plan.json is not the plan that the ledger holds",
        )
    except (OSError, ValueError, AttributeError, TypeError) as error:
        verdict.add("plan", False, f"plan.json cannot be read: {error}")


def _check_files(record: LedgerRecord, folder: Path, verdict: Verdict) -> None:
    if record.end is None:
        lost = missing_lines(folder, record)
        verdict.add(
            "files", False if lost else None, lost or "no closing line names the model and the support: not checked"
        )
        return
    files = record.end.get("files")
    optional = [WARMUP] if isinstance(files, dict) and WARMUP in files else []
    if (folder / SCHEMA).exists() or (isinstance(files, dict) and SCHEMA in files):
        optional.append(SCHEMA)
    for name in ("model.safetensors", "support.safetensors", *optional):
        what = name.partition(".")[0]
        try:
            same = isinstance(files, dict) and sha256_of(folder / name) == files.get(name)
            verdict.add(what, same, f"{name} is the run's" if same else f"{name} is not the file that the run left")
        except OSError as error:
            verdict.add(what, False, f"{name} cannot be read: {error.strerror}")
    ok = ledger_named_by(folder / "model.safetensors") == f"{len(record.lines) - 1} {record.lines[-2]['hash']}"
    verdict.add(
        "model's ledger", ok, "the model names this ledger" if ok else "the model names another ledger, or none"
    )


def _check_statement(record: LedgerRecord, folder: Path, facts: Facts, verdict: Verdict) -> None:
    if record.end is None:
        return
    summary = summary_in(folder)
    if record.plan.spec.private:
        for stated in (facts_in_run_json(folder).get("epsilon"), summary.get("epsilon")):
            ok = isinstance(stated, (int, float)) and facts.epsilon is not None and stated >= facts.epsilon * (1 - 1e-6)
            words = f"run.json states ε = {round_up(stated) if isinstance(stated, float) and ok else stated}"
            if not ok:
                words += f", and the ledger supports ε = {facts.epsilon}"
                break
        said = {"delta": record.plan.delta, "method": record.plan.method, "status": record.end["status"]}
        wrong = [name for name, value in said.items() if summary.get(name) != value]
        if ok and wrong:
            ok, words = (
                False,
                f"run.json states {wrong[0]} = {summary.get(wrong[0])!r}, and the ledger {said[wrong[0]]!r}",
            )
        verdict.add("run.json", ok, words)
    try:
        written = (folder / "statement.md").read_text(encoding="utf-8")
        ok = written.strip() == statement(record.plan, facts).strip()
        verdict.add(
            "statement",
            ok,
            "statement.md is what the ledger gives" if ok else "statement.md is not what the ledger gives",
        )
    except (OSError, UnicodeDecodeError, TypeError) as error:
        verdict.add("statement", False, f"statement.md cannot be read: {error}")
