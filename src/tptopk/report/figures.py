"""The figures of the reproduction: where gradient energy lies, and the two phases with the numbers of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tptopk.experiments import published
from tptopk.privacy import accounting
from tptopk.privacy.accounting import round_up
from tptopk.privacy.plan import Plan
from tptopk.report.plots import INK, MUTED, OPEN, PRIVATE, _plain, _pyplot, _save

LINES = ("o-", "s--", "^:")
HATCHES = ("", "///", "xx")


def energy_figure(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Concentration of the true gradient at the end of the warm-up, and what the chosen supports hold of it.

    `rows` are lines of diagnostics.jsonl: one row of panels a dataset.
    """
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure, panels = _pyplot().subplots(
        len(datasets), 2, figsize=(10, 4.6 * len(datasets)), layout="constrained", squeeze=False
    )
    for (left, right), dataset in zip(panels, datasets, strict=True):
        own = [row for row in rows if row["dataset"] == dataset]
        _concentration(left, own, dataset)
        _supports(right, own)
    _save(figure, path)


def _concentration(axes: Any, rows: Sequence[Mapping[str, Any]], dataset: str) -> None:
    epsilons = sorted({row["target_epsilon"] for row in rows})
    ratios = [ratio for ratio, _ in rows[0]["concentration"]]
    colours = [INK, PRIVATE, OPEN]
    for place, epsilon in enumerate(epsilons):
        curves = [dict(row["concentration"]) for row in rows if row["target_epsilon"] == epsilon]
        shares = [mean(curve[ratio] for curve in curves) for ratio in ratios]
        top = mean(curve[0.1] for curve in curves)
        style, colour = LINES[place % len(LINES)], colours[place % len(colours)]
        label = f"ε = {epsilon:g}: top 10% hold {100 * top:.1f}%"
        axes.plot(ratios, shares, style, color=colour, markersize=5, label=label)
    axes.plot(ratios, ratios, "-", color=MUTED, linewidth=2.5, label="random coordinates")
    axes.axvline(0.1, color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
    axes.plot(
        [0.1],
        [published.TOP_TENTH],
        "*",
        color="white",
        markeredgecolor=INK,
        markersize=13,
        label=f"the paper: {100 * published.TOP_TENTH:.1f}%",
    )
    axes.set_xscale("log")
    axes.set_xticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0], ["1%", "2%", "5%", "10%", "20%", "40%", "100%"])
    axes.minorticks_off()
    axes.set(ylim=(0, 1.03), xlabel="largest coordinates, share of d", ylabel="share of the true gradient's energy")
    axes.set_title(f"{dataset}: energy at the end of the warm-up", fontsize=10, color=INK, loc="left")
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    _plain(axes, "y")


