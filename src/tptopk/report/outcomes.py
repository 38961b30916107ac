"""The finished runs of the paper's tables: what is there, means over seeds, and paired differences with intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy import stats  # type: ignore[import-untyped]

from tptopk.experiments import recipes
from tptopk.experiments.results import read_results
from tptopk.privacy.refusal import Refusal

LEVEL = 0.95
CELL = ("dataset", "method", "target_epsilon", "variant", "seed")  # what tells the runs of one table apart
BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds."""

    mean: float
    std: float | None  # None for one seed
    seeds: int
    # of freedom of the deviation; one less than there are seeds, unless it is put together from several
    degrees: float | None = None

    @property
    def uncertainty(self) -> tuple[float, float]:
        """Variance of the mean, and its degrees of freedom; of a mean that has a deviation."""
        assert self.std is not None
        return self.std**2 / self.seeds, self.degrees or self.seeds - 1

    def words(self, digits: int = 2, of: int | None = None) -> str:
        """`97.50 ± 0.12`, and how many seeds where not all `of` them are there."""
        spread = "" if self.std is None else f" ± {self.std:.{digits}f}"
        short = f" ({self.seeds} of {of} seeds)" if of is not None and self.seeds < of else ""
        return f"{self.mean:.{digits}f}{spread}{short}"


def spread(values: BySeed) -> Spread | None:
    found = list(values.values())
    return Spread(mean(found), stdev(found) if len(found) > 1 else None, len(found)) if found else None


@dataclass(frozen=True)
class Difference:
    """Mean of the differences by seed, with a t interval where there are two seeds or more."""

    mean: float
    interval: tuple[float, float] | None
    seeds: int
    std: float | None = None  # of the differences

    @property
    def verdict(self) -> str:
        if self.interval is None:
            return "one seed: no interval"
        low, high = self.interval
        return "higher" if low > 0 else "lower" if high < 0 else "no difference seen"

    def words(self, digits: int = 2) -> str:
        if self.interval is None:
            return f"{self.mean:+.{digits}f}"
        low, high = self.interval
        return f"{self.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"

    def agrees(self, paper: Spread) -> str:
        """Whether it says what the paper's difference says: its direction, and its size where that can be told."""
        if self.interval is None:
            return "one seed: no interval"
        fits = self._may_equal(paper)
        if self.verdict == "no difference seen":
            return "undecided: neither 0 nor the paper's is ruled out" if fits else "no: the paper's is ruled out"
        if (self.mean > 0) != (paper.mean > 0):
            return "no: the opposite"
        return "yes" if fits else "yes in direction; the paper's size is ruled out"

    def _may_equal(self, paper: Spread) -> bool:
        """The paper's difference is uncertain too, where its deviations are known."""
        assert self.interval is not None
        if not (self.std and paper.std):
            return self.interval[0] <= paper.mean <= self.interval[1]
        return unpaired(Spread(self.mean, self.std, self.seeds), paper).verdict == "no difference seen"


def paired(values: BySeed, others: BySeed) -> Difference | None:
    """values − others on the seeds that both have; None where they share none."""
    found = spread({seed: values[seed] - others[seed] for seed in sorted(set(values) & set(others))})
    if found is None or found.std is None:
        return None if found is None else Difference(found.mean, None, 1)
    half = float(stats.t.ppf((1 + LEVEL) / 2, found.seeds - 1)) * found.std / math.sqrt(found.seeds)
    return Difference(found.mean, (found.mean - half, found.mean + half), found.seeds, found.std)


def averaged(cells: Iterable[tuple[BySeed, BySeed]]) -> Difference | None:
    """The mean over cells of values − others, seed by seed: cells of one seed may vary together. Of seeds that every cell has."""
    pairs = list(cells)
    seeds = set.intersection(*(set(side) for pair in pairs for side in pair)) if pairs else set()
    return paired(*({seed: mean(pair[side][seed] for pair in pairs) for seed in seeds} for side in (0, 1)))


def unpaired(own: Spread, other: Spread) -> Difference:
    """own − other with Welch's interval; without one where either has no deviation."""
    gap, sides = own.mean - other.mean, (own, other)
    if any(not side.std for side in sides):
        return Difference(gap, None, own.seeds)
    variance, freedom = together(side.uncertainty for side in sides)
    half = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(variance)
    return Difference(gap, (gap - half, gap + half), own.seeds)


