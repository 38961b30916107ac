"""Each table of the paper in Markdown: ours beside the paper's, differences with intervals, and what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any, NamedTuple

from tptopk.experiments import published, recipes
from tptopk.experiments.recipes import PAPER
from tptopk.report.outcomes import Difference, Outcomes, paired, spread

NAMES = {
    "mnist": "MNIST",
    "fmnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "pneumoniamnist": "PneumoniaMNIST (stand-in for EyePACS)",
}
NOT_RUN = "not run"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def cell(outcomes: Outcomes, measure: str = "accuracy", digits: int = 2, scale: float = 1.0, **wanted: Any) -> str:
    """Mean ± std of one cell over its seeds, or that it was not run."""
    values = {seed: scale * value for seed, value in outcomes.values(measure, **wanted).items()}
    found = spread(values)
    return NOT_RUN if found is None else found.words(digits, outcomes.seeds)


def judged(difference: Difference | None, paper: float | None, digits: int = 2) -> list[str]:
    """Difference with interval, verdict, the paper's difference, and whether it was reproduced."""
    theirs = "–" if paper is None else f"{paper:+.{digits}f}"
    if difference is None:
        return [NOT_RUN, NOT_RUN, theirs, "–" if paper is None else NOT_RUN]
    return [difference.words(digits), difference.verdict, theirs, "–" if paper is None else difference.agrees(paper)]


JUDGED = ("ours [95% interval]", "verdict", "the paper's", "reproduced")


# ---- The main table --------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    method: str
    variant: str
    other: str

    @property
    def label(self) -> str:
        return f"{self.method}{'' if self.variant == PAPER else f' ({self.variant})'} − {self.other}"

    def paper(self, dataset: str, epsilon: float) -> float | None:
        return published.gap(dataset, epsilon, self.method, self.other) if self.variant == PAPER else None


def comparisons(main: Outcomes) -> list[Comparison]:
    """Those of the paper, chosen before any run; then variants of TP-TopK against the same two."""
    ours = [("tp-topk", "tp-rand"), ("tp-topk", "dp-sgd"), ("on-topk", "on-rand"), ("on-topk", "dp-sgd")]
    extra = [Comparison("tp-topk", v, other) for v in main.variants("tp-topk") for other in ("tp-rand", "dp-sgd")]
    return [Comparison(method, PAPER, other) for method, other in ours] + extra


def differences(main: Outcomes, comparison: Comparison) -> dict[tuple[str, float], Difference | None]:
    """dataset, ε → the paired difference of a comparison."""
    return {
        (dataset, epsilon): paired(
            main.values(dataset=dataset, target_epsilon=epsilon, method=comparison.method, variant=comparison.variant),
            main.values(dataset=dataset, target_epsilon=epsilon, method=comparison.other, variant=PAPER),
        )
        for dataset in ("mnist", "fmnist", "cifar10")
        for epsilon in recipes.EPSILONS
    }


def main_accuracy(main: Outcomes) -> str:
    rows = []
    for dataset in ("mnist", "fmnist", "cifar10"):
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
        found = differences(main, comparison)
        rows = [
            [NAMES[dataset], f"{epsilon:g}", *judged(difference, comparison.paper(dataset, epsilon))]
            for (dataset, epsilon), difference in found.items()
        ]
        parts += [f"**{comparison.label}**", table(["dataset", "ε", *JUDGED], rows)]
    return "\n\n".join(parts)


