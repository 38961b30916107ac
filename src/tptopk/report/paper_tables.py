"""The main table of the paper in Markdown, and what all tables share: ours beside the paper's, differences with intervals, and what they say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tptopk.experiments import published, recipes
from tptopk.experiments.recipes import PAPER
from tptopk.report.outcomes import LEVEL, Difference, Outcomes, Spread, averaged, paired, spread, together, unpaired

NAMES = {
    "mnist": "MNIST",
    "fmnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "pneumoniamnist": "PneumoniaMNIST (stand-in for EyePACS)",
}
NOT_RUN = "not run"
ON_CPU = " †"  # some of the runs behind a number were made on another device than most


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def cell(outcomes: Outcomes, measure: str = "accuracy", digits: int = 2, scale: float = 1.0, **wanted: Any) -> str:
    """Mean ± std of one cell over its seeds, or that it was not run."""
    values = {seed: scale * value for seed, value in outcomes.values(measure, **wanted).items()}
    found = spread(values)
    return NOT_RUN if found is None else found.words(digits, outcomes.seeds) + mark(outcomes, wanted)


def mark(outcomes: Outcomes, *sides: dict[str, Any]) -> str:
    return ON_CPU if any(outcomes.other_device(**wanted) for wanted in sides) else ""


def of_paper(one: published.Value, other: published.Value) -> Spread:
    """The difference of two of the paper's means, whose runs are not paired."""
    return _put_together(one.mean - other.mean, [Spread(v.mean, v.std, published.SEEDS) for v in (one, other)], 1.0)


def _put_together(mean: float, sides: Sequence[Spread], scale: float) -> Spread:
    """`mean`, with the uncertainty of the scaled sum or difference of several, each of which varies for itself."""
    if not all(side.std for side in sides):
        return Spread(mean, None, published.SEEDS)
    variance, degrees = together(side.uncertainty for side in sides)
    return Spread(mean, scale * math.sqrt(published.SEEDS * variance), published.SEEDS, degrees)


def judged(difference: Difference | None, paper: Spread | None, digits: int = 2, marked: str = "") -> list[str]:
    """Difference with interval, verdict, the paper's difference, and whether it was reproduced."""
    theirs = "–" if paper is None else f"{paper.mean:+.{digits}f}"
    if difference is None:
        return [NOT_RUN, NOT_RUN, theirs, "–" if paper is None else NOT_RUN]
    agrees = "–" if paper is None else difference.agrees(paper)
    return [difference.words(digits) + marked, difference.verdict, theirs, agrees]


JUDGED = ("ours [95% interval]", "verdict", "the paper's", "reproduced")


# ---- The main table --------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    method: str
    other: str
    variant: str = PAPER
    other_variant: str = PAPER

    @property
    def label(self) -> str:
        sides = ((self.method, self.variant), (self.other, self.other_variant))
        return " − ".join(name if variant == PAPER else f"{name} ({variant})" for name, variant in sides)

    def paper(self, dataset: str, epsilon: float) -> Spread | None:
        if self.variant != PAPER:
            return None
        return of_paper(*(published.MAIN[dataset, epsilon, method] for method in (self.method, self.other)))


def comparisons(main: Outcomes) -> list[Comparison]:
    """Those of the paper, chosen before any run, and the first of them with one recipe for both; then variants of TP-TopK against the same two."""
    ours = [
        Comparison("tp-topk", "tp-rand"),
        Comparison("tp-topk", "tp-rand", other_variant=recipes.TWIN),
        Comparison("tp-topk", "dp-sgd"),
        Comparison("on-topk", "on-rand"),
        Comparison("on-topk", "dp-sgd"),
    ]
    return ours + [Comparison("tp-topk", other, v) for v in main.variants("tp-topk") for other in ("tp-rand", "dp-sgd")]


Cell = tuple[str, float]  # dataset, ε


def sides(comparison: Comparison) -> dict[Cell, tuple[dict[str, Any], dict[str, Any]]]:
    """Which runs are compared, cell by cell."""
    two = ((comparison.method, comparison.variant), (comparison.other, comparison.other_variant))

    def of(cell: Cell, method: str, variant: str) -> dict[str, Any]:
        return {"dataset": cell[0], "target_epsilon": cell[1], "method": method, "variant": variant}

    cells = [(dataset, epsilon) for dataset in recipes.DATASETS for epsilon in recipes.EPSILONS]
    return {cell: (of(cell, *two[0]), of(cell, *two[1])) for cell in cells}


def accuracies(main: Outcomes, comparison: Comparison) -> dict[Cell, tuple[dict[int, float], dict[int, float]]]:
    """By seed, of either side."""
    return {cell: (main.values(**one), main.values(**other)) for cell, (one, other) in sides(comparison).items()}


