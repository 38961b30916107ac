"""What the page promises of one run, what the promise means, and why it can be believed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tptopk.privacy.accounting import round_up
from tptopk.privacy.refusal import is_number
from tptopk.privacy.statement import filing
from tptopk.report.drawings import number, percent
from tptopk.report.markup import Markup, from_markdown, joined, table, tag
from tptopk.report.sheet import Sheet
from tptopk.training.begun import how_to_resume
from tptopk.training.verify import UNCHECKED

# what each check of training/verify is about, for somebody who does not program
CHECKS = {
    "ledger": "The log of every private step is complete and unaltered",
    "charges": "Every step was charged as the plan prescribes",
    "end": "How the run ended is on record",
    "checkpoint": "The saved intermediate state agrees with the log",
    "privacy": "The method protects privacy",
    "accounting": "Independent calculations of ε agree",
    "budget": "The privacy spent stays within the budget",
    "plan": "The plan on file is the one that was followed",
    "files": "Model and support belong to this log",
    "model": "The model on file is the one this run produced",
    "support": "The chosen coordinates on file are this run's",
    "schema": "The columns and bounds on file are those of this run",
    "warmup": "The record of the warm-up is this run's",
    "model's ledger": "The model itself names this log",
    "run.json": "The stated ε is not below what the log supports",
    "statement": "The privacy statement says what the log supports",
    "checks": "The folder can be checked",
}


def standing(sheet: Sheet) -> tuple[str, str]:
    """A run's colour (good, care or bad) and the first words about it."""
    if not sheet.private:
        return "bad", "This model is NOT private"
    if not sheet.verdict.holds:
        return "bad", "The checks of this run FAIL: it supports no privacy claim"
    if sheet.delta_too_large:
        return "care", "δ is too large for a promise: at or above 1/N it allows publishing a random record"
    if sheet.seeded:
        return "care", "An experiment, not for release"
    if sheet.status == "crashed":
        return "care", "This run is not finished"
    if sheet.status != "finished":
        return "care", f"This run ended early: {sheet.status}"
    return "good", "Every check of this run holds"


def pill(sheet: Sheet) -> Markup:
    colour, words = standing(sheet)
    return tag("span", words, class_=f"pill {colour}")


def filed(sheet: Sheet) -> Markup:
    """What the run is filed under."""
    if sheet.plan is None or sheet.verdict.facts is None:
        return Markup()
    rows = filing(sheet.plan, sheet.verdict.facts)
    return (
        tag("dl", *(tag("div", tag("dt", what), tag("dd", words)) for what, words in rows), class_="filed")
        if rows
        else Markup()
    )


def box(colour: str, lead: str, lines: Sequence[str], *, role: str | None = None) -> Markup:
    """The box at the top: a sign in its colour (good, care or bad), the first words, and the rest, a line a paragraph or a list."""
    return tag(
        "div",
        tag("span", {"good": "✓", "care": "!", "bad": "✕"}[colour], class_="sign", aria_hidden="true"),
        tag("div", tag("p", lead, class_="lead"), *(line if _is_list(line) else tag("p", line) for line in lines)),
        class_=f"claim {colour}",
        role=role,
    )


def _is_list(line: str) -> bool:
    return isinstance(line, Markup) and line.startswith("<ul")


