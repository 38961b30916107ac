"""One page for a meeting: what a run may claim, how it got there and how well it does, in a single HTML file.

The page holds everything it shows: no network, no script but its own few lines, which its content policy names by their
hash. It reads without them. Whatever comes from a file is escaped by `markup`, the only place that makes HTML.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev
from string import Template
from typing import Any

from tptopk import __version__
from tptopk.privacy.accounting import round_up
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal
from tptopk.report.claim import box, pill
from tptopk.report.drawings import error_bars, percent
from tptopk.report.markup import Markup, joined, table, tag
from tptopk.report.sections import figure, run_sections
from tptopk.report.sheet import Sheet, read_sheet

MOST_BYTES = 3_000_000

WORDS = {
    "ε (epsilon)": "The privacy spent. The smaller, the less the model can reveal about any one record. 0 would reveal nothing at all.",
    "δ (delta)": "A small probability with which the promise of ε may not hold; it must be far below one in the number of records.",
    "Private gradient": "The direction of one training step, after each record's influence was limited (clipping) and noise was added.",
    "σ, C": "How much noise was added (σ), in units of the most that one record may contribute (C).",
    "Coordinates": "The adjustable numbers inside the model. d is how many there are, k how many were trained.",
    "Support": "The coordinates that were trained; all others were left alone and needed no noise.",
    "Warm-up": "A short first phase that trains everything, privately, and finds out which coordinates carry the signal.",
    "Accountant": "The calculation that adds up the privacy spent over all steps. It errs on the safe side.",
}


def write_page(
    paths: Sequence[str | Path],
    output: str | Path,
    *,
    title: str | None = None,
    on_run: Callable[[str], object] = lambda name: None,
) -> tuple[list[Sheet], int]:
    """Read run folders and write their page; returns what was read, and the page's size in bytes."""
    target = Path(output)
    if target.suffix.lower() not in (".html", ".htm"):
        raise Refusal(f"the page is to be written to {target}; give a name that ends in .html")
    if not paths:
        raise Refusal("give at least one run folder")
    places = [Path(path).resolve() for path in paths]
    twice = [path for place, path in zip(places, paths, strict=True) if places.count(place) > 1]
    if twice:
        raise Refusal(f"{twice[0]} is given twice; each run counts once")
    sheets = []
    for place, path in enumerate(paths, 1):
        on_run(f"checking {path}, run {place} of {len(paths)}")
        sheets.append(read_sheet(path))
    content = page(sheets, title=title).encode()
    try:
        target.write_bytes(content)
    except OSError as error:
        raise Refusal(f"cannot write {target}: {error.strerror}") from error
    return sheets, len(content)


def page(sheets: Sequence[Sheet], *, title: str | None = None) -> str:
    """The page of one run or several, below 3 MB however long they were: where it must be, maps and curves are left out."""
    for detail in (1.0, 0.25, 0.0):
        content = _page(sheets, title, detail / len(sheets))
        if len(content.encode()) < MOST_BYTES:
            return content
    raise Refusal(f"a page of {len(sheets)} runs would weigh more than 3 MB; make several pages")