def differences(main: Outcomes, comparison: Comparison) -> dict[Cell, Difference | None]:
    return {cell: paired(*pair) for cell, pair in accuracies(main, comparison).items()}


def main_accuracy(main: Outcomes) -> str:
    rows = []
    for dataset in recipes.DATASETS:
        for epsilon in recipes.EPSILONS:
            where: dict[str, Any] = {"dataset": dataset, "target_epsilon": epsilon}
            head = [NAMES[dataset], f"{epsilon:g}"]
            own = [cell(main, method=method, variant=PAPER, **where) for method in recipes.METHODS]
            paper = [published.MAIN[dataset, epsilon, method] for method in recipes.METHODS]
            rows.append([*head, "ours", *own])
            rows.append([*head, "the paper", *(f"{value.mean:.2f} ± {value.std:.2f}" for value in paper)])
            for variant in dict.fromkeys(v for method in recipes.METHODS for v in main.variants(method)):
                own = [
                    cell(main, method=m, variant=variant, **where) if variant in main.variants(m) else "–"
                    for m in recipes.METHODS
                ]
                rows.append([*head, f"ours, {variant}", *own])
    return table(["dataset", "ε", "", *recipes.METHODS], rows)


def main_differences(main: Outcomes) -> str:
    parts = []
    for comparison in comparisons(main):
        two = sides(comparison)
        rows = [
            [
                NAMES[dataset],
                f"{epsilon:g}",
                *judged(found, comparison.paper(dataset, epsilon), marked=mark(main, *two[dataset, epsilon])),
            ]
            for (dataset, epsilon), found in differences(main, comparison).items()
        ]
        parts += [f"**{comparison.label}**", table(["dataset", "ε", *JUDGED], rows)]
    return "\n\n".join(parts)


def main_average(main: Outcomes) -> str:
    """Each comparison averaged over the cells in which all seeds of both sides were run, beside the paper's over the same cells."""
    rows = []
    for comparison in comparisons(main):
        found = accuracies(main, comparison)
        whole = {cell: pair for cell, pair in found.items() if all(len(side) == main.seeds for side in pair)}
        papers = [paper for cell in whole if (paper := comparison.paper(*cell))]
        theirs = _mean_of(papers) if papers else None
        marked = mark(main, *(side for place, two in sides(comparison).items() if place in whole for side in two))
        rows.append([comparison.label, str(len(whole)), *judged(averaged(whole.values()), theirs, marked=marked)])
    return table(["comparison", "cells", *JUDGED], rows)


def _mean_of(papers: Sequence[Spread]) -> Spread:
    return _put_together(sum(p.mean for p in papers) / len(papers), papers, 1 / len(papers))


def main_summary(main: Outcomes) -> str:
    """How many cells say what, one line a comparison."""
    rows = []
    intervals = seen = 0
    for comparison in comparisons(main):
        found = differences(main, comparison)
        verdicts = Counter(NOT_RUN if d is None else d.verdict for d in found.values())
        theirs = [(comparison.paper(*place), d) for place, d in found.items()]
        agreed = Counter(d.agrees(p).split(":")[0].split(";")[0] for p, d in theirs if d is not None and p is not None)
        intervals += sum(d is not None and d.interval is not None for d in found.values())
        seen += verdicts["higher"] + verdicts["lower"]
        in_paper = [p for p, _ in theirs if p is not None]
        rows.append(
            [
                comparison.label,
                str(len(found)),
                *(
                    str(verdicts[verdict])
                    for verdict in ("higher", "lower", "no difference seen", "one seed: no interval")
                ),
                str(verdicts[NOT_RUN]),
                f"{sum(p.mean > 0 for p in in_paper)} of {len(in_paper)}" if in_paper else "–",
                " / ".join(str(agreed[word]) for word in ("yes", "yes in direction", "undecided", "no"))
                if in_paper
                else "–",
            ]
        )
    head = ["comparison", "cells", "higher", "lower", "no difference seen", "one seed", NOT_RUN]
    text = table([*head, "higher in the paper", "reproduced: yes / in direction / undecided / no"], rows)
    if intervals:
        text += f"\n\nOf these {intervals} intervals {seen} exclude 0; about {(1 - LEVEL) * intervals:.1f} would by chance alone if nothing differed."
    levels = [
        (method, rounded(own.mean) - published.MAIN[dataset, epsilon, method].mean)
        for dataset, epsilon, method in published.MAIN
        if (own := spread(main.values(dataset=dataset, target_epsilon=epsilon, method=method, variant=PAPER)))
    ]
    if levels:
        gaps = [gap for _, gap in levels]
        chosen = [gap for method, gap in levels if method == "tp-topk"]
        text += (
            f"\n\nAccuracy itself: our mean is at or above the paper's in {sum(gap >= 0 for gap in gaps)} of {len(levels)} cells that were run, TP-TopK's in "
            f"{sum(gap >= 0 for gap in chosen)} of {len(chosen)}; ours − the paper's lies between {min(gaps):+.2f} and {max(gaps):+.2f} points."
        )
    return text