def main_summary(main: Outcomes) -> str:
    """How many cells say what, one line a comparison."""
    rows = []
    intervals = 0
    for comparison in comparisons(main):
        found = differences(main, comparison)
        verdicts = Counter(NOT_RUN if d is None else d.verdict for d in found.values())
        theirs = [(comparison.paper(*place), d) for place, d in found.items()]
        agreed = Counter(d.agrees(p).split()[0].strip(":;") for p, d in theirs if d is not None and p is not None)
        intervals += sum(d is not None and d.interval is not None for d in found.values())
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
                f"{sum(p > 0 for p in in_paper)} of {len(in_paper)}" if in_paper else "–",
                " / ".join(str(agreed[word]) for word in ("yes", "undecided", "no")) if in_paper else "–",
            ]
        )
    head = ["comparison", "cells", "higher", "lower", "no difference seen", "one seed", NOT_RUN]
    text = table([*head, "higher in the paper", "reproduced: yes / undecided / no"], rows)
    if intervals:
        text += f"\n\nOf {intervals} such intervals about {0.05 * intervals:.1f} exclude 0 by chance alone when nothing differs."
    levels = [
        (own.mean, published.MAIN[dataset, epsilon, method].mean)
        for dataset, epsilon, method in published.MAIN
        if (own := spread(main.values(dataset=dataset, target_epsilon=epsilon, method=method, variant=PAPER)))
    ]
    if levels:
        text += (
            f"\n\nAccuracy itself: our mean is at or above the paper's in {sum(a >= b for a, b in levels)} of {len(levels)} cells that were run; "
            f"ours − the paper's lies between {min(a - b for a, b in levels):+.2f} and {max(a - b for a, b in levels):+.2f} points."
        )
    return text


# ---- Active ratios, splits -------------------------------------------------------------------------------------------


def ratio_table(ratio: Outcomes) -> str:
    rows, notes = [], []
    for dataset in ("cifar10", "fmnist"):
        for epsilon in (8.0, 1.0):
            where: dict[str, Any] = {"dataset": dataset, "target_epsilon": epsilon}
            dense = ratio.values(method="dp-sgd", **where)
            rows.append(
                [NAMES[dataset], f"{epsilon:g}", "1 (dp-sgd)", cell(ratio, method="dp-sgd", **where), "–", "–", "–", "–", "–", "–"]
            )  # fmt: skip
            gaps = {}
            for value in recipes.RATIOS:
                own: dict[str, Any] = {**where, "variant": f"ρ = {value:g}"}
                chosen, chance = (ratio.values(method=method, **own) for method in ("tp-topk", "tp-rand"))
                paper = published.RATIO.get((dataset, value)) if epsilon == 8.0 else None
                gap = gaps[value] = paired(chosen, chance)
                over = paired(chosen, dense)
                theirs = None if paper is None else paper[1] - paper[0]
                rows.append(
                    [
                        NAMES[dataset], f"{epsilon:g}", f"{value:g}",
                        *(cell(ratio, method=method, **own) for method in ("tp-rand", "tp-topk")),
                        "–" if paper is None else f"{paper[0]:.2f} / {paper[1]:.2f}",
                        *judged(gap, theirs)[:3],
                        NOT_RUN if over is None else f"{over.words()}: {over.verdict}",
                    ]
                )  # fmt: skip
            notes += _trend(dataset, epsilon, gaps)
    head = ["dataset", "ε", "ρ", "tp-rand", "tp-topk", "the paper's (one seed)", "tp-topk − tp-rand", "verdict", "the paper's", "tp-topk − dp-sgd"]  # fmt: skip
    return table(head, rows) + "".join(f"\n\n{note}" for note in notes)


def _trend(dataset: str, epsilon: float, gaps: dict[float, Difference | None]) -> list[str]:
    """Whether the gap falls as ρ grows, as the paper says it does."""
    known = [(value, gap.mean) for value, gap in sorted(gaps.items()) if gap is not None]
    if len(known) < 2:
        return []
    falls = sum(b < a for (_, a), (_, b) in pairwise(known))
    listed = ", ".join(f"{gap:+.2f} (ρ = {value:g})" for value, gap in known)
    return [
        f"{NAMES[dataset]}, ε = {epsilon:g}: the mean gap tp-topk − tp-rand is {listed}; it falls at {falls} of {len(known) - 1} steps "
        "towards larger ρ. The paper says that it falls at every step."
    ]


