"""What a statement needs to know of a run: from its ledger, as it goes on or as it was left in a folder."""

from __future__ import annotations

from pathlib import Path

from tptopk.privacy.ledger import Ledger, versions
from tptopk.privacy.ledger_record import LedgerRecord
from tptopk.privacy.statement import Facts, facts_of
from tptopk.training.begun import summary_in


def facts_in(folder: Path, record: LedgerRecord) -> Facts:
    """What a run's ledger says, and, of what changes no figure, what its run.json does."""
    told = facts_in_run_json(folder)
    return facts_of(
        record,
        test_metrics=bool(told.get("test_metrics")),
        averaged=bool(told.get("averaged")),
        generator="chacha20" if told.get("generator") == "chacha20" else "philox",
        training_loss=bool(told.get("training_loss")),
    )


def facts_in_run_json(folder: Path) -> dict[str, object]:
    """The facts that a run.json holds; none where it cannot be read."""
    facts = summary_in(folder).get("facts", {})
    return dict(facts) if isinstance(facts, dict) else {}


def facts_of_ledger(ledger: Ledger, *, seeded: bool, averaged: bool, status: str, generator: str) -> Facts:
    """What the statement needs to know beside the plan: of this attempt, and of those before what their ledger says."""
    phases = range(len(ledger.plan.phases))
    return Facts(
        epsilon=ledger.epsilon() if ledger.plan.spec.private else None,
        charged_steps=[ledger.charged[i] for i in phases],
        seeded=seeded or ledger.seeded,
        test_metrics=False,
        averaged=averaged,
        status=status,
        attempts=ledger.attempt,
        taken_steps=[ledger.steps[i] for i in phases],
        generator=ledger.generator or generator,
        training_loss=ledger.training_loss,
        versions=versions(),
        described=ledger.described,
        begun=ledger.begun,
    )
