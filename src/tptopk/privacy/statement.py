"""What may be claimed for a run, and what may not, in words that a person can sign."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from tptopk.privacy import accounting
from tptopk.privacy.accounting import Segment, round_up
from tptopk.privacy.ledger_record import LedgerRecord
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal

CURVE = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)  # values of δ at which a statement gives ε


@dataclass(frozen=True)
class Facts:
    """What a statement needs beside the plan."""

    epsilon: float | None  # spent, by the plan's accountant; None where nothing was private
    charged_steps: list[int]  # for each phase
    seeded: bool  # noise and samples can be recomputed from a seed
    test_metrics: bool
    averaged: bool
    status: str = "finished"
    generator: str = "philox"  # of the noise; or chacha20
    attempts: int = 1  # more than one if the run was resumed
    versions: dict[str, str] = field(default_factory=dict)  # of the software
    taken_steps: list[int] | None = None  # for each phase, those whose outcome is in the model
    training_loss: bool = False  # somebody asked to be shown it
    described: dict[str, str] = field(default_factory=dict)  # names of the run, its data and its model
    begun: list[str | None] = field(default_factory=list)  # when each attempt began; None where its ledger does not say
    ended: str | None = None
    in_memory: bool = False  # the record was in memory between checkpoints, and died with its process


def statement(plan: Plan, facts: Facts) -> str:
    title = ["# Privacy statement", "", *_filed(plan, facts)]
    if not plan.spec.private:
        warning = (
            "**This model is NOT private.** It was trained without clipping and without noise, for comparison. "
            "It may reveal its training records; do not release it."
        )
        return "\n".join([*title, warning]) + "\n"
    return "\n".join([*title, *_claim(plan, facts), "", *_mechanism(plan, facts), "", *_limits(plan, facts)]) + "\n"


def filing(plan: Plan, facts: Facts) -> list[tuple[str, str]]:
    """What a run is filed under: names that it was told, times of its computer's clock, and the plan's public numbers.

    Empty for ledgers of before such things were written down, whose statements stay as they were.
    """
    if not facts.described and not any(facts.begun):
        return []
    told = facts.described
    begun = ", ".join("not on record" if time is None else _shown(time) for time in facts.begun)
    rows = [
        ("Run", told.get("run", "not named")),
        ("Begun" if len(facts.begun) < 2 else f"Begun, {len(facts.begun)} attempts", begun or "not on record"),
        ("Ended", f"{_shown(facts.ended)}, {facts.status}" if facts.ended else _without_time(facts.status)),
        ("Data", f"{told.get('data', 'not named')}; declared size: {plan.dataset_size:,} {plan.unit}s"),
        ("Protected unit", f"one {plan.unit}"),
        ("Model", told.get("model", "not named")),
    ]
    if "columns" in told or "schema" in told:
        rows.append(("Columns", told.get("columns") or f"those that {told['schema']} declares"))
    return rows


def _shown(time: str) -> str:
    """2026-11-16T14:15:02Z as 2026-11-16 14:15 UTC."""
    return f"{time[:10]} {time[11:16]} UTC"


def _without_time(status: str) -> str:
    return "not on record: its ledger is not closed" if status == "crashed" else f"{status}, at a time not on record"


def _filed(plan: Plan, facts: Facts) -> list[str]:
    rows = filing(plan, facts)
    if not rows:
        return []
    return [
        *(f"- {what}: {words}" for what, words in rows),
        "",
        "Names are what the run was told, and times what its computer's clock showed: no figure rests on them, and no file can prove them.",
        "",
    ]


def charged_segments(plan: Plan, facts: Facts) -> list[Segment]:
    return plan.segments(dict(enumerate(facts.charged_steps)))


def facts_of(
    record: LedgerRecord,
    *,
    test_metrics: bool = False,
    averaged: bool = False,
    generator: str = "philox",
    training_loss: bool = False,
) -> Facts:
    """What a ledger alone says. Without its closing line the whole plan is charged, if that is more.

    The keywords are what the rest of the run says: `generator` counts where the ledger names none; `training_loss` and `averaged` add to it.
    """
    plan, phases = record.plan, range(len(record.plan.phases))
    charged = [record.charged[i] for i in phases]
    if record.end is None:
        charged = [max(n, p.steps) for n, p in zip(charged, plan.phases, strict=True)]
    facts = Facts(
        epsilon=None,
        charged_steps=charged,
        seeded=record.seeded,
        test_metrics=test_metrics,
        averaged=averaged or bool(record.end and record.end.get("averaged")),
        status=record.end["status"] if record.end else "crashed",
        generator=record.generator or generator,
        attempts=record.attempts,
        versions=record.versions,
        taken_steps=_taken(record),
        training_loss=record.training_loss or training_loss,
        described=record.described,
        begun=record.begun,
        ended=record.ended,
    )
    if not plan.spec.private:
        return facts
    epsilon = accounting.epsilon(charged_segments(plan, facts), plan.delta, plan.accountant)
    return replace(facts, epsilon=epsilon)


def _taken(record: LedgerRecord) -> list[int] | None:
    taken = record.end.get("taken") if record.end else None
    whole = isinstance(taken, list) and len(taken) == len(record.plan.phases)
    return taken if whole and all(isinstance(n, int) and n >= 0 for n in taken or []) else None


def without_amplification(segments: list[Segment], delta: float) -> float:
    """ε of the same noise if every record had taken part in every step: nothing rests on the sample being secret."""
    return _bound([s._replace(sample_rate=1.0) for s in segments], delta, "pld")


def _bound(segments: list[Segment], delta: float, accountant: str) -> float:
    """ε by the accountant, or by RDP where the accountant's arithmetic does not reach so small a δ: an upper bound either way."""
    try:
        return accounting.epsilon(segments, delta, accountant)
    except Refusal:
        return accounting.epsilon(segments, delta, "rdp")


