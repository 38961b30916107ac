"""The paper's ablations in Markdown: active ratios, and the split of steps and budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tptopk.experiments import published, recipes
from tptopk.report.outcomes import Difference, Outcomes, Spread, averaged, paired, spread
from tptopk.report.paper_tables import JUDGED, NAMES, NOT_RUN, cell, judged, mark, of_paper, table


def ratio_table(ratio: Outcomes) -> str:
    rows, notes = [], []
    for dataset in ("cifar10", "fmnist"):
        for epsilon in (8.0, 1.0):
            where: dict[str, Any] = {"dataset": dataset, "target_epsilon": epsilon}
            dense = ratio.values(method="dp-sgd", **where)
            control = ratio.values(variant=recipes.TWO_PHASES, **where)
            gaps, whole = {}, []
            for value in recipes.RATIOS:
                own: dict[str, Any] = {**where, "variant": f"ρ = {value:g}"}
                chosen, chance = (ratio.values(method=method, **own) for method in ("tp-topk", "tp-rand"))
                paper = published.RATIO.get((dataset, value)) if epsilon == 8.0 else None
                gap = gaps[value] = paired(chosen, chance)
                whole += [(chosen, chance)] if len(chosen) == len(chance) == ratio.seeds else []
                over = [
                    (paired(chosen, other), mark(ratio, {**own, "method": "tp-topk"}, {**where, **wanted}))
                    for other, wanted in ((dense, {"method": "dp-sgd"}), (control, {"variant": recipes.TWO_PHASES}))
                ]
                theirs = None if paper is None else Spread(paper[1] - paper[0], None, 1)
                rows.append(
                    [
                        NAMES[dataset], f"{epsilon:g}", f"{value:g}", cell(ratio, method="dp-sgd", **where),
                        cell(ratio, variant=recipes.TWO_PHASES, **where),
                        _own_recipe(ratio, value, where),
                        *(cell(ratio, method=method, **own) for method in ("tp-rand", "tp-topk")),
                        "–" if paper is None else f"{paper[0]:.2f} / {paper[1]:.2f}",
                        *judged(gap, theirs, marked=mark(ratio, own))[:3],
                        *(NOT_RUN if each is None else f"{each.words()}{on}: {each.verdict}" for each, on in over),
                    ]
                )  # fmt: skip
            all_of = ({**where, "variant": f"ρ = {value:g}"} for value in recipes.RATIOS)
            notes += _trend(dataset, epsilon, gaps, averaged(whole), mark(ratio, *all_of))
    head = ["dataset", "ε", "ρ", "dp-sgd (ρ = 1)", "control (ρ = 1)", "tp-rand, its own recipe", "tp-rand", "tp-topk", "the paper's (one seed)", "tp-topk − tp-rand", "verdict", "the paper's", "tp-topk − dp-sgd", "tp-topk − control"]  # fmt: skip
    return table(head, rows) + "".join(f"\n\n{note}" for note in notes)


def _own_recipe(ratio: Outcomes, value: float, where: dict[str, Any]) -> str:
    """TP-Rand by its own recipe, where that differs from the one that is compared."""
    variant = f"ρ = {value:g}, {recipes.OWN}"
    return cell(ratio, variant=variant, **where) if ratio.select(variant=variant, **where) else "–"


def _trend(
    dataset: str, epsilon: float, gaps: dict[float, Difference | None], average: Difference | None, marked: str
) -> list[str]:
    """Whether the gap falls as ρ grows, as the paper says it does, and what it is on average."""
    known = [(value, gap.mean) for value, gap in sorted(gaps.items()) if gap is not None]
    if len(known) < 2:
        return []
    listed = ", ".join(f"{gap:+.2f} (ρ = {value:g})" for value, gap in known)
    text = f"{NAMES[dataset]}, ε = {epsilon:g}: the mean gap tp-topk − tp-rand is {listed}; towards larger ρ it falls at {_falls(known)}"
    if epsilon == 8.0:
        paper = [(v, chosen - chance) for (d, v), (chance, chosen) in sorted(published.RATIO.items()) if d == dataset]
        text += f", of those from ρ = .2 to .8 at {_falls([k for k in known if 0.2 <= k[0] <= 0.8])}; in the paper at {_falls(paper)}"
    return [text + "." + (f" Averaged over these ρ: {average.words()}{marked}: {average.verdict}." if average else "")]


def _falls(gaps: Sequence[tuple[float, float]]) -> str:
    steps = list(pairwise(gap for _, gap in gaps))
    return f"{sum(after < before for before, after in steps)} of {len(steps)} steps"


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
                of_paper(published.SPLIT[0.3, 0.3], published.SPLIT[place]),
            ),
        ]
        for place in published.SPLIT
        if place != (0.3, 0.3)
    ]
    return text + "\n\n" + table(["splits", *JUDGED], rows)
