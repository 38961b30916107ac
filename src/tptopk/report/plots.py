"""Figures, with matplotlib where it is installed (the `plots` extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tptopk.privacy.refusal import Refusal
from tptopk.supports.advice import Advice

INK, MUTED, PRIVATE, OPEN = "#1f2933", "#9aa5b1", "#2a6f97", "#c2410c"
SUFFIXES = (".png", ".svg", ".pdf")


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ModuleNotFoundError as error:
        raise Refusal("figures need matplotlib: python -m pip install matplotlib") from error
    return plt


def check_figure(path: str | Path, made: str | Path | None = None) -> None:
    """Refuse, before long work, a figure that could not be drawn after it; `made` is a folder that the work makes."""
    _pyplot()
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise Refusal(f"the figure is {str(path)!r}; its name must end in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise Refusal(f"cannot write the figure {path}: it is a folder")
    folder = path.resolve().parent
    if not folder.is_dir() and not (made is not None and Path(made).resolve().is_relative_to(folder)):
        raise Refusal(f"cannot write the figure {path}: there is no folder {path.parent}; make it first")


def _plain(axes: Any, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.grid(axis=grid, color=MUTED, alpha=0.3)
    axes.set_axisbelow(True)


def _save(figure: Any, path: str | Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise Refusal(f"cannot write the figure {path}: {error}") from error
    finally:
        _pyplot().close(figure)


def bench_figure(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str) -> None:
    """Time and memory of every way of taking a step, as multiples of ordinary training, one row of panels a model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    tallest = max(sum(row["model"] == model for row in rows) for model in models)
    figure, panels = _pyplot().subplots(
        len(models), 2, figsize=(10, 0.6 + 0.24 * tallest * len(models)), layout="constrained", squeeze=False
    )
    for (left, right), model in zip(panels, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        colours = [
            MUTED if row["way"].startswith("ordinary") else PRIVATE if row["way"].startswith("ours") else OPEN
            for row in own
        ]
        for axes, key, label in ((left, "ratio", "time"), (right, "peak_ratio", "memory")):
            values = [row[key] for row in own]
            axes.barh(range(len(own)), values, color=colours, height=0.7)
            most = max(v for v, row in zip(values, own, strict=True) if row["way"][:4] in ("ours", "ordi"))
            limit = 1.15 * min(max(values), max(6.0, 1.5 * most))
            for place, value in enumerate(values):
                axes.text(min(value, 0.93 * limit), place, f" {value:.2f}", va="center", fontsize=7, color=INK)
            axes.axvline(1.0, color=INK, linewidth=0.8)
            axes.set(yticks=[], xlim=(0, limit), xlabel=f"{label}, × ordinary" if model == models[-1] else "")
            axes.invert_yaxis()
            _plain(axes, "x")
        left.set_yticks(range(len(own)), [row["way"] for row in own], fontsize=7)
        left.set_title(f"{model}, batch {own[0]['batch']}", fontsize=9, color=INK, loc="left")
    figure.suptitle(title, fontsize=11, color=INK)
    _save(figure, path)


def growth_figure(curves: Sequence[Mapping[str, Any]], path: str | Path, title: str) -> None:
    """Time and memory against each size, both axes logarithmic, with the measured exponents."""
    figure, panels = _pyplot().subplots(
        2, len(curves), figsize=(3 * len(curves), 5), layout="constrained", squeeze=False
    )
    for column, curve in enumerate(curves):
        for axes, key, exponents, unit in (
            (panels[0][column], "milliseconds", "time_exponents", 1.0),
            (panels[1][column], "peak_bytes", "memory_exponents", 2.0**20),
        ):
            axes.loglog(curve["values"], [value / unit for value in curve[key]], "o-", color=PRIVATE, markersize=4)
            middle = (min(curve[key]) * max(curve[key])) ** 0.5 / unit
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, middle / 3.5), max(high, middle * 3.5) * 1.4)  # a flat curve is to look flat
            whole, upper = curve[exponents]
            axes.text(
                0.05,
                0.9,
                f"exponent {whole:.2f}; upper half {upper:.2f}",
                transform=axes.transAxes,
                fontsize=8,
                color=INK,
            )
            _plain(axes, "both")
        panels[0][column].set_title(f"{curve['size']} ({curve['held']})", fontsize=9, color=INK)
        panels[1][column].set_xlabel(curve["size"], fontsize=9)
    panels[0][0].set_ylabel("milliseconds a step")
    panels[1][0].set_ylabel("MiB a step")
    figure.suptitle(title, fontsize=11, color=INK)
    _save(figure, path)


def comparison_figure(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str) -> None:
    """Accuracy of each method with every seed shown, beside the noise energy of one step."""
    names = [row["method"] for row in rows]
    places = range(len(rows))
    colours = [OPEN if row["epsilon"] is None else PRIVATE for row in rows]
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(9, 3.4), width_ratios=[3, 2], layout="constrained")
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
        axes.invert_yaxis()
        _plain(axes, "x")
    figure.suptitle(title, fontsize=11, color=INK)
    _save(figure, path)