def split_table(split: Outcomes) -> str:
    def variant(warmup: float, budget: float) -> str:
        return f"({warmup:g}, {budget:g})"

    rows = []
    for warmup in recipes.SPLITS:
        for who in ("ours", "the paper"):
            cells = [
                cell(split, variant=variant(warmup, budget))
                if who == "ours"
                else f"{published.SPLIT[warmup, budget].mean:.2f} ± {published.SPLIT[warmup, budget].std:.2f}"
                for budget in recipes.SPLITS
            ]
            rows.append([f"{warmup:g}", who, *cells])
    text = table(["E₁/E", "", *(f"ε₁/ε = {budget:g}" for budget in recipes.SPLITS)], rows)
    means = {place: spread(split.values(variant=variant(*place))) for place in published.SPLIT}
    known = {place: found.mean for place, found in means.items() if found is not None}
    if not known:
        return text
    best = max(known, key=lambda place: known[place])
    text += (
        f"\n\nHighest mean of ours: {known[best]:.2f} at {variant(*best)}, of {len(known)} of {len(published.SPLIT)} splits that were run; the paper's: "
        f"{published.SPLIT[0.3, 0.3].mean:.2f} at (0.3, 0.3). The split (0.3, 0.3) against each other one:"
    )
    middle = split.values(variant=variant(0.3, 0.3))
    rows = [
        [
            f"(0.3, 0.3) − {variant(*place)}",
            *judged(
                paired(middle, split.values(variant=variant(*place))),
                published.SPLIT[0.3, 0.3].mean - published.SPLIT[place].mean,
            ),
        ]
        for place in published.SPLIT
        if place != (0.3, 0.3)
    ]
    return text + "\n\n" + table(["splits", *JUDGED], rows)


# ---- The stand-in for EyePACS ----------------------------------------------------------------------------------------

MEDICAL = {  # measure → what it is called, digits, factor
    "auc": ("AUC × 100", 2, 100.0),
    "balanced_accuracy": ("balanced accuracy", 3, 1.0),
    "sensitivity": ("sensitivity", 3, 1.0),
    "specificity": ("specificity", 3, 1.0),
    "minority_recall": ("minority recall", 3, 1.0),
}
OF_EYEPACS: dict[str, Callable[[published.Medical], float]] = {
    "auc": lambda m: m.auc,
    "balanced_accuracy": lambda m: m.balanced_accuracy,
    "sensitivity": lambda m: m.sensitivity,
    "specificity": lambda m: m.specificity,
    "minority_recall": lambda m: m.sensitivity,
}


def medical_table(medical: Outcomes) -> str:
    rows = []
    for epsilon in (8.0, 3.0):
        for method in published.EYEPACS:
            if method == "non-private" and epsilon != 8.0:
                continue
            shown = "∞" if method == "non-private" else f"{epsilon:g}"
            own = [
                cell(medical, measure, digits, scale, method=method, target_epsilon=epsilon)
                for measure, (_, digits, scale) in MEDICAL.items()
            ]
            rows.append([NAMES["pneumoniamnist"], shown, method, *own])
    for method, theirs in published.EYEPACS.items():
        values = [
            f"{OF_EYEPACS[m](theirs):.{min(digits, 3) if m != 'auc' else 1}f}" for m, (_, digits, _) in MEDICAL.items()
        ]
        rows.append(["EyePACS (the paper)", "∞" if method == "non-private" else "8", method, *values])
    text = table(["dataset", "ε", "method", *(name for name, _, _ in MEDICAL.values())], rows)
    lines = []
    for measure in ("auc", "balanced_accuracy", "minority_recall"):
        name, digits, scale = MEDICAL[measure]
        of = OF_EYEPACS[measure]
        for epsilon in (8.0, 3.0):
            for other in ("tp-rand", "dp-sgd"):
                one, two = (
                    {s: scale * v for s, v in medical.values(measure, method=m, target_epsilon=epsilon).items()}
                    for m in ("tp-topk", other)
                )
                paper = of(published.EYEPACS["tp-topk"]) - of(published.EYEPACS[other]) if epsilon == 8.0 else None
                found = judged(paired(one, two), paper, digits)
                lines.append([name, f"{epsilon:g}", f"tp-topk − {other}", *found[:3]])
    head = ["measure", "ε", "difference", "PneumoniaMNIST (stand-in) [95% interval]", "verdict", "EyePACS (the paper)"]
    return text + "\n\n" + table(head, lines)


