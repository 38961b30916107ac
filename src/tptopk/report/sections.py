"""What the page says of one run, section by section, in words for somebody who does not program."""

from __future__ import annotations

import math
from typing import Any

from tptopk.report.claim import accuracy, audited, checks, claim, filed, key_figures, meaning, statement
from tptopk.report.drawings import Curve, Mark, chart, density_map, percent, thinned
from tptopk.report.markup import Markup, joined, table, tag
from tptopk.report.sheet import Sheet
from tptopk.supports.advice import Advice

BUCKETS = 400  # points of a curve
CELLS = 24_000  # of all maps together
LAYERS = 60  # shown one by one


def run_sections(sheet: Sheet, detail: float) -> Markup:
    return joined(
        filed(sheet),
        claim(sheet),
        key_figures(sheet),
        _section("What the promise means", meaning(sheet)),
        _section("The plan", _plan(sheet)),
        _section("Over the steps", _over_steps(sheet, detail)),
        _section("How much signal the trained coordinates keep", _energy(sheet)),
        _section("Where the trained coordinates are", _layers(sheet, detail)),
        _section("Attacked on purpose", audited(sheet)),
        _section("The checks, one by one", checks(sheet)),
        _section("Privacy statement", statement(sheet)),
        _section("Settings", _settings(sheet)),
    )


def _section(title: str, content: Markup) -> Markup:
    return tag("section", tag("h3", title), content) if content else Markup()


def _plan(sheet: Sheet) -> Markup:
    plan = sheet.plan
    if plan is None:
        return tag("p", "The log cannot be read, so what was planned is not known.", class_="absent")
    facts = sheet.verdict.facts
    charged = facts.charged_steps if facts else [0] * len(plan.phases)
    bars: list[Markup] = []
    rows: list[list[object]] = []
    for place, (phase, spent) in enumerate(zip(plan.phases, charged, strict=True)):
        name = phase.name or "training"
        dense = not plan.spec.sparse or (plan.spec.warmup and place == 0)
        what = "all coordinates" if dense else f"{percent(plan.active_ratio)} of the coordinates"
        share = max(12.0, 100 * phase.steps / plan.steps)
        bars.append(
            tag(
                "div",
                tag("b", name),
                tag("span", f"{phase.steps:,} steps, {what}"),
                class_=f"phase phase-{place % 2}",
                style=f"flex:{share:.1f} 1 7em",
            )
        )
        noise = f"{phase.noise_multiplier:.4g}" if plan.spec.private else "none"
        clip = f"{phase.clip_norm:g}" if math.isfinite(phase.clip_norm) else "none"
        rows.append(
            [
                name,
                f"{phase.steps:,}",
                _counted(sheet, place, spent),
                what,
                noise,
                clip,
                f"{plan.expected_batch_size(phase):,.0f}",
            ]
        )
    for query in plan.queries:
        rows.append(
            [
                f"question to the data: {query.name}",
                query.steps,
                query.steps,
                "–",
                f"{query.noise_multiplier:.4g}",
                f"{query.clip_norm:g}",
                "–",
            ]
        )
    head = [
        "phase",
        "steps planned",
        "counted as spent",
        "what is trained",
        "noise σ",
        "clip norm C",
        f"{plan.unit}s a step, expected",
    ]
    sentence = f"Method {plan.method}: {plan.spec.summary}."
    if plan.spec.warmup:
        sentence += (
            " The coordinates are chosen from results that are already private, so choosing them costs no privacy."
        )
    return joined(
        tag("p", sentence),
        tag("div", *bars, class_="phases"),
        table(head, rows, "Phases of the plan"),
    )


def _counted(sheet: Sheet, phase: int, counted: int) -> str:
    """Steps that count; of an open run also how many of them its log has so far."""
    if sheet.status == "crashed" and sheet.record is not None and sheet.record.charged[phase] != counted:
        return f"{counted:,} ({sheet.record.charged[phase]:,} so far)"
    return f"{counted:,}"