def rounded(accuracy: float) -> float:
    """As the paper prints it, with which it is compared."""
    return round(accuracy, 2)


def below_the_paper(main: Outcomes) -> str:
    """The cells in which our mean is under the paper's, by how much, and what the other methods reach there."""
    rows = []
    for (dataset, epsilon, method), paper in published.MAIN.items():
        where: dict[str, Any] = {"dataset": dataset, "target_epsilon": epsilon}
        for variant in [PAPER, *(main.variants(method))]:
            own = spread(main.values(method=method, variant=variant, **where))
            if own is None or rounded(own.mean) >= paper.mean:
                continue
            gap = unpaired(own, Spread(paper.mean, paper.std, published.SEEDS))
            levels = {
                m: s.mean for m in recipes.METHODS if (s := spread(main.values(method=m, variant=PAPER, **where)))
            }
            best = max(levels, key=lambda m: levels[m])
            name = method if variant == PAPER else f"{method} ({variant})"
            ours = cell(main, method=method, variant=variant, **where)
            rows.append(
                [NAMES[dataset], f"{epsilon:g}", name, ours, f"{paper.mean:.2f} ± {paper.std:.2f}", gap.words(), gap.verdict,
                 f"{levels[best]:.2f}{mark(main, {**where, 'method': best, 'variant': PAPER})} ({best})"]
            )  # fmt: skip
    if not rows:
        return ""
    head = [
        "dataset",
        "ε",
        "method",
        "ours",
        "the paper",
        "ours − the paper's [95% interval]",
        "verdict",
        "our highest mean there",
    ]
    return (
        "**Cells below the paper's.** Unpaired, so the interval is Welch's, of three seeds on either side. What was tried for a cell stands under Tuning: "
        "what was tuned was chosen on held-out training records; test means decided which cells were tuned further, and the fixed settings of CIFAR-10 had been looked at on its test set.\n\n" + table(head, rows)
    )  # fmt: skip


def further_table(further: Outcomes, main: Outcomes) -> str:
    """What more trials gave where the paper's TP-TopK is above ours: before and after, and the same differences."""
    methods = ("dp-sgd", "tp-rand", "tp-topk")
    rows, gaps = [], []

    def recipe_of(method: str, where: dict[str, Any]) -> str:
        found = [run["recipe"] for run in further.select(method=method, **where)]
        if not found:
            return NOT_RUN
        r = recipes.completed(found[0])
        rates = " / ".join(f"{rate:g}" for rate in (r["learning_rate"], r["second_learning_rate"]) if rate)
        return f"{r['epochs']:g} epochs, {r['views'] * (2 if r['shift'] else 1)} views, rate {rates}"

    for dataset, epsilon in recipes.FURTHER_CELLS:
        where: dict[str, Any] = {"dataset": dataset, "target_epsilon": epsilon}
        head, paper = [NAMES[dataset], f"{epsilon:g}"], published.MAIN[dataset, epsilon, "tp-topk"]
        for name, outcomes, variant in (
            ("as in the main table", main, PAPER),
            ("tuned further", further, recipes.FURTHER),
        ):
            rows.append([*head, name, *(cell(outcomes, method=m, variant=variant, **where) for m in methods)])
        of_paper = (published.MAIN[dataset, epsilon, m] for m in methods)
        rows.append([*head, "the paper's", *(f"{value.mean:.2f} ± {value.std:.2f}" for value in of_paper)])
        own = {m: further.values(method=m, **where) for m in methods}
        level = spread(own["tp-topk"])
        rows.append([*head, "its recipe", *(recipe_of(method, where) for method in methods)])
        compared = [
            ("the paper's", unpaired(level, Spread(paper.mean, paper.std, published.SEEDS)) if level else None),
            *((other, paired(own["tp-topk"], own[other])) for other in ("tp-rand", "dp-sgd")),
        ]
        on = mark(further, where)
        gaps += [
            [*head, f"tp-topk − {other}", *((NOT_RUN, NOT_RUN) if gap is None else (gap.words() + on, gap.verdict))]
            for other, gap in compared
        ]
    return "\n\n".join(
        [
            table(["dataset", "ε", "ours", *methods], rows),
            "Tuned further, unpaired (Welch) against the paper's and seed by seed against the others:",
            table(["dataset", "ε", "difference", "[95% interval]", "verdict"], gaps),
        ]
    )
