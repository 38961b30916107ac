"""The tables whose numbers stand beside other data or other people's: the medical stand-in, published peers, diagnostics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import mean
from typing import Any

from tptopk.experiments import published, recipes
from tptopk.experiments.recipes import PAPER
from tptopk.report.outcomes import Difference, Outcomes, Spread, paired, spread
from tptopk.report.paper_tables import NAMES, NOT_RUN, cell, judged, mark, table

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
                paper = of(published.EYEPACS["tp-topk"]) - of(published.EYEPACS[other])
                found = judged(paired(one, two), Spread(paper, None, 1) if epsilon == 8.0 else None, digits)
                lines.append([name, f"{epsilon:g}", f"tp-topk − {other}", *found[:3]])
    head = ["measure", "ε", "difference", "PneumoniaMNIST (stand-in) [95% interval]", "verdict", "EyePACS (the paper)"]
    return text + "\n\n" + table(head, lines)


# ---- Context ---------------------------------------------------------------------------------------------------------


def context_table(context: Outcomes, main: Outcomes) -> str:
    rows = []
    peers = recipes.table_context(recipes.quick_recipe)
    for dataset in recipes.DATASETS:
        own: list[tuple[str, Outcomes, dict[str, Any]]] = [
            (method, main, {"method": method, "variant": PAPER}) for method in ("dp-sgd", "tp-rand", "tp-topk")
        ]
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
                digits = 2 if row in published.CONTEXT else 1
                shown = [f"{row.accuracy[e]:.{digits}f}" if e in row.accuracy else "–" for e in recipes.EPSILONS]
                rows.append([NAMES[dataset], row.method, *shown, ", ".join(others) or "–", row.source])
    return table(["dataset", "method", *(f"ε = {e:g}" for e in recipes.EPSILONS), "other ε", "source"], rows)


# ---- Advice ----------------------------------------------------------------------------------------------------------


def advice_table(main: Outcomes, ratio: Outcomes) -> str:
    """What `advise` said at the end of each warm-up of the main table, beside what the tables show."""
    rows, agreed = [], Counter[str]()
    for dataset in recipes.DATASETS:
        for epsilon in recipes.EPSILONS:
            where: dict[str, Any] = {"dataset": dataset, "target_epsilon": epsilon}
            advised = [
                run["advice"] for run in main.select(method="tp-topk", variant=PAPER, **where) if run.get("advice")
            ]
            gap = paired(
                main.values(method="tp-topk", variant=PAPER, **where),
                main.values(method="dp-sgd", variant=PAPER, **where),
            )
            if not advised or gap is None:
                continue
            marked = mark(main, *({**where, "method": m, "variant": PAPER} for m in ("tp-topk", "dp-sgd")))
            said = Counter(advice["verdict"] for advice in advised)
            agreed.update(_agreement(advice["verdict"], gap) for advice in advised)
            ratios = sorted({advice["active_ratio"] for advice in advised if advice["active_ratio"] is not None})
            rows.append(
                [
                    NAMES[dataset], f"{epsilon:g}", ", ".join(f"{verdict} ({count})" for verdict, count in said.items()),
                    ", ".join(f"{r:g}" for r in ratios) or "–", f"{gap.words()}{marked}: {gap.verdict}", _best_ratio(ratio, where),
                ]
            )  # fmt: skip
    if not rows:
        short = bool(main.select(method="tp-topk", variant=PAPER))
        return "Nothing: these warm-ups are too short for advice." if short else f"{NOT_RUN}."
    head = [
        "dataset",
        "ε",
        "said (runs)",
        "ρ advised",
        "tp-topk at ρ = .4 − dp-sgd",
        "highest mean in the table of ratios",
    ]
    return table(head, rows) + (
        f"\n\nOf {sum(agreed.values())} runs, advice and table agree in {agreed['agree']} and disagree in {agreed['disagree']}; in {agreed['neither']} "
        "the advice was that it cannot be told. *Restrict* agrees with *higher*, *stay dense* with *lower* and with *no difference seen*."
    )


def _agreement(verdict: str, gap: Difference) -> str:
    if verdict == "cannot tell" or gap.interval is None:
        return "neither"
    return "agree" if (verdict == "restrict") == (gap.verdict == "higher") else "disagree"


def _best_ratio(ratio: Outcomes, where: dict[str, Any]) -> str:
    """The active ratio at which TP-TopK's mean is highest, dense training among them."""
    means = {}
    for value in (1.0, *recipes.RATIOS):
        method = "dp-sgd" if value == 1.0 else "tp-topk"
        found = spread(ratio.values(method=method, variant=f"ρ = {value:g}", **where))
        if found is not None:
            means[value] = found.mean
    if not means:
        return "–"
    best = max(means, key=lambda value: means[value])
    return f"{means[best]:.2f} at ρ = {best:g}"


# ---- Diagnostics -----------------------------------------------------------------------------------------------------


def why(diagnostics: Outcomes) -> str:
    """What supports hold at the end of a warm-up, which bounds what choosing them can give."""
    parts = []
    for score in sorted({run["score"] for run in diagnostics.runs}, key=lambda name: name != "paper"):
        held = [spread(diagnostics.values("oracle", score=score, target_epsilon=e)) for e in recipes.EPSILONS]
        means = [f"{100 * found.mean:.1f}" for found in held if found is not None]
        parts.append(f"by the {score} score {' / '.join(means)}%")
    if not parts:
        return ""
    chance = 100 * mean(run["random"] for run in diagnostics.runs)
    return (
        f"What a support can give is bounded by what it holds. At the end of the warm-up, on CIFAR-10 at ε = {' / '.join(f'{e:g}' for e in recipes.EPSILONS)}, the chosen coordinates hold of the true gradient's energy "
        f"{', '.join(parts)}; a random choice of as many, {chance:.1f}% (Quality of supports, below)."
    )


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