def _page(sheets: Sequence[Sheet], title: str | None, detail: float) -> str:
    room = files("tptopk.report")
    style, script, frame = ((room / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js", "html"))
    heading = title or (
        f"Private training: {sheets[0].name}" if len(sheets) == 1 else f"Private training: {len(sheets)} runs"
    )
    if len(sheets) == 1:
        body = joined(tag("h2", "The run", class_="unseen"), run_sections(sheets[0], detail))
    else:
        parts = [
            tag(
                "details",
                tag("summary", tag("h2", sheet.name), " ", pill(sheet), class_="run-summary"),
                run_sections(sheet, detail),
                class_="run",
                id=f"run-{place}",
            )
            for place, sheet in enumerate(sheets, 1)
        ]
        body = joined(_compared(sheets), *parts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(frame).substitute(
        title=tag("title", heading),
        heading=tag("h1", heading),
        style=style,
        script=script,
        digest=digest,
        body=body,
        glossary=_glossary(),
        version=__version__,
    )


# ---- Several runs ------------------------------------------------------------------------------------------------------


def compared(sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
    """One row a group of runs with the same method, plan and budget: mean and standard deviation of the test accuracy."""
    groups: dict[tuple[object, ...], list[Sheet]] = {}
    for sheet in sheets:
        plan = sheet.plan
        key = ("unreadable", sheet.name) if plan is None else (plan.method, *_told_apart(sheet, plan).items())
        groups.setdefault(key, []).append(sheet)
    rows: list[dict[str, Any]] = []
    for of in groups.values():
        plan = of[0].plan
        accuracies = [100 * sheet.test["accuracy"] for sheet in of if "accuracy" in sheet.test]
        first = next((sheet.support for sheet in of if sheet.support is not None), None)
        rows.append(
            {
                "method": plan.method if plan else of[0].name,
                "names": [sheet.name for sheet in of],
                "differs": _told_apart(of[0], plan) if plan else {},
                "runs": len(of),
                "accuracies": accuracies,
                "mean": mean(accuracies) if accuracies else None,
                "std": stdev(accuracies) if len(accuracies) > 1 else None,
                "epsilon": max(sheet.verdict.epsilon for sheet in of) if of[0].private and plan else math.inf,
                "ratio": first.ratio if first else None,
                "holds": all(sheet.verdict.holds for sheet in of),
                "private": of[0].private,
                "seeded": any(sheet.seeded for sheet in of),
            }
        )
    for row in rows:
        row["label"] = _label(row, rows)
    return rows


def _told_apart(sheet: Sheet, plan: Plan) -> dict[str, str]:
    """What may differ between runs of one method, in the words of a label."""
    epsilon = "no target ε" if plan.target_epsilon is None else f"ε = {plan.target_epsilon:g}"
    return {
        "data": sheet.told.get("data", "data not named"),
        "size": f"N = {plan.dataset_size:,} {plan.unit}s",
        "model": sheet.told.get("model", "model not named").removeprefix("tptopk.models."),
        "epsilon": epsilon,
        "delta": f"δ = {plan.delta:g}",
        "ratio": f"{percent(plan.active_ratio)} trained",
        "steps": f"{plan.steps:,} steps",
        "score": f"{sheet.config.get('score', 'unknown')} score",
    }


def _label(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The method, and in what the row differs from others of its method; the data wherever any other row has other data."""
    like = [other["differs"] for other in rows if other["method"] == row["method"]]
    words = [
        value
        for what, value in row["differs"].items()
        if any(other.get(what) != value for other in (like if what != "data" else [r["differs"] for r in rows]))
    ]
    return f"{row['method']} ({', '.join(words)})" if words else str(row["method"])


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"


def _compared(sheets: Sequence[Sheet]) -> Markup:
    rows = compared(sheets)
    failing = [sheet.name for sheet in sheets if sheet.private and not sheet.verdict.holds]
    seeded = sum(sheet.seeded for sheet in sheets)
    open_ = [sheet for sheet in sheets if not sheet.private]
    lines = []
    if failing:
        lines.append(f"The checks FAIL for {', '.join(failing)}: nothing may be claimed for them.")
    loose = [sheet.name for sheet in sheets if sheet.delta_too_large]
    unfinished = [
        sheet.name for sheet in sheets if sheet.status != "finished" and sheet.private and sheet.verdict.holds
    ]
    if loose:
        lines.append(f"δ is at or above 1/N, too large for a promise: {', '.join(loose)}.")
    if unfinished:
        lines.append(f"Not finished: {', '.join(unfinished)}.")
    if open_:
        lines.append(f"Not private, for comparison only: {', '.join(sheet.name for sheet in open_)}.")
    if seeded:
        lines.append(f"{seeded} of {len(sheets)} runs used a fixed seed: experiments, not for release.")
    lines.append(
        "The claim of each run counts that run alone: if several of them used the same data, what they spent adds up."
    )
    if len({row["differs"].get("data") for row in rows}) > 1:
        lines.append(
            "The runs were trained on different data: their accuracies say nothing about which method is better."
        )
    colour = "bad" if failing else "care" if open_ or seeded or loose or unfinished else "good"
    lead = "Some runs fail their checks" if failing else "The checks of all private runs hold"
    cells: list[list[object]] = [
        [
            row["label"],
            row["runs"],
            _named(row["names"]),
            "–"
            if row["mean"] is None
            else f"{row['mean']:.2f}" + (f" ± {row['std']:.2f}" if row["std"] is not None else ""),
            round_up(row["epsilon"], 3),
            "–" if row["ratio"] is None else percent(row["ratio"]),
            tag("span", "not private", class_="fails")
            if not row["private"]
            else tag("span", "✓ hold", class_="holds")
            if row["holds"]
            else tag("span", "✕ FAIL", class_="fails"),
        ]
        for row in rows
    ]
    head = ["method, and what differs", "runs", "folders", "test accuracy, %", "ε", "coordinates trained", "checks"]
    bars = [(row["label"], row["accuracies"], row["mean"], row["std"]) for row in rows if row["mean"] is not None]
    drawing = (
        tag(
            "div",
            figure(
                error_bars(bars, "test accuracy, %"),
                "Each dot is a run, the diamond their mean, the bar one standard deviation to either side. A few runs do not make a ranking: where "
                "bars overlap, the difference may be chance.",
            ),
            class_="figures",
        )
        if bars
        else None
    )
    comparison = tag(
        "section",
        tag("h2", "The runs beside each other"),
        drawing,
        table(head, cells, "± is one standard deviation over the runs of a row"),
    )
    return joined(box(colour, lead, lines), comparison, tag("h2", "Each run"))


def _glossary() -> Markup:
    items = [joined(tag("dt", word), tag("dd", meaning)) for word, meaning in WORDS.items()]
    return tag("section", tag("h2", "The words of this page"), tag("dl", *items, class_="words"))
