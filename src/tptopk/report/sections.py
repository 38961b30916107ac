"""What the page says of one run, section by section, in words for somebody who does not program."""

from __future__ import annotations

import math
from typing import Any

from tptopk.privacy.accounting import round_up
from tptopk.report.drawings import Curve, Mark, chart, density_map, number, percent, thinned
from tptopk.report.markup import Markup, from_markdown, joined, table, tag
from tptopk.report.sheet import Sheet
from tptopk.supports.advice import Advice
from tptopk.training.verify import UNCHECKED

BUCKETS = 400  # points of a curve
CELLS = 24_000  # of all maps together
LAYERS = 60  # shown one by one

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
    "warmup": "The record of the warm-up is this run's",
    "model's ledger": "The model itself names this log",
    "run.json": "The stated ε is not below what the log supports",
    "statement": "The privacy statement says what the log supports",
    "checks": "The folder can be checked",
}


def run_sections(sheet: Sheet, detail: float) -> Markup:
    return joined(
        _claim(sheet),
        _figures(sheet),
        _section("What the promise means", _meaning(sheet)),
        _section("The plan", _plan(sheet)),
        _section("Over the steps", _over_steps(sheet, detail)),
        _section("How much signal the trained coordinates keep", _energy(sheet)),
        _section("Where the trained coordinates are", _layers(sheet, detail)),
        _section("Attacked on purpose", _audited(sheet)),
        _section("The checks, one by one", _checks(sheet)),
        _section("Privacy statement", _statement(sheet)),
        _section("Settings", _settings(sheet)),
    )


def _section(title: str, content: Markup) -> Markup:
    return tag("section", tag("h3", title), content) if content else Markup()


def standing(sheet: Sheet) -> tuple[str, str]:
    """A run's colour (good, care or bad) and the first words about it."""
    if not sheet.private:
        return "bad", "This model is NOT private"
    if not sheet.verdict.holds:
        return "bad", "The checks of this run FAIL: it supports no privacy claim"
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


def _claim(sheet: Sheet) -> Markup:
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
            if not ok
        ]
        lines.append(tag("ul", *(tag("li", line) for line in failed)))
        lines.append(Markup("No figure below may be relied on until this is explained."))
    if sheet.seeded and sheet.private:
        lines.append(
            Markup(
                "The noise came from a fixed seed: whoever knows the seed can subtract it. The figures describe the method, not this model."
            )
        )
    if sheet.status == "crashed" and supported:
        lines.append(Markup("It crashed or is still going on. Until its log is closed the whole plan counts as spent."))
    count = sum(ok for _, ok, _ in verdict.checks)
    lines.append(joined(f"{count} of {len(verdict.checks)} checks hold."))
    sign = {"good": "✓", "care": "!", "bad": "✕"}[colour]
    return tag(
        "div",
        tag("span", sign, class_="sign", aria_hidden="true"),
        tag(
            "div",
            tag("p", words, class_="lead"),
            *(line if line.startswith("<ul") else tag("p", line) for line in lines),
        ),
        class_=f"claim {colour}",
        role="status" if colour != "bad" else "alert",
    )


def _figures(sheet: Sheet) -> Markup:
    tiles: list[tuple[str, str, str]] = []
    test = sheet.test
    if "accuracy" in test:
        tiles.append((f"{100 * test['accuracy']:.2f}%", "test accuracy", "on records it never saw"))
    for name, value in [(n, v) for n, v in test.items() if n != "accuracy"][:3]:
        tiles.append((number(value), f"test {name}", "on records it never saw"))
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
        tiles.append((f"{taken:,}", "steps", f"of {plan.steps:,} planned"))
    seconds = sheet.summary.get("seconds")
    if isinstance(seconds, (int, float)) and math.isfinite(seconds):
        tiles.append((_duration(seconds), "training time", _text(sheet.summary.get("engine"))))
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", tag("b", value), tag("small", more)), class_="tile")
            for value, name, more in tiles
        ),
        class_="tiles",
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


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


def _meaning(sheet: Sheet) -> Markup:
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
            [name, f"{phase.steps:,}", f"{spent:,}", what, noise, clip, f"{plan.expected_batch_size(phase):,.0f}"]
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
        "charged",
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
    score = f"{100 * sheet.test['accuracy']:.2f}%" if "accuracy" in sheet.test else None
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


def _audited(sheet: Sheet) -> Markup:
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
    values = {str(k): float(v) for k, v in bounds.items() if _finite(v)} if isinstance(bounds, dict) else {}
    consistent = found.get("verdict") == "consistent"
    claimed = float(found.get("claimed", math.nan)) if _finite(found.get("claimed")) else math.nan
    most = max(values.values(), default=0.0)
    lead = (
        "The attacks found nothing that contradicts the claim."
        if consistent
        else f"The attacks contradict the claim: {found.get('verdict')}"
    )
    rows: list[list[object]] = [[f"by attack, {name}", f"at least {value:.3f}"] for name, value in values.items()]
    rows.append(["by calculation", f"at most {claimed:.3f}" if math.isfinite(claimed) else "unknown"])
    words = f"{_count(found.get('observations'))} observations; each bound is wrong at most {_text_or_number(found.get('error_rate'))} of the time. An attack can only show that ε is at least so much; the calculation shows that it is at most so much. Both hold if the first is below the second."
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


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "Some"


def _text_or_number(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, float) else "an unknown part"


def _checks(sheet: Sheet) -> Markup:
    rows: list[list[object]] = [
        [CHECKS.get(what, what), tag("span", "✓ holds" if ok else "✕ FAILS", class_="holds" if ok else "fails"), words]
        for what, ok, words in sheet.verdict.checks
    ]
    return tag(
        "details",
        tag("summary", f"{len(rows)} checks of the folder against its own log"),
        table(["check", "outcome", "found"], rows, "Checks"),
        tag("p", "Not checked, because no file can show it:"),
        tag("ul", *(tag("li", item) for item in UNCHECKED)),
        open=not sheet.verdict.holds,
    )


def _statement(sheet: Sheet) -> Markup:
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