def as_values(plan: Plan, facts: Facts) -> dict[str, Any]:
    """The statement as plain values for JSON."""
    if not plan.spec.private:
        return {"private": False, "method": plan.method}
    segments = charged_segments(plan, facts)
    return {
        "private": True,
        "for_release": not facts.seeded,
        "status": facts.status,
        "attempts": facts.attempts,
        "method": plan.method,
        "described": facts.described,
        "begun": facts.begun,
        "ended": facts.ended,
        "unit": plan.unit,
        "adjacency": plan.adjacency,
        "dataset_size": plan.dataset_size,
        "epsilon": facts.epsilon,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "curve": {f"{delta:g}": _bound(segments, delta, plan.accountant) for delta in CURVE},
        "epsilon_without_amplification": without_amplification(segments, plan.delta),
        "charged": [s._asdict() for s in segments],
        "generator": facts.generator,
        "versions": facts.versions,
        "statement": statement(plan, facts),
    }


def _claim(plan: Plan, facts: Facts) -> list[str]:
    assert facts.epsilon is not None
    segments = charged_segments(plan, facts)
    rdp = accounting.epsilon(segments, plan.delta, "rdp")
    paper = accounting.epsilon(segments, plan.delta, "rdp-paper")
    plain = without_amplification(segments, plan.delta)
    points = [(delta, _bound(segments, delta, plan.accountant)) for delta in CURVE]
    curve = ", ".join(f"ε({delta:g}) = {round_up(value)}" for delta, value in points)
    lines = []
    if facts.seeded:
        lines += [
            "**Not for release.** This run was an experiment with a fixed seed: whoever knows the seed can subtract the noise. "
            "The figures below describe the mechanism, not this model.",
            "",
        ]
    if facts.status == "crashed":
        lines += [
            "This run has **no closing line in its ledger**: it crashed, or is still going on. The whole plan is charged, or what the ledger "
            "holds if that is more.",
            "",
        ]
    elif facts.status != "finished":
        lines += [
            f"This run is **{facts.status}**: it ended after {sum(facts.charged_steps)} of {plan.steps} steps, and the figures count the "
            "steps that were charged. That it ended, and how, may depend on the data and is not covered.",
            "",
        ]
    if plan.delta_too_large:
        lines += [
            f"**δ = {plan.delta:g} is too large**: at or above 1/N it allows publishing a random record outright.",
            "",
        ]
    return [
        *lines,
        f"Training satisfies **(ε, δ) = ({round_up(facts.epsilon)}, {plan.delta:g})** differential privacy (accountant: {plan.accountant}).",
        "",
        f"- Other accountants, same run: ε = {round_up(rdp)} by RDP, {round_up(paper)} by RDP with the classic conversion. All are upper bounds.",
        f"- At other δ: {curve}.",
        f"- The figures count on Poisson sampling with a secret sample. Without that assumption the same noise gives ε = "
        f"{'∞' if math.isinf(plain) else round_up(plain)} at δ = {plan.delta:g}.",
        "- Unit of privacy: one record of the training set. A person with several records is not covered as one person."
        if plan.unit == "record"
        else f"- Unit of privacy: one {plan.unit}, with all its records: they are drawn together, averaged and clipped as one. That records "
        f"carry the right id of their {plan.unit} is taken as given.",
        f"- Neighbouring datasets: the number of {plan.unit}s, {plan.dataset_size:,}, was declared public; one {plan.unit} may be replaced by "
        f"one that contributes nothing (zero-out adjacency), accounted as adding or removing a {plan.unit}.",
        "- What is covered: every private gradient of the run and all that was computed from them: the final model, all "
        "intermediate models, the scores and the chosen supports"
        + ("; of earlier attempts up to the checkpoint that was gone on from." if _forgets(facts) else "."),
    ]