def _over_steps(sheet: Sheet, detail: float) -> Markup:
    plan, steps, drawn = sheet.plan, sheet.steps, []
    buckets = max(24, round(BUCKETS * min(1.0, 3 * detail)))
    switches = []
    if plan is not None:
        after = 0
        for phase, following in zip(plan.phases, plan.phases[1:], strict=False):
            after += phase.steps
            switches.append(Mark(after, f"{following.name or 'next phase'} begins"))
    if len(sheet.spent) > 1:
        marks = [mark for mark in switches if 0 < mark.at < sheet.spent[-1][0]]
        if plan is not None and plan.target_epsilon:
            marks.append(Mark(plan.target_epsilon, f"budget: {plan.target_epsilon:g}", upright=False))
        curve = Curve("ε", [x for x, _ in sheet.spent], [y for _, y in sheet.spent], "a")
        drawn.append(
            figure(
                chart([curve], title="Privacy spent", x_label="steps charged", y_label="ε", marks=marks),
                "Privacy spent, step by step. It only ever grows, and the plan was made to end within the budget.",
            )
        )
    marks = [mark for mark in switches if len(steps.step) and steps.step[0] < mark.at < steps.step[-1]]
    norms = [(x, y) for x, y in zip(steps.step, steps.norm, strict=True) if not math.isnan(y)]
    if norms:
        xs, ys, low, high = thinned([x for x, _ in norms], [y for _, y in norms], buckets)
        spread = len(norms) > len(xs)
        curve = Curve("mean" if spread else "norm", xs, ys, "b", low if spread else None, high if spread else None)
        drawn.append(
            figure(
                chart([curve], title="Size of the private gradient", x_label="step", y_label="norm", marks=marks),
                "How long each private step was, noise included. Where fewer coordinates are trained there is less noise, and the steps are shorter."
                + (" The band spans the least and the most in each stretch of steps." if spread else ""),
            )
        )
    if len(steps.step):
        xs, ys, _, _ = thinned(steps.step, steps.active, buckets)
        drawn.append(
            figure(
                chart(
                    [Curve("trained", xs, ys, "c")],
                    title="Coordinates trained",
                    x_label="step",
                    y_label="coordinates",
                    marks=marks,
                ),
                "How many of the model's coordinates each step trained.",
            )
        )
    notes = []
    if not len(steps.step):
        notes.append(
            tag(
                "p",
                f"No steps are on record: {sheet.missing.get('metrics', 'metrics.jsonl is empty')}.",
                class_="absent",
            )
        )
    if steps.damaged:
        notes.append(tag("p", f"{steps.damaged:,} lines of metrics.jsonl are damaged and left out.", class_="absent"))
    if "spent" in sheet.missing:
        notes.append(tag("p", f"Privacy over the steps cannot be drawn: {sheet.missing['spent']}.", class_="absent"))
    score = accuracy(sheet.test["accuracy"]) if "accuracy" in sheet.test else None
    drawn.append(
        tag(
            "div",
            tag("p", score, class_="large") if score else None,
            tag("p", "Test accuracy of the finished model" if score else "No test accuracy is on record."),
            tag(
                "p",
                "It is measured once, at the end, on test records. Measuring it on the private records along the way would "
                "itself reveal something about them.",
                class_="aside",
            ),
            class_="once",
        )
    )
    return joined(tag("div", *drawn, class_="figures"), *notes)


def figure(content: Markup, caption: str) -> Markup:
    return tag("figure", content, tag("figcaption", caption))


def _energy(sheet: Sheet) -> Markup:
    if len(sheet.kept) < 2 or sheet.advice is None:
        return tag("p", _why_no_advice(sheet), class_="absent")
    kept, chosen = sheet.kept, sheet.chosen
    xs = [c.active_ratio for c in kept]
    ranked = Curve(
        "ranked by the warm-up",
        xs,
        [c.kept.estimate for c in kept],
        "a",
        [c.kept.low for c in kept],
        [c.kept.high for c in kept],
        dots=True,
    )
    inside = chosen is not None and xs[0] < chosen.active_ratio < 1
    drawing = chart(
        [ranked, Curve("drawn at random", xs, xs, "c")],
        title="Signal kept",
        x_label="share of the coordinates trained",
        y_label="share of the signal kept",
        marks=[Mark(chosen.active_ratio, f"chosen: k = {chosen.active:,}")] if chosen is not None and inside else [],
        x_format=percent,
        y_format=percent,
        log_x=True,
        y_most=1.0,
    )
    caption = (
        "The further the line lies above the dotted one, the better the warm-up knew where the signal is. The band holds "
        f"the truth {sheet.advice.level:.0%} of the time"
    )
    caption += "; where it spans everything, the line is no more than a guess." if _in_the_dark(sheet) else "."
    words = tag(
        "div", tag("p", _kept_words(sheet)), tag("h4", "Would training fewer coordinates help?"), _advised(sheet.advice)
    )
    return tag("div", figure(drawing, caption), words, class_="figures")


