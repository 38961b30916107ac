"""What was tried and what was chosen on held-out records: the document's part on tuning, in Markdown."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from tptopk.experiments import recipes
from tptopk.report.paper_tables import NAMES, NOT_RUN, table

Cells = dict[tuple[str, float], list[dict[str, Any]]]  # (dataset, ε) → the trials


def tuned(tuning: Mapping[str, list[dict[str, Any]]]) -> str:
    """`tuning`: the trials of `tuning.jsonl`, and those of `tuning_range.jsonl` before them."""
    cells: Cells = {}
    further: list[dict[str, Any]] = []
    for trial in tuning["tuning"]:
        if trial["recipe"]["variant"] == recipes.FURTHER:
            further.append(trial)
            continue
        cells.setdefault((trial["recipe"]["dataset"], trial["recipe"]["target_epsilon"]), []).append(trial)
    parts = [
        "Of what the paper does not say, learning rates, the averaging of weights and, where several were tried, epochs were chosen by "
        "`python benchmarks/tune_paper.py --device cuda` on training records that were held out; that program does not read the test set. All methods of a cell "
        "have one grid (on CIFAR-10 the rate 16 was added to it for all, when 8 had been the better of 4 and 8 for every sparse method). A method whose best trial "
        "lies on the edge of its rates is then tried with half or twice that rate, until it lies on none, as far as these trials have been run. Methods with a warm-up were tried with "
        "one rate for that, 4, and 1 on PneumoniaMNIST (the stand-in). Ties go to the trial that is first there. Some runs of the tables had been finished by "
        "then; where the choice changed, they were run again. Below are the trials that are there. Network, batch, views (but for those tuned further), clip norm and the other epochs were fixed before, after the "
        "literature and early trials; those on CIFAR-10 had been looked at on its test set."
    ]
    if tuning["tuning_range"]:
        parts.append(
            f"An earlier, incomplete round of {len(tuning['tuning_range'])} trials (`tuning_range.jsonl`) set the range of learning rates."
        )
    chosen = tomllib.loads(recipes.TUNED.read_text(encoding="utf-8")) if recipes.TUNED.exists() else {}
    return "\n\n".join([*parts, _tried(cells), *_margins(cells), _chosen(cells, chosen), *_further(further, chosen)])


def _further(trials: list[dict[str, Any]], chosen: Mapping[str, Any]) -> list[str]:
    """The trials from a choice on, in their order: each changes the best so far in one thing."""
    if not trials:
        return []
    rows = []
    for trial in sorted(trials, key=lambda t: [t["recipe"][key] for key in ("dataset", "target_epsilon", "method")]):
        r, best = recipes.completed(trial["recipe"]), max(trial["measured"])
        rows.append(
            [
                NAMES.get(r["dataset"], r["dataset"]), f"{r['target_epsilon']:g}", r["method"], f"{r['shift']}", f"{r['epochs']:g}",
                f"{r['learning_rate']:g}", f"{r['second_learning_rate']:g}" if r["second_learning_rate"] else "–",
                f"{best:.2f}{' (chosen)' if _is_chosen(r, best, chosen) else ''}",
            ]
        )  # fmt: skip
    head = ["dataset", "ε", "method", "views moved by", "epochs", "learning rate", "after the warm-up", "held-out accuracy"]  # fmt: skip
    return [
        "Tuned further, where the paper's TP-TopK is above ours: from what was chosen above, one change after the other, each kept if it measured better (the best of the three averagings counts). "
        "TP-TopK and DP-SGD have the same changes. Where none is marked, what was chosen above stayed the best.",
        table(head, rows),
    ]


def _is_chosen(trial: Mapping[str, Any], measured: float, chosen: Mapping[str, Any]) -> bool:
    of_method = chosen.get(trial["dataset"], {}).get(f"{trial['target_epsilon']:g}", {})
    found = of_method.get(trial["method"], {}).get("further", {})
    said = {key: value for key, value in found.items() if key not in ("held_out", "ema")}
    return found.get("held_out") == measured and all(trial[key] == value for key, value in said.items())


def _rate(recipe: Mapping[str, Any]) -> float:
    """The learning rate that was tuned: that after the warm-up, where there is one."""
    return float(recipe.get("second_learning_rate") or recipe["learning_rate"])


def _tried(cells: Cells) -> str:
    def values(of: list[dict[str, Any]], *keys: str) -> str:
        return ", ".join(f"{v:g}" for v in sorted({r[key] for r in of for key in keys if r.get(key) is not None}))

    rows = []
    for (dataset, epsilon), trials in sorted(cells.items(), key=lambda cell: cell[0]):
        of = [trial["recipe"] for trial in trials]
        rows.append(
            [
                NAMES.get(dataset, dataset), f"{epsilon:g}", values(of, "batch_size"), values(of, "epochs"),
                values(of, "learning_rate", "second_learning_rate"), values(of, "held_out"),
                ", ".join(f"{m} {sum(r['method'] == m for r in of)}" for m in dict.fromkeys(r["method"] for r in of)),
            ]
        )  # fmt: skip
    if not rows:
        return f"`tuning.jsonl`: {NOT_RUN}."
    head = ["dataset", "ε", "batch", "epochs tried", "learning rates tried", "held-out records", "trials by method"]
    return table(head, rows)


def _margins(cells: Cells) -> list[str]:
    """By how much the best learning rate led the next, of each method in each cell, in points on held-out records."""
    best: dict[tuple[str, float, str], dict[float, float]] = {}
    for cell, trials in cells.items():
        for trial in trials:
            of_rate = best.setdefault((*cell, trial["recipe"]["method"]), {})
            rate = _rate(trial["recipe"])
            of_rate[rate] = max(of_rate.get(rate, 0.0), *trial["measured"])
    ordered = [sorted(of_rate.values()) for of_rate in best.values() if len(of_rate) > 1]
    if not ordered:
        return []
    leads = [values[-1] - values[-2] for values in ordered]
    return [
        f"On held-out records the best rate led the next best by {median(leads):.2f} points in the median, and by less than .3 in {sum(lead < 0.3 for lead in leads)} of "
        f"{len(leads)} choices. Each was made on one seed; others would choose otherwise."
    ]


def _chosen(cells: Cells, chosen: Mapping[str, Any]) -> str:
    """`chosen`: dataset → ε → method → what was chosen for it."""
    if not chosen:
        return f"Nothing is chosen yet: `{recipes.TUNED.name}` is not there."

    def place(dataset: str, epsilon: str, method: str, rate: float) -> str | None:
        """Where the rate that was tuned lies among those tried for the method; None where there was no choice of rates."""
        of = [trial["recipe"] for trial in cells.get((dataset, float(epsilon)), [])]
        tried = sorted({_rate(recipe) for recipe in of if recipe["method"] == method})
        if len(tried) < 2:
            return None
        return " (lowest)" if rate == tried[0] else " (highest)" if rate == tried[-1] else ""

    rows = []
    places: list[tuple[str, str]] = []  # dataset, and where its choice lies
    for dataset, by_epsilon in chosen.items():
        for epsilon, by_method in by_epsilon.items():
            for method, c in by_method.items():
                first, second = f"{c['learning_rate']:g}", "–"
                where = place(dataset, epsilon, method, _rate(c))
                if "second_learning_rate" in c:
                    second = f"{c['second_learning_rate']:g}{where or ''}"
                else:
                    first += where or ""
                places += [] if where is None else [(dataset, where)]
                rows.append(
                    [
                        NAMES.get(dataset, dataset), epsilon, method, f"{c['batch_size']}", f"{c['epochs']:g}", first, second,
                        f"{c['ema']:g}" if "ema" in c else "–",
                        f"{c['held_out']:.2f}" if "held_out" in c else "taken from another ε",
                    ]
                )  # fmt: skip
    head = ["dataset", "ε", "method", "batch", "epochs", "learning rate", "after the warm-up", "weights averaged by", "held-out accuracy (AUC × 100)"]  # fmt: skip
    on_edge = Counter(dataset for dataset, where in places if where)
    listed = ", ".join(f"{count} on {NAMES.get(dataset, dataset)}" for dataset, count in on_edge.items())
    note = (
        "A choice marked *lowest* or *highest* is on the edge of the learning rates that were tried for it in that cell: one beyond might be better. "
        f"That is so for {on_edge.total()} of the {len(places)} choices among several learning rates{f': {listed}' if listed else ''}."
    )
    return "\n\n".join([note, f"Chosen (`src/tptopk/experiments/{recipes.TUNED.name}`):", table(head, rows)])