def audit_figure(results: Sequence[Any], path: str | Path, title: str) -> None:
    """One row an audit: its scores with and without the record, and its lower bounds beside the ε that is claimed.

    `results` are the audits of `tptopk.experiments.audit`.
    """
    figure, panels = _pyplot().subplots(
        len(results), 2, figsize=(9, 0.6 + 2.2 * len(results)), width_ratios=[3, 2], layout="constrained", squeeze=False
    )
    for (left, right), audit in zip(panels, results, strict=True):
        every = sorted([*audit.present, *audit.absent])
        spread = (every[-1] - every[0]) or 1.0
        bins = min(60, 10 + len(every) // 20)
        edges = [every[0] + spread * n / bins for n in range(bins + 1)]
        for scores, colour, label in ((audit.absent, MUTED, "without the record"), (audit.present, PRIVATE, "with it")):
            left.hist(scores, edges, color=colour, alpha=0.6, label=label)
        for threshold in {t for t in audit.thresholds or () if every[0] <= t <= every[-1]}:
            left.axvline(threshold, color=INK, linewidth=1, linestyle="--")
        left.set(yticks=[])
        left.set_title(f"{audit.name}: {audit.score}", fontsize=9, color=INK, loc="left")
        broken = audit.verdict != "consistent"
        for place, (method, bound) in enumerate(audit.bounds.items()):
            colour = OPEN if audit.sure[method] > audit.claimed else PRIVATE
            for value, alpha in ((bound, 0.45), (audit.sure[method], 0.85)):
                right.barh(place, value, color=colour, height=0.5, alpha=alpha)
            right.text(max(bound, audit.claimed), place, f"  {bound:.2f}", va="center", fontsize=8, color=INK)
        right.axvline(audit.claimed, color=INK, linewidth=1.2)
        right.set_yticks(range(len(audit.bounds)), list(audit.bounds), fontsize=8)
        right.set_xlim(0, 1.3 * max(audit.claimed, *audit.bounds.values()))
        right.set_ylim(len(audit.bounds) - 0.5, -0.5)
        right.set_title(
            f"{'BROKEN' if broken else 'consistent'}: at least {max(audit.sure.values()):.3g}, claimed {audit.claimed:.3g}, δ = {audit.delta:g}",
            fontsize=9,
            color=OPEN if broken else INK,
            loc="left",
        )
        for axes in (left, right):
            _plain(axes, "x")
    panels[-1][0].set_xlabel("score; dashed: where a guess begins", fontsize=9)
    panels[-1][1].set_xlabel("ε at least (dark: the verdict's); line: claimed", fontsize=9)
    panels[0][0].legend(fontsize=8, edgecolor="none")
    figure.suptitle(title, fontsize=11, color=INK)
    _save(figure, path)


def advice_figure(advice: Advice, path: str | Path, title: str) -> None:
    """Signal kept against ρ beside noise left, and progress on ρ beside that of dense training."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for score, colour in zip(advice.misranking, (PRIVATE, OPEN), strict=False):
        rows = [c for c in advice.candidates if c.score == score]
        ratios = [c.active_ratio for c in rows]
        left.plot(
            ratios, [c.kept.estimate for c in rows], "o-", color=colour, markersize=4, label=f"by the {score} score"
        )
        left.fill_between(ratios, [c.kept.low for c in rows], [c.kept.high for c in rows], color=colour, alpha=0.18)
        gains = [[max(value, 1e-3) for value in c.gain] for c in rows]  # zero has no place on a logarithmic axis
        right.plot(ratios, [g[0] for g in gains], "o-", color=colour, markersize=4)
        right.fill_between(ratios, [g[1] for g in gains], [g[2] for g in gains], color=colour, alpha=0.18)
    every = [10 ** (-2 + 2 * n / 100) for n in range(101)]
    left.plot(every, every, color=MUTED, linestyle="--", label="noise left; signal kept at random")
    left.set(ylim=(0, 1.03), ylabel="share")
    right.axhline(1.0, color=INK, linewidth=0.8)
    right.set(yscale="log", ylim=(0.03, 30), ylabel="progress, × dense training")
    if advice.active_ratio is not None:
        right.axvline(advice.active_ratio, color=INK, linewidth=1, linestyle=":")
    for axes in (left, right):
        smallest = min(c.active_ratio for c in advice.candidates)
        axes.set(xscale="log", xlim=(1.05, smallest / 1.05), xlabel="active ratio ρ")
        ticks = [r for r in (1.0, 0.4, 0.2, 0.1, 0.05, 0.02, 0.01) if r >= smallest / 1.05]
        axes.set_xticks(ticks, [f"{r:g}" for r in ticks])
        axes.minorticks_off()
        _plain(axes, "both")
    ticks = [0.1, 0.3, 1, 3, 10]
    right.set_yticks(ticks, [f"{value:g}" for value in ticks])
    left.legend(fontsize=8, edgecolor="none")
    left.set_title(f"signal kept, {advice.level:.0%} intervals", fontsize=9, color=INK, loc="left")
    right.set_title(f"{advice.verdict}", fontsize=9, color=INK, loc="left")
    figure.suptitle(title, fontsize=11, color=INK)
    _save(figure, path)