def _supports(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    epsilons = sorted({row["target_epsilon"] for row in rows})
    scores = list(dict.fromkeys(row["score"] for row in rows))
    width = 0.8 / len(scores)
    fills = ["#d5dde5", PRIVATE, OPEN]
    for number, score in enumerate(scores):
        for place, epsilon in enumerate(epsilons):
            own = [row["oracle"] for row in rows if row["score"] == score and row["target_epsilon"] == epsilon]
            if not own:
                continue
            x = place + (number - (len(scores) - 1) / 2) * width
            axes.bar(
                x,
                mean(own),
                0.9 * width,
                color=fills[number % 3],
                edgecolor=INK,
                hatch=HATCHES[number % 3],
                label=f"chosen by the {score} score" if place == 0 else None,
            )
            axes.plot([x] * len(own), own, "o", color="white", markeredgecolor=INK, markersize=4, zorder=3)
            axes.text(
                x, max(own) + 0.025, f"{mean(own):.2f}", ha="center", fontsize=8, color=INK,
            )  # fmt: skip
    chance = mean(row["random"] for row in rows)
    axes.axhline(chance, color=INK, linewidth=1.6, linestyle="--", label=f"random support: k/d = {chance:.2f}")
    for place, epsilon in enumerate(epsilons):
        curves = [row for row in rows if row["target_epsilon"] == epsilon]
        most = [dict(row["concentration"]).get(row["active_ratio"]) for row in curves]
        known = [share for share in most if share is not None]
        if known:
            label = "best possible support" if place == 0 else None
            axes.hlines(mean(known), place - 0.42, place + 0.42, color=INK, linewidth=2.5, label=label)
    axes.set_xticks(range(len(epsilons)), [f"ε = {epsilon:g}" for epsilon in epsilons])
    axes.set(ylim=(0, 1.03), ylabel="share of the true gradient's energy")
    axes.set_title("what the chosen supports hold (dots: seeds)", fontsize=10, color=INK, loc="left")
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    _plain(axes, "y")


def pipeline_figure(run: Mapping[str, Any], path: str | Path) -> None:
    """The two phases, drawn with the numbers of one finished run of a two-phase method."""
    plan = Plan.from_dict(run["plan"])
    first, second = plan.phases
    k, d = run["active"], run["coordinates"]
    queries = [phase.segment for phase in plan.queries]

    def epsilon(*phases: Any) -> str:
        return round_up(accounting.epsilon([phase.segment for phase in phases], plan.delta, plan.accountant), 3)

    batch = plan.expected_batch_size(first)
    boxes = [
        (
            "Phase 1: warm-up",
            "DP-SGD on all coordinates",
            [
                f"T₁ = {first.steps} steps, q₁ = {first.sample_rate:.3f}",
                f"σ₁ = {first.noise_multiplier:.3f}, C₁ = {first.clip_norm:g}, B = {batch:,.0f}",
                f"noise on d = {d:,} coordinates",
                f"ε of this phase alone: {epsilon(first)}",
            ],
        ),
        (
            "Support",
            "post-processing: costs nothing",
            [
                "aₚ = mean of squares − (σ₁C₁/B)²",
                "A = the k largest aₚ",
                f"k = {k:,} of d = {d:,}",
                f"k/d = {k / d:.3f}",
            ],
        ),
        (
            "Phase 2: on the support",
            "mask, clip, noise, update only A",
            [
                f"T₂ = {second.steps} steps, q₂ = {second.sample_rate:.3f}",
                f"σ₂ = {second.noise_multiplier:.3f}, C₂ = {second.clip_norm:g}",
                f"noise on k = {k:,} coordinates",
                f"ε of this phase alone: {epsilon(second)}",
            ],
        ),
    ]
    figure, axes = _pyplot().subplots(figsize=(11, 4.1), layout="constrained")
    axes.set(xlim=(0, 11), ylim=(0.15, 3.9))
    axes.axis("off")
    for place, (title, what, lines) in enumerate(boxes):
        x, private = 0.15 + 3.7 * place, place != 1
        axes.add_patch(
            _rectangle(
                (x, 1.45),
                3.1,
                2.35,
                "#e8eef3" if private else "white",
                "-" if private else "--",
                1.6 if private else 1.2,
            )
        )
        axes.text(x + 1.55, 3.5, title, ha="center", va="center", fontsize=12, weight="bold", color=INK)
        axes.text(x + 1.55, 3.2, what, ha="center", va="center", fontsize=9, style="italic", color=INK)
        for number, line in enumerate(lines):
            axes.text(x + 0.15, 2.85 - 0.36 * number, line, va="center", fontsize=9.5, color=INK)
        if place:
            axes.annotate(
                "", (x - 0.03, 2.6), (x - 0.57, 2.6), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.8}
            )
    for x, label in ((3.55, "private\ngradients"), (7.25, "mask")):
        axes.text(x, 2.78, label, ha="center", va="bottom", fontsize=7.5, color=INK)
    ledger = "privacy accounting: "
    if queries:
        ledger += f"{sum(q.steps for q in queries)} queries for the features' statistics (ε alone: {epsilon(*plan.queries)}) + "
    ledger += "phase 1 + phase 2, composed"
    axes.add_patch(_rectangle((0.15, 0.25), 10.5, 0.85, "white", "-", 1.2))
    axes.text(5.4, 0.83, ledger, ha="center", va="center", fontsize=9.5, color=INK)
    axes.text(
        5.4, 0.48, f"ε = {round_up(plan.epsilon(), 3)} at δ = {plan.delta:g} ({plan.accountant.upper()})",
        ha="center", va="center", fontsize=11, weight="bold", color=INK,
    )  # fmt: skip
    for x in (1.7, 9.1):
        axes.annotate("", (x, 1.12), (x, 1.43), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2})
    recipe = run["recipe"]
    axes.set_title(
        f"{recipe['method']} on {recipe['dataset']}, target ε = {recipe['target_epsilon']:g}, seed {recipe['seed']}: "
        f"{plan.dataset_size:,} records, {plan.steps} steps",
        fontsize=10, color=INK, loc="left",
    )  # fmt: skip
    _save(figure, path)


def _rectangle(corner: tuple[float, float], width: float, height: float, fill: str, style: str, line: float) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(
        corner, width, height, boxstyle="round,pad=0,rounding_size=0.12",
        facecolor=fill, edgecolor=INK, linestyle=style, linewidth=line,
    )  # fmt: skip