def together(uncertainties: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Variance and degrees of freedom of a sum or difference of independent means (Welch and Satterthwaite)."""
    parts = list(uncertainties)
    variance = sum(part for part, _ in parts)
    return variance, variance**2 / sum(part**2 / freedom for part, freedom in parts)


@dataclass(frozen=True)
class Outcomes:
    """The runs of one results file."""

    name: str
    runs: list[dict[str, Any]]
    wanted: int  # how many runs the table has
    seeds: int  # of each cell
    outdated: int = 0  # runs of a cell by another recipe than today's; they are not shown

    @property
    def there(self) -> int:
        """Finished runs of the table's own cells."""
        return len({_cell(run["recipe"]) for run in self.runs if not run.get("extra")})

    @property
    def seconds(self) -> float:
        """Of all runs; lines of one run count once."""
        return sum({_cell(run["recipe"]): float(run.get("seconds", 0.0)) for run in self.runs}.values())

    def select(self, **wanted: Any) -> list[dict[str, Any]]:
        """Runs whose recipes have these values."""
        return [run for run in self.runs if all(run["recipe"].get(key) == value for key, value in wanted.items())]

    def values(self, measure: str = "accuracy", **wanted: Any) -> dict[int, float]:
        """seed → measure of the runs whose recipes have these values."""
        found = {}
        for run in self.select(**wanted):
            if not isinstance(run.get(measure), (int, float)):
                raise Refusal(f"a run of {self.name}.jsonl has no {measure}: {json.dumps(run['recipe'])[:200]}")
            found[run["recipe"]["seed"]] = float(run[measure])
        return found

    def other_device(self, **wanted: Any) -> bool:
        """Whether some of these runs were made on a CPU, in a file that also has runs made on a GPU."""
        on_cpu = [run.get("device") == "cpu" for run in self.select(**wanted)]
        return any(on_cpu) and any(run.get("device", "cpu") != "cpu" for run in self.runs)

    def variants(self, method: str) -> list[str]:
        """Of a method, beside the paper's setting, in the order of the file."""
        named = [run["recipe"]["variant"] for run in self.select(method=method)]
        return [variant for variant in dict.fromkeys(named) if variant != recipes.PAPER]


def read(folder: Path, name: str, *, quick: bool = False) -> Outcomes:
    """A table's results file: the newest line of each run, without those of outdated recipes."""
    try:
        table = recipes.table_named(name, quick)
        known = [_plain(r.identity()) for r in table]
    except Refusal:  # nothing is tuned yet: any run of a cell counts
        table, known = recipes.TABLES[name](recipes.quick_recipe), None
    expected = {_cell(r.identity()) for r in table}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    outdated = []
    for run in read_results(folder / f"{name}.jsonl"):
        run = {**run, "recipe": {**run["recipe"], "score": run.get("score", run["recipe"].get("score"))}}
        if name != "diagnostics" and "plan" not in run:
            raise Refusal(f"a run of {name}.jsonl has no plan: {json.dumps(run['recipe'])[:200]}")
        cell = _cell(run["recipe"])
        if cell in expected and known is not None and _plain(run["recipe"]) not in known:
            outdated.append(_unnamed(run))
        else:
            found[*cell, run["recipe"].get("score")] = {**run, "extra": cell not in expected}
    shown = [_unnamed(run) for run in found.values()]
    seeds = 1 if quick else len(recipes.SEEDS)
    return Outcomes(name, list(found.values()), len(expected), seeds, sum(each not in shown for each in outdated))


def _unnamed(run: Mapping[str, Any]) -> dict[str, Any]:
    """What was run, whatever a table calls it."""
    return {**_plain(run["recipe"]), "variant": ""}


def _cell(recipe: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(recipe.get(key) for key in CELL)


def _plain(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Without the score where a run is judged by each of them."""
    diagnostic = recipe.get("variant") == "diagnostics"
    return {key: value for key, value in recipes.completed(recipe).items() if not (diagnostic and key == "score")}
