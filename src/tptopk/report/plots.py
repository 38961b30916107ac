"""Figures, with matplotlib where it is installed (the `plots` extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tptopk.privacy.refusal import Refusal

INK, MUTED, PRIVATE, OPEN = "#1f2933", "#9aa5b1", "#2a6f97", "#c2410c"


def comparison_figure(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str) -> None:
    """Accuracy of each method with every seed shown, beside the noise energy of one step."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ModuleNotFoundError as error:
        raise Refusal("figures need matplotlib: python -m pip install matplotlib") from error
    names = [row["method"] for row in rows]
    places = range(len(rows))
    colours = [OPEN if row["epsilon"] is None else PRIVATE for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=[3, 2], layout="constrained")
    for place, row, colour in zip(places, rows, colours, strict=True):
        left.errorbar(row["accuracy"], place, xerr=row["std"] or 0.0, fmt="D", color=colour, markersize=7, capsize=4)
        left.plot(row["accuracies"], [place + 0.22] * len(row["accuracies"]), "o", color=MUTED, markersize=4)
        spread = "" if row["std"] is None else f" ± {row['std']:.1f}"
        left.text(100.6, place, f"{row['accuracy']:.1f}{spread}", va="center", fontsize=9, color=INK)
    lowest = min(min(row["accuracies"]) for row in rows)
    left.set(
        yticks=list(places),
        yticklabels=names,
        xlim=(max(0.0, 10 * (lowest // 10)), 100),
        xlabel="test accuracy, %",
    )
    left.set_ylim(-0.5, len(rows) - 0.5)
    noisy = [row for row in rows if row["epsilon"] is not None]
    right.barh(
        [names.index(row["method"]) for row in noisy],
        [row["noise_energy"] for row in noisy],
        color=PRIVATE,
        height=0.6,
        alpha=0.85,
    )
    right.set(
        yticks=list(places), yticklabels=[], ylim=(-0.5, len(rows) - 0.5), xlabel="noise energy of a step, last phase"
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()
        axes.tick_params(colors=INK)
        axes.grid(axis="x", color=MUTED, alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=11, color=INK)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise Refusal(f"cannot write the figure {path}: {error}") from error
    finally:
        plt.close(figure)