def claim(sheet: Sheet) -> Markup:
    colour, words = standing(sheet)
    verdict, lines = sheet.verdict, []
    supported = sheet.private and verdict.holds
    if supported:
        unit = sheet.plan.unit if sheet.plan else "record"
        lines.append(
            joined(
                "Without the seed, its method would satisfy " if sheet.seeded else "Its log supports a claim of ",
                tag("strong", f"(ε, δ) = ({round_up(verdict.epsilon)}, {verdict.delta:g})", class_="nowrap"),
                f" differential privacy for every {unit} of the training data.",
            )
        )
    if not sheet.private:
        lines.append(Markup("It was trained without clipping and without noise, for comparison. Do not release it."))
    elif not verdict.holds:
        failed = [
            joined(tag("strong", CHECKS.get(what, what)), ": no. ", found)
            for what, ok, found in verdict.checks
            if ok is False
        ]
        lines.append(tag("ul", *(tag("li", line) for line in failed)))
        lines.append(Markup("No figure below may be relied on until this is explained."))
    if sheet.seeded and sheet.private:
        lines.append(
            Markup(
                "The noise came from a fixed seed: whoever knows the seed can subtract it. The figures describe the method, not this model."
            )
        )
    if sheet.delta_too_large and sheet.plan is not None:
        lines.append(
            joined(
                f"With {sheet.plan.dataset_size:,} {sheet.plan.unit}s, δ = {sheet.plan.delta:g} is no protection by itself; train with a δ well "
                f"below {1 / sheet.plan.dataset_size:.1g}."
            )
        )
    if sheet.status == "crashed" and supported:
        lines.append(Markup("It crashed or is still going on. Until its log is closed the whole plan counts as spent."))
        lines.append(joined("If it crashed, go on with: ", tag("code", how_to_resume(sheet.path))))
    count = sum(ok is True for _, ok, _ in verdict.checks)
    unsettled = sum(ok is None for _, ok, _ in verdict.checks)
    left = f"; {unsettled} are open until the run is closed" if unsettled else ""
    lines.append(joined(f"{count} of {len(verdict.checks)} checks hold{left}."))
    return box(colour, words, lines, role="status" if colour != "bad" else "alert")


def key_figures(sheet: Sheet) -> Markup:
    tiles: list[tuple[str, str, str]] = []
    test = sheet.test
    if "accuracy" in test:
        tiles.append((accuracy(test["accuracy"]), "test accuracy", "on records it never saw"))
    for name, value in [(n, v) for n, v in test.items() if n != "accuracy"][:3]:
        tiles.append((_small(value), f"test {name}", "on records it never saw"))
    if not test:
        tiles.append(("–", "test result", "no test set, or the run did not get there"))
    plan = sheet.plan
    if plan is not None and sheet.private:
        budget = (
            f"of a budget of {plan.target_epsilon:g}" if plan.target_epsilon else f"by the {plan.accountant} accountant"
        )
        if not sheet.verdict.holds:
            budget = "by its log alone: the checks fail"
        tiles.append((round_up(sheet.verdict.epsilon), "ε spent", budget))
        tiles.append((_power(plan.delta), "δ", f"for {plan.dataset_size:,} {plan.unit}s, a public number"))
    elif not sheet.private:
        tiles.append(("∞", "ε", "nothing was protected"))
    if sheet.support is not None and sheet.support.total:
        found = sheet.support
        tiles.append((percent(found.ratio), "trained coordinates", f"{found.size:,} of {found.total:,}"))
    if plan is not None:
        taken = len(sheet.steps.step)
        tiles.append((f"{taken:,}", "steps taken", f"of {plan.steps:,} planned"))
    seconds = sheet.summary.get("seconds")
    if is_number(seconds):
        tiles.append((_duration(seconds), "training time", _engine(sheet.summary.get("engine"))))
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", tag("b", value), tag("small", more)), class_="tile")
            for value, name, more in tiles
        ),
        class_="tiles",
    )


def accuracy(share: float) -> str:
    return "100%" if share == 1 else f"{100 * share:.2f}%"


def _small(value: float) -> str:
    """A loss of 1.7e-07 says no more than this."""
    return "< 0.001" if 0 < value < 1e-3 else number(value)


def _engine(value: object) -> str:
    return f"engine: {value}" if isinstance(value, str) else ""