def _in_the_dark(sheet: Sheet) -> bool:
    return sheet.advice is not None and sheet.advice.signal.low <= 0


def _kept_words(sheet: Sheet) -> str:
    chosen = sheet.chosen
    if chosen is None:
        return "This run drew its coordinates at random or trained all of them: its support is not on the curve."
    first = f"The {chosen.active:,} chosen coordinates, {percent(chosen.active_ratio)} of all, are spared {percent(1 - chosen.active_ratio)} of the noise."
    if _in_the_dark(sheet):
        return first + " How much of the signal they keep, the warm-up was too noisy to tell."
    share = chosen.kept
    return (
        first + f" They keep about {share.estimate:.0%} of the signal (between {share.low:.0%} and {share.high:.0%})."
    )


def _why_no_advice(sheet: Sheet) -> str:
    if sheet.plan is None:
        return "The log cannot be read, so nothing can be said."
    return f"This run has no warm-up to judge by. {sheet.missing.get('advice', '')}"


def _advised(advice: Advice) -> Markup:
    words = {
        "restrict": "Yes: restrict training to fewer coordinates",
        "stay dense": "No: train all coordinates",
        "cannot tell": "The warm-up cannot tell",
    }.get(advice.verdict, advice.verdict)
    if advice.active_ratio is not None:
        words += f", the best {percent(advice.active_ratio)} of them by the {advice.score} score"
    return joined(
        tag("p", words + ".", class_="verdict"),
        tag("ul", *(tag("li", reason) for reason in advice.reasons)),
        tag("p", "This advice reads only what was released already and costs no privacy.", class_="aside"),
    )


def _layers(sheet: Sheet, detail: float) -> Markup:
    support = sheet.support
    if support is None:
        return tag("p", f"Not known: {sheet.missing.get('support', 'no support is on file')}.", class_="absent")
    if not support.total or not support.size:
        return tag("p", "No coordinate is active.", class_="absent")
    names = [name for name, mask in support.masks.items() if mask.numel()]
    shown = sorted(names, key=lambda name: -support[name].numel())[:LAYERS]
    cells = int(CELLS * detail / len(shown))
    rows = []
    for name in names:
        if name not in shown:
            continue
        mask = support[name].cpu().numpy()
        share = support.sizes[name] / mask.size
        said = f"{name}: {support.sizes[name]:,} of {mask.size:,} coordinates trained, {percent(share)}"
        picture = density_map(mask, min(1600, cells), said) if cells >= 16 and mask.ndim else None
        bar = tag(
            "div",
            tag("span", "", class_="filled", style=f"width:{100 * share:.1f}%"),
            tag("span", "", class_="usual", style=f"left:{100 * support.ratio:.1f}%"),
            class_="share",
        )
        more = f"{' × '.join(map(str, mask.shape)) or 'one number'}; {support.sizes[name]:,} of {mask.size:,}"
        rows.append(
            tag(
                "div",
                tag("div", tag("b", name), tag("small", more), class_="who"),
                tag("div", picture, class_="where"),
                tag("div", bar, tag("span", percent(share), class_="much"), class_="how"),
                class_="layer",
            )
        )
    rest = [name for name in names if name not in shown]
    if rest:
        active, total = sum(support.sizes[n] for n in rest), sum(support[n].numel() for n in rest)
        rows.append(
            tag(
                "p",
                f"{len(rest)} smaller layers together: {active:,} of {total:,} trained, {percent(active / total)}.",
                class_="aside",
            )
        )
    words = f"Each row is one layer of the model. In its map the darker a spot, the more of the coordinates there were trained; the bar says how many, beside {percent(support.ratio)} over the whole model (the line across)."
    if support.is_full:
        words = "All coordinates of all layers were trained."
    return joined(tag("p", words), tag("div", *rows, class_="layers"))


def _settings(sheet: Sheet) -> Markup:
    given = [(key, value) for key, value in sheet.config.items() if value is not None]
    rows: list[list[object]] = [[str(key), _setting(value)] for key, value in given[:200]]
    if not rows:
        words = (
            f"run.json cannot be read: {sheet.missing['run.json']}."
            if "run.json" in sheet.missing
            else "No settings are on file."
        )
        return tag("p", words, class_="absent")
    return tag(
        "details", tag("summary", f"{len(rows)} settings of this run"), table(["setting", "value"], rows, "Settings")
    )


def _setting(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 400 else text[:400] + "…"