def _mechanism(plan: Plan, facts: Facts) -> list[str]:
    lines = [
        "## What was done",
        "",
        f"Method {plan.method}: {plan.spec.summary}. Each step drew a Poisson sample, set inactive coordinates of each {plan.unit}'s gradient "
        "to zero, clipped it to norm C, added Gaussian noise of standard deviation σC on the active coordinates, and divided by the "
        "public expected batch size.",
        "",
        "| phase | steps charged | of planned | sample rate | σ | C | divisor |",
        "|---|---|---|---|---|---|---|",
    ]
    for phase, charged in zip(plan.phases, facts.charged_steps, strict=True):
        lines.append(
            f"| {phase.name or 'training'} | {charged} | {phase.steps} | {phase.sample_rate:.6g} | {phase.noise_multiplier:.6g} | "
            f"{phase.clip_norm:g} | {plan.expected_batch_size(phase):.6g} |"
        )
    for query in plan.queries:
        lines.append(
            f"| query: {query.name} | {query.steps} | {query.steps} | {query.sample_rate:.6g} | {query.noise_multiplier:.6g} | "
            f"{query.clip_norm:g} | – |"
        )
    lines += [
        "",
        "A record whose gradient is not finite contributes zero; no file, message or figure of the run depends on "
        "whether there was one.",
    ]
    if facts.attempts > 1 and facts.taken_steps is not None:
        lost = sum(facts.charged_steps) - sum(facts.taken_steps)
        lines += [
            f"The run was resumed {facts.attempts - 1} time(s), each time with new randomness. {lost} steps were charged and lost; they stay "
            f"counted, and {plan.steps - sum(facts.taken_steps)} of the planned steps were not taken."
        ]
    if facts.versions:
        lines += ["Made with " + ", ".join(f"{name} {value}" for name, value in facts.versions.items()) + "."]
    if facts.averaged:
        lines += ["The released weights are a moving average of the trained ones, which costs nothing."]
    return lines


def _forgets(facts: Facts) -> bool:
    """Whether earlier attempts may have taken steps that no record holds."""
    return facts.in_memory and facts.attempts > 1


def _limits(plan: Plan, facts: Facts) -> list[str]:
    return [
        "## What is not covered",
        "",
        "- Choosing hyper-parameters, or the best of several runs, on the private data: every run on it counts, and this statement "
        "counts one.",
        "- Initial weights, features or settings that were made from the private data before this run.",
        "- A loader, collate or views function that mixes records: each record must be read on its own.",
        "- Statistics of the data used in preprocessing, unless they are listed above as a query.",
        "- Training loss or accuracy measured on the private records. "
        + (
            "**This run showed its training loss**: keep its logs as secret as the records."
            if facts.training_loss
            else "This library shows none" + (", beyond what the queries above ask." if plan.queries else ".")
        ),
        *(
            ["- The metrics on the test set: they describe the test records, which have no guarantee."]
            if facts.test_metrics
            else []
        ),
        "- Errors raised by the data itself (a record that cannot be read), and how long a step took.",
        "- Floating-point effects: noise is drawn in float32 from "
        + (
            "a generator seeded for the experiment"
            if facts.seeded
            else "ChaCha20 key streams of 256-bit keys from operating-system entropy; samples come from Philox"
            if facts.generator == "chacha20"
            else "Philox streams keyed from 256 bits of operating-system entropy "
            "(128-bit keys on a CPU, 64-bit on CUDA), which are not cryptographic generators"
        )
        + "; attacks on the low bits of floating-point noise are outside the model.",
        *(
            [
                "- That the run was broken off and resumed when it was: the figures hold if that did not depend on the data."
            ]
            if facts.attempts > 1
            else []
        ),
        *(
            [
                f"- What is not on record of the {facts.attempts} attempts: charges are kept in checkpoints alone, so **steps of a process that "
                "died after its last checkpoint are not counted**, and models, metrics or supports that it released since then are not covered."
            ]
            if _forgets(facts)
            else []
        ),
        "- What the record cannot prove: that the data was the data described, and that the software was run unmodified.",
    ]
