"""What was tried and what was chosen on held-out records: the document's part on tuning, in Markdown."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tptopk.experiments import recipes
from tptopk.report.paper_tables import NAMES, NOT_RUN, table

Cells = dict[tuple[str, float], list[dict[str, Any]]]  # (dataset, ε) → the trials


def tuned(tuning: Mapping[str, list[dict[str, Any]]]) -> str:
    """`tuning`: the trials of `tuning.jsonl`, and those of `tuning_range.jsonl` before them."""
    cells: Cells = {}
    for trial in tuning["tuning"]:
        cells.setdefault((trial["recipe"]["dataset"], trial["recipe"]["target_epsilon"]), []).append(trial)
    parts = [
        "Of what the paper does not say, learning rates, the averaging of weights and, where several were tried, epochs were chosen by "
        "`python benchmarks/tune_paper.py --device cuda` on training records that were held out; that program does not read the test set, and has one grid "
        "for all methods of a cell; below are the trials that are there. Network, batch, views, clip norm and the other epochs were fixed before, after the "
        "literature and early trials; those on CIFAR-10 had been looked at on its test set."
    ]
    if tuning["tuning_range"]:
        parts.append(
            f"An earlier, incomplete round of {len(tuning['tuning_range'])} trials (`tuning_range.jsonl`) set the range of learning rates."
        )
    parts += [_added_rate(cells), _tried(cells), _chosen(cells)]
    return "\n\n".join(part for part in parts if part)


def _rate(recipe: Mapping[str, Any]) -> float:
    """The learning rate that was tuned: that after the warm-up, where there is one."""
    return float(recipe.get("second_learning_rate") or recipe["learning_rate"])


def _added_rate(cells: Cells) -> str:
    """CIFAR-10 got further learning rates after the others had been tried; how those had done by then."""
    trials = [(epsilon, trial) for (dataset, epsilon), of in cells.items() for trial in of if dataset == "cifar10"]
    rates = list(dict.fromkeys(_rate(trial["recipe"]) for _, trial in trials))  # in the order of the file
    words = []
    for n in range(2, len(rates)):
        before, rate = sorted(rates[:n]), rates[n]
        edge = before[-1] if rate > before[-1] else before[0]
        best: dict[tuple[float, str], tuple[float, float]] = {}  # ε, method → the best of the measured, and its rate
        for epsilon, trial in trials:
            cell, tried = (epsilon, trial["recipe"]["method"]), _rate(trial["recipe"])
            if tried in before:
                best[cell] = max(best.get(cell, (-math.inf, 0.0)), (max(trial["measured"]), tried))
        won = Counter(method for (_, method), (_, tried) in best.items() if tried == edge)
        words.append(
            f"On CIFAR-10 the learning rate {rate:g} was added when {', '.join(f'{r:g}' for r in before[:-1])} and {before[-1]:g} had been tried: of these, {edge:g} was the "
            f"best on held-out records in {won.total()} of {len(best)} cells ({', '.join(f'{method} {count}' for method, count in won.items())})."
        )
    if words:
        words.append(
            "Some runs of the tables had been finished by then; where the choice changed, they were run again."
        )
    return " ".join(words)


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


def _chosen(cells: Cells) -> str:
    try:
        chosen = tomllib.loads(recipes.TUNED.read_text(encoding="utf-8"))
    except FileNotFoundError:
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