def _power(value: float) -> str:
    exponent = math.log10(value)
    if abs(exponent - round(exponent)) < 1e-9:
        return "10" + str(round(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:g}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def best_guess(epsilon: float, delta: float) -> float:
    """The most often that anybody can be right about whether a record took part, which a coin decided beforehand.

    (ε, δ) bounds the gap between hits and false alarms by (e^ε − 1 + 2δ)/(e^ε + 1); half of it comes on top of 1/2.
    """
    return min(1.0, 0.5 + 0.5 * (math.tanh(epsilon / 2) + 2 * delta / (math.exp(min(epsilon, 700.0)) + 1)))


def meaning(sheet: Sheet) -> Markup:
    plan, epsilon = sheet.plan, sheet.verdict.epsilon
    if plan is None or not sheet.private or sheet.seeded or not sheet.verdict.holds or not math.isfinite(epsilon):
        return Markup()
    most = 100 * best_guess(epsilon, plan.delta)
    shown = f"{math.ceil(most * 10) / 10:.1f}%"
    scale = tag(
        "div",
        tag("span", "", class_="filled", style=f"width:{min(100.0, max(0.0, most)):.1f}%"),
        tag("span", "", class_="coin"),
        class_="scale",
        role="img",
        aria_label=f"50% is a coin; at most {shown} here; 100% would be certainty",
    )
    ends = tag("p", tag("span", "0%"), tag("span", "50%: a coin"), tag("span", "100%: certainty"), class_="ends")
    return joined(
        tag(
            "p",
            f"Suppose a coin decides whether one {plan.unit} takes part in training. Somebody who knows all other {plan.unit}s, studies the "
            "finished model, and has unlimited computing power then guesses which way the coin fell. ",
            tag("strong", f"They are right at most {shown} of the time."),
            " That is a ceiling, for the worst case that mathematics allows.",
        ),
        scale,
        ends,
    )


def audited(sheet: Sheet) -> Markup:
    found = sheet.audit
    if found is None:
        why = sheet.missing.get("audit")
        words = (
            f"audit.json cannot be read: {why}."
            if why
            else "This run was not audited. An audit plants made-up records and tries to tell from the model which of them took part."
        )
        return tag("p", words, class_="absent")
    bounds = found.get("at_least")
    values = {str(k): float(v) for k, v in bounds.items() if is_number(v)} if isinstance(bounds, dict) else {}
    consistent = found.get("verdict") == "consistent"
    claimed = float(found["claimed"]) if is_number(found.get("claimed")) else math.nan
    most = max(values.values(), default=0.0)
    lead = (
        "The attacks found nothing that contradicts the claim."
        if consistent
        else f"The attacks contradict the claim: {found.get('verdict')}"
    )
    rows: list[list[object]] = [[f"by attack, {name}", f"at least {value:.3f}"] for name, value in values.items()]
    rows.append(["by calculation", f"at most {claimed:.3f}" if math.isfinite(claimed) else "unknown"])
    words = (
        f"{_count(found.get('observations'))} observations; each bound is wrong at most {_text_or_number(found.get('error_rate'))} of the time. An attack "
        "can only show that ε is at least so much; the calculation shows that it is at most so much. Both hold if the first is below the second."
    )
    top = max(claimed, most) if math.isfinite(claimed) else most
    scale = (
        tag(
            "div",
            tag("span", "", class_="filled" if consistent else "filled wrong", style=f"width:{100 * most / top:.1f}%"),
            class_="scale",
            role="img",
            aria_label=f"at least {most:.3f} of at most {top:.3f}",
        )
        if most > 0
        else None
    )
    return joined(
        tag("p", lead, class_="verdict" if consistent else "verdict wrong"),
        scale,
        table(["ε", "found"], rows, "Audit"),
        tag("p", words, class_="aside"),
    )


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "Some"


def _text_or_number(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, float) else "an unknown part"


def _outcome(ok: bool | None) -> Markup:
    if ok is None:
        return tag("span", "○ open", class_="open")
    return tag("span", "✓ holds" if ok else "✕ FAILS", class_="holds" if ok else "fails")


def checks(sheet: Sheet) -> Markup:
    rows: list[list[object]] = [
        [CHECKS.get(what, what), _outcome(ok), words] for what, ok, words in sheet.verdict.checks
    ]
    return tag(
        "details",
        tag("summary", f"{len(rows)} checks of the folder against its own log"),
        table(["check", "outcome", "found"], rows, "Checks"),
        tag("p", "Not checked, because no file can show it:"),
        tag("ul", *(tag("li", item) for item in UNCHECKED)),
        open=not sheet.verdict.holds,
    )


def statement(sheet: Sheet) -> Markup:
    if sheet.statement is None:
        return tag("p", "Without a readable log nothing can be stated.", class_="absent")
    body = sheet.statement.removeprefix("# Privacy statement")
    if not sheet.verdict.holds and sheet.private:
        warning = tag(
            "p",
            "The checks of this run fail. What follows is what its log would support if they held.",
            class_="verdict wrong",
        )
    else:
        warning = None
    return joined(
        warning,
        tag(
            "details", tag("summary", "What may be claimed, and what may not"), from_markdown(body), class_="statement"
        ),
    )