# ---- Context ---------------------------------------------------------------------------------------------------------


def context_table(context: Outcomes, main: Outcomes) -> str:
    rows = []
    for dataset in ("mnist", "fmnist", "cifar10"):
        own: list[tuple[str, Outcomes, dict[str, Any]]] = [
            (method, main, {"method": method, "variant": PAPER}) for method in ("dp-sgd", "tp-rand", "tp-topk")
        ]
        if dataset == "cifar10":
            peers = [r for r in recipes.table_context(recipes.quick_recipe) if r.seed == recipes.SEEDS[0]]
            own += [
                (f"{variant} ({method})", context, {"method": method, "variant": variant})
                for method, variant in dict.fromkeys((r.method, r.variant) for r in peers)
            ]
        for label, outcomes, wanted in own:
            cells = [cell(outcomes, dataset=dataset, target_epsilon=e, **wanted) for e in recipes.EPSILONS]
            rows.append([NAMES[dataset], label, *cells, "–", "ours"])
        for row in [*published.CONTEXT, *published.BEST]:
            if row.dataset == dataset:
                others = [f"{value:.1f} (ε = {e:g})" for e, value in row.accuracy.items() if e not in recipes.EPSILONS]
                shown = [f"{row.accuracy[e]:.2f}".rstrip("0") if e in row.accuracy else "–" for e in recipes.EPSILONS]
                rows.append([NAMES[dataset], row.method, *shown, ", ".join(others) or "–", row.source])
    return table(["dataset", "method", *(f"ε = {e:g}" for e in recipes.EPSILONS), "other ε", "source"], rows)


# ---- Diagnostics -----------------------------------------------------------------------------------------------------


def diagnostics_table(diagnostics: Outcomes) -> str:
    if not diagnostics.runs:
        return f"{NOT_RUN}."
    rows, layers = [], []
    names: list[str] = []
    for run in diagnostics.runs:
        names = list(dict.fromkeys([*names, *(layer["name"] for layer in run["composition"])]))
    for dataset, epsilon, score in sorted({(r["dataset"], r["target_epsilon"], r["score"]) for r in diagnostics.runs}):
        where: dict[str, Any] = {"dataset": dataset, "target_epsilon": epsilon, "score": score}
        own = diagnostics.select(**where)
        over = paired(diagnostics.values("oracle", **where), diagnostics.values("random", **where))
        above = paired(diagnostics.values("proxy", **where), diagnostics.values("proxy_noise_only", **where))
        assert over is not None and above is not None
        top = mean(dict(run["concentration"]).get(0.1, float("nan")) for run in own)
        head = [NAMES.get(dataset, dataset), f"{epsilon:g}", score]
        rows.append(
            [
                *head,
                cell(diagnostics, "proxy", 3, **where),
                cell(diagnostics, "proxy_noise_only", 3, **where),
                f"{above.words(3)}: {above.verdict}",
                cell(diagnostics, "oracle", 3, **where),
                f"{mean(run['random'] for run in own):.3f}",
                f"{over.words(3)}: {over.verdict}",
                f"{100 * top:.1f}%",
            ]
        )
        of_layer = [
            [layer["enrichment"] for run in own for layer in run["composition"] if layer["name"] == name]
            for name in names
        ]
        layers.append([*head, *(f"{mean(values):.2f}" if values else "–" for values in of_layer)])
    head = [
        "dataset", "ε", "score", "ρ̂_sig", "ρ̂_sig of noise alone", "difference", "α̂_oracle", "k/d", "difference",
        "energy in the true top 10%",
    ]  # fmt: skip
    return (
        table(head, rows)
        + "\n\nρ̂_sig is what the support was chosen to maximise, so noise alone gives the value beside it; k/d is nothing to compare it "
        f"with. The paper gives no numbers for either measure; for the true top 10% it has {100 * published.TOP_TENTH:.1f}%.\n\n"
        "Where the supports lie: active ratio of each parameter over that of the whole, 1 for a random support.\n\n"
        + table(["dataset", "ε", "score", *(f"`{name}`" for name in names)], layers)
    )
