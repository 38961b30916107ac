"""Drawings for the page, as SVG inside HTML: curves with read-outs, the phases of a plan, a map of a support, error bars.

Colours come from the page's style sheet by class, so that one drawing serves light, dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tptopk.report.markup import Markup, as_data, joined, table, tag

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 26, 46
LEVELS = 5  # of density in a map
ROWS_SHOWN = 12  # of the numbers under a curve
NAME_WIDTH = 44  # characters of a group's name in a line


@dataclass(frozen=True)
class Curve:
    """One line of a chart, with a band around it where `low` and `high` are given."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str = "a"  # a, b or c: a class of the style sheet
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """A rule with a few words: at an x (the switch of phases, the chosen support) or at a y (the budget)."""

    at: float
    label: str
    upright: bool = True


Format = Callable[[float], str]


def number(value: float) -> str:
    """A few digits, with thousands set apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def thinned(
    xs: Sequence[float], ys: Sequence[float], buckets: int
) -> tuple[list[float], list[float], list[float], list[float]]:
    """At most so many points: in equal stretches of steps the middle x, the mean, the least and the most."""
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    if len(x) <= buckets:
        return x.tolist(), y.tolist(), y.tolist(), y.tolist()
    edges = np.linspace(0, len(x), buckets + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(x)))
    middle = np.add.reduceat(x, edges) / counts
    mean = np.add.reduceat(y, edges) / counts
    return (
        middle.tolist(),
        mean.tolist(),
        np.minimum.reduceat(y, edges).tolist(),
        np.maximum.reduceat(y, edges).tolist(),
    )


def chart(
    curves: Sequence[Curve],
    *,
    title: str,
    x_label: str,
    y_label: str,
    marks: Sequence[Mark] = (),
    x_format: Format = number,
    y_format: Format = number,
    log_x: bool = False,
    y_most: float | None = None,
) -> Markup:
    """A chart that says its numbers on hover and by arrow keys, and holds them as a table besides."""
    xs = [x for curve in curves for x in curve.xs]
    shown = [y for c in curves for y in (*c.ys, *(c.low or ()), *(c.high or ()))]
    shown += [mark.at for mark in marks if not mark.upright]
    left, right = min(xs), max(xs)
    most = y_most if y_most is not None else max(shown)
    if right <= left:
        right = left + 1
    ticks = _ticks(0.0, most if most > 0 else 1.0)
    bottom, top = ticks[0], max(ticks[-1], most)

    def across(x: float) -> float:
        share = math.log(x / left) / math.log(right / left) if log_x else (x - left) / (right - left)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (y - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

    parts = [_frame(ticks, up, y_format), _x_ticks(left, right, across, x_format, log_x)]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(tag("text", x_label, x=middle, y=HEIGHT - 8, class_="axis", text_anchor="middle"))
    parts.append(tag("text", y_label, x=6, y=14, class_="axis"))
    parts += [_band(curve, across, up) for curve in curves if curve.low and curve.high]
    parts += [_mark(mark, across, up) for mark in marks]
    parts += [_line(curve, across, up) for curve in curves]
    parts.append(tag("line", x1=LEFT, x2=LEFT, y1=TOP, y2=HEIGHT - BOTTOM, class_="cursor", visibility="hidden"))
    drawing = tag(
        "svg",
        tag("title", title),
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}. {y_label}, by {x_label}. The numbers are in the table below.",
    )
    together = [curve for curve in curves if list(curve.xs) == list(curves[0].xs)]
    points = [
        [_short(across(x)), x_format(x), [f"{curve.label}: {_said(curve, place, y_format)}" for curve in together]]
        for place, x in enumerate(curves[0].xs)
    ]
    legend = (
        tag("p", *(tag("span", c.label, class_=f"key key-{c.style}") for c in curves), class_="legend")
        if len(curves) > 1 or curves[0].low
        else None
    )
    return joined(
        tag("h4", title),
        tag(
            "div",
            drawing,
            tag("output", "", class_="readout", aria_live="polite"),
            class_="chart",
            tabindex="0",
            role="group",
            aria_label=f"{title}: arrow keys read the values",
            data_x=x_label,
            data_width=WIDTH,
            data_points=as_data(points),
        ),
        legend,
        _numbers(curves, x_label, x_format, y_format, title),
    )


def _said(curve: Curve, place: int, y_format: Format) -> str:
    said = y_format(curve.ys[place])
    if curve.low and curve.high and curve.low[place] < curve.high[place]:
        said += f" ({y_format(curve.low[place])} to {y_format(curve.high[place])})"
    return said


def _numbers(curves: Sequence[Curve], x_label: str, x_format: Format, y_format: Format, title: str) -> Markup:
    first = curves[0]
    together = [curve for curve in curves if list(curve.xs) == list(first.xs)]
    count = len(first.xs)
    places = sorted({round(i * (count - 1) / (ROWS_SHOWN - 1)) for i in range(ROWS_SHOWN)}) if count > 1 else [0]
    rows: list[list[object]] = [
        [x_format(first.xs[place]), *(_said(curve, place, y_format) for curve in together)] for place in places
    ]
    inside = table([x_label, *(curve.label for curve in together)], rows, f"{title}, in numbers")
    return tag("details", tag("summary", "The numbers"), inside, class_="numbers")


def _short(value: float) -> float:
    return round(value, 1)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _line(curve: Curve, across: Callable[[float], float], up: Callable[[float], float]) -> Markup:
    points = [(float(across(x)), up(y)) for x, y in zip(curve.xs, curve.ys, strict=True)]
    if len(points) == 1 or curve.dots:
        dots = [tag("circle", cx=_short(x), cy=_short(y), r=3.5, class_=f"dot dot-{curve.style}") for x, y in points]
    else:
        dots = []
    return joined(tag("path", d=_path(points), class_=f"curve curve-{curve.style}"), *dots)


def _band(curve: Curve, across: Callable[[float], float], up: Callable[[float], float]) -> Markup:
    assert curve.low is not None and curve.high is not None
    over = [(across(x), up(y)) for x, y in zip(curve.xs, curve.high, strict=True)]
    under = [(across(x), up(y)) for x, y in zip(curve.xs, curve.low, strict=True)]
    return tag("path", d=_path([*over, *reversed(under)]) + "Z", class_=f"band band-{curve.style}")


def _mark(mark: Mark, across: Callable[[float], float], up: Callable[[float], float]) -> Markup:
    if not mark.upright:
        y = up(mark.at)
        rule = tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_short(y), y2=_short(y), class_="rule")
        return joined(rule, tag("text", mark.label, x=LEFT + 6, y=_short(y - 5), class_="note"))
    x = across(mark.at)
    near_the_end = x > (LEFT + WIDTH - RIGHT) * 0.55
    rule = tag("line", x1=_short(x), x2=_short(x), y1=TOP, y2=HEIGHT - BOTTOM, class_="rule")
    place = _short(x - 6) if near_the_end else _short(x + 6)
    anchor = "end" if near_the_end else "start"
    return joined(rule, tag("text", mark.label, x=place, y=HEIGHT - BOTTOM - 8, class_="note", text_anchor=anchor))


def _frame(ticks: Sequence[float], up: Callable[[float], float], y_format: Format) -> Markup:
    lines = []
    for tick in ticks:
        y = _short(up(tick))
        lines.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        lines.append(tag("text", y_format(tick), x=LEFT - 7, y=y + 4, class_="tick", text_anchor="end"))
    return joined(*lines)


def _x_ticks(left: float, right: float, across: Callable[[float], float], x_format: Format, log_x: bool) -> Markup:
    if log_x:
        ticks = [
            t for e in range(-6, 7) for t in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if left * 0.999 <= t <= right * 1.001
        ]
    else:
        ticks = [t for t in _ticks(left, right) if left <= t <= right]
    ends = {0: "start"} if across(ticks[0]) < LEFT + 8 else {}
    if across(ticks[-1]) > WIDTH - RIGHT - 12:
        ends[len(ticks) - 1] = "end"
    return joined(
        *(
            tag(
                "text",
                x_format(tick),
                x=_short(across(tick)),
                y=HEIGHT - BOTTOM + 17,
                class_="tick",
                text_anchor=ends.get(place, "middle"),
            )
            for place, tick in enumerate(ticks)
        )
    )


def _ticks(least: float, most: float) -> list[float]:
    """About five round numbers that reach from below `least` to `most` or above."""
    raw = (most - least) / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    first = math.floor(least / step + 1e-9)
    last = math.ceil(most / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


# ---- Where the active coordinates are ----------------------------------------------------------------------------------


def density(mask: NDArray[np.bool_], cells: int) -> NDArray[np.float64]:
    """A weight [out, …] as a small grid: the share of active coordinates in each cell, rows by columns."""
    flat = mask.reshape(len(mask), -1) if mask.ndim > 1 else mask.reshape(1, -1)
    rows, columns = flat.shape
    high = min(rows, max(1, round(math.sqrt(cells * min(4.0, max(0.25, rows / columns))))))
    wide = min(columns, max(1, cells // high))
    row_edges = (np.arange(high) * rows) // high
    column_edges = (np.arange(wide) * columns) // wide
    summed = np.add.reduceat(np.add.reduceat(flat, row_edges, axis=0, dtype=np.int64), column_edges, axis=1)
    sizes = np.outer(np.diff(np.append(row_edges, rows)), np.diff(np.append(column_edges, columns)))
    shares: NDArray[np.float64] = summed / sizes
    return shares


def density_map(mask: NDArray[np.bool_], cells: int, label: str) -> Markup:
    """The grid as a drawing: the darker a cell, the more of its coordinates are active."""
    shares = density(mask, cells)
    high, wide = shares.shape
    paths: list[list[str]] = [[] for _ in range(LEVELS)]
    levels = np.ceil(shares * LEVELS - 1e-9).astype(int)
    for row in range(high):
        start = 0
        while start < wide:
            level, end = levels[row, start], start + 1
            while end < wide and levels[row, end] == level:
                end += 1
            if level:
                paths[level - 1].append(f"M{start} {row}h{end - start}v1H{start}z")
            start = end
    drawn = [tag("path", d="".join(of), class_=f"level-{i}") for i, of in enumerate(paths, 1) if of]
    return tag(
        "svg",
        tag("title", label),
        tag("rect", width=wide, height=high, class_="level-0"),
        *drawn,
        viewBox=f"0 0 {wide} {high}",
        preserveAspectRatio="none",
        class_="map",
        role="img",
        aria_label=label,
        style=f"height:{max(12, min(96, 3 * high))}px",
    )


# ---- Several runs ------------------------------------------------------------------------------------------------------


def _lines(words: str) -> list[str]:
    """Words broken at commas, so that each line fits a phone."""
    lines = [""]
    for part in words.split(", "):
        if lines[-1] and len(lines[-1]) + len(part) + 2 > NAME_WIDTH:
            lines[-1] += ","
            lines.append(part)
        else:
            lines[-1] += (", " if lines[-1] else "") + part
    return lines


def error_bars(rows: Sequence[tuple[str, Sequence[float], float, float | None]], x_label: str) -> Markup:
    """One line a group: every run a dot, the mean a diamond, one standard deviation to either side a bar."""
    values = [v for _, of, mean, std in rows for v in (*of, mean - (std or 0), mean + (std or 0))]
    spare = 0.08 * (max(values) - min(values)) or 1.0
    ticks = _ticks(min(values) - spare, max(values) + spare)
    if "%" in x_label:  # which no run is above, though a bar may reach there
        ticks = [tick for tick in ticks if tick <= 100]
    low, high = ticks[0], ticks[-1]
    names = [_lines(name) for name, *_ in rows]
    height = sum(26 + 18 * len(name) for name in names) + 52

    def across(x: float) -> float:
        return _short(12 + (x - low) / (high - low) * (WIDTH - 24))

    parts = []
    for tick in ticks:
        parts.append(tag("line", x1=across(tick), x2=across(tick), y1=6, y2=height - 42, class_="grid"))
        parts.append(tag("text", number(tick), x=across(tick), y=height - 26, class_="tick", text_anchor="middle"))
    y = -10
    for name, (_, of, mean, std) in zip(names, rows, strict=True):
        y += 26 + 18 * len(name)
        for place, words in enumerate(reversed(name)):
            parts.append(tag("text", words, x=12, y=y - 14 - 18 * place, class_="name"))
        if std is not None:
            ends = across(mean - std), across(min(high, mean + std))
            parts.append(tag("line", x1=ends[0], x2=ends[1], y1=y, y2=y, class_="bar"))
        parts += [tag("circle", cx=across(v), cy=y, r=3.5, class_="dot dot-c") for v in of]
        x = across(mean)
        parts.append(tag("path", d=f"M{x - 6} {y}L{x} {y - 6}L{x + 6} {y}L{x} {y + 6}Z", class_="mean"))
    parts.append(tag("text", x_label, x=WIDTH / 2, y=height - 6, class_="axis", text_anchor="middle"))
    said = "; ".join(
        f"{name}: {mean:.2f}" + (f" ± {std:.2f}" if std is not None else "") for name, _, mean, std in rows
    )
    return tag(
        "svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=f"{x_label}. {said}", class_="wide"
    )
