"""Every run of the paper's tables and figures: which network, which numbers, which seeds.

All five methods train the same network on a dataset. Learning rates and averaging, which are not in the paper, were chosen
on held-out training records from the same few values for each method, as were epochs where several were tried (`tuned.toml`,
written by `benchmarks/tune_paper.py` from `results/tuning.jsonl`). Network, batch, views and clip norm were fixed before,
but for the views of what was tuned further.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from tptopk.privacy.refusal import Refusal, nearest

SEEDS = (0, 1, 2)
DATASETS = ("mnist", "fmnist", "cifar10")  # of the main table
METHODS = ("dp-sgd", "tp-rand", "tp-topk", "on-rand", "on-topk")
EPSILONS = (1.0, 3.0, 8.0)
RATIOS = (0.8, 0.6, 0.4, 0.2, 0.05, 0.01)
SPLITS = (0.2, 0.3, 0.4)  # E₁/E, and ε₁/ε
PAPER = "ρ = .40, split (.3, .3)"
TWIN = "TP-TopK's recipe"  # TP-Rand with all that was tuned for TP-TopK: the two differ in their ranking alone
OWN = "TP-Rand's own recipe"  # where the two differ in more: both are tuned, each for itself
FURTHER = "tuned further"
FURTHER_CELLS = (("mnist", 1.0), ("fmnist", 3.0), ("cifar10", 3.0))  # in which our TP-TopK is below the paper's
TWO_PHASES = "ρ = 1, two phases"  # a control: the phases, noise, learning rates and averaging of TP-TopK, and no coordinate left out


@dataclass(frozen=True)
class Recipe:
    """One run. Everything that its outcome depends on, but for the versions of the software."""

    dataset: str
    method: str
    target_epsilon: float
    seed: int
    batch_size: int
    epochs: float
    learning_rate: float
    second_learning_rate: float | None = None  # after the warm-up; as before unless said
    variant: str = PAPER
    network: str = "scatter-cnn"
    views: int = 1  # 2: the image and its mirror
    shift: int = 0  # if any, each of these moved so many pixels along a diagonal, either way: twice as many
    momentum: float = 0.9
    clip_norm: float = 0.1
    active_ratio: float = 0.4
    warmup: float = 0.3
    warmup_budget: float | None = 0.3
    score: str = "paper"
    ratio_schedule: str = "constant"
    clipping: str = "flat"
    annealed: bool = False  # SA-DP-SGD: steps that raise the loss are taken back
    ema: float | None = None
    query_noise: float = 32.0  # σ of the two queries for the channels' statistics
    delta: float = 1e-5
    records: int | None = None  # of the training set, the first so many; all unless said
    held_out: int = 0  # measure on that many training records, held out, instead of the test set

    def identity(self) -> dict[str, Any]:
        return asdict(self)


def completed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as a results file has it; what was added to recipes since then had its default then."""
    return {**{f.name: f.default for f in fields(Recipe) if f.default is not MISSING}, **stored}


SETTINGS: dict[str, dict[str, Any]] = {
    "mnist": {"network": "scatter-cnn-small"},
    "fmnist": {"network": "scatter-cnn-small", "views": 2},
    "cifar10": {"network": "scatter-cnn", "views": 2},
    "pneumoniamnist": {"network": "scatter-cnn-small", "views": 2},
}


TUNED = Path(__file__).with_name("tuned.toml")
HELD_OUT = 5000  # training records on which a support is judged, in the diagnostics


@cache
def tuned() -> dict[str, Any]:
    """dataset → ε → method → what was chosen for it on held-out records."""
    try:
        return tomllib.loads(TUNED.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Refusal(
            f"{TUNED.name} is missing: run `python benchmarks/tune_paper.py`, then `python benchmarks/tune_paper.py --choose`, "
            "which writes it; or use --quick, which needs none"
        ) from error


def recipe(dataset: str, method: str, epsilon: float, seed: int, **changes: Any) -> Recipe:
    """The tuned recipe of a cell, with changes."""
    try:
        found = tuned()[dataset][f"{epsilon:g}"][method]
        if changes.get("variant") == FURTHER:
            found = found["further"]
    except KeyError as error:
        raise Refusal(
            f"{TUNED.name} has nothing for {method} on {dataset} at ε = {epsilon:g}{' tuned further' * (error.args == ('further',))}: tune it first"
        ) from error
    chosen = {key: value for key, value in found.items() if key not in ("held_out", "further")}
    return Recipe(dataset, method, epsilon, seed, **{**SETTINGS[dataset], **chosen, **changes})


def quick_recipe(dataset: str, method: str, epsilon: float, seed: int, **changes: Any) -> Recipe:
    """The same cell on few records with one linear layer, untuned: for a look at the machinery. Its figures mean nothing."""
    held_out = min(100, changes.pop("held_out", 0))
    reduced = {"batch_size": 60, "epochs": 1.5, "learning_rate": 1.0, "network": "scatter-linear"}
    reduced["records"] = 300 + held_out  # 300 are trained on either way, so that one plan serves all
    return Recipe(dataset, method, epsilon, seed, held_out=held_out, **{**reduced, **changes})


Make = Callable[..., Recipe]  # (dataset, method, ε, seed, **changes) → the recipe of that cell


def twin(make: Make, dataset: str, epsilon: float, seed: int, **changes: Any) -> Recipe:
    """TP-Rand as TP-TopK is run."""
    return replace(make(dataset, "tp-topk", epsilon, seed, **changes), method="tp-rand")


def matched(make: Make, dataset: str, epsilon: float, seed: int, **changes: Any) -> Recipe:
    """TP-Rand's own recipe where its steps, noise and learning rates are TP-TopK's, and TP-TopK's elsewhere."""
    own, other = make(dataset, "tp-rand", epsilon, seed, **changes), twin(make, dataset, epsilon, seed, **changes)
    return own if replace(own, ema=other.ema) == other else other


def table_main(make: Make = recipe) -> list[Recipe]:
    return [
        make(dataset, method, epsilon, seed)
        for dataset in DATASETS
        for epsilon in EPSILONS
        for method in METHODS
        for seed in SEEDS
    ] + [
        recipe
        for dataset in DATASETS
        for epsilon in EPSILONS
        for seed in SEEDS
        for recipe in (
            make(dataset, "tp-topk", epsilon, seed, score="factored", variant="factored score"),
            twin(make, dataset, epsilon, seed, variant=TWIN),
        )
    ]


def table_further(make: Make = recipe) -> list[Recipe]:
    """Where the paper's TP-TopK is above ours: what more trials chose for it and for DP-SGD, and TP-Rand as TP-TopK."""
    return [
        one
        for dataset, epsilon in FURTHER_CELLS
        for seed in SEEDS
        for one in (
            make(dataset, "dp-sgd", epsilon, seed, variant=FURTHER),
            twin(make, dataset, epsilon, seed, variant=FURTHER),
            make(dataset, "tp-topk", epsilon, seed, variant=FURTHER),
        )
    ]


def table_ratio(make: Make = recipe) -> list[Recipe]:
    cells = [(dataset, epsilon) for dataset in ("cifar10", "fmnist") for epsilon in (8.0, 1.0)]

    def of_ratio(dataset: str, epsilon: float, ratio: float, seed: int) -> list[Recipe]:
        changes = {"active_ratio": ratio, "variant": f"ρ = {ratio:g}"}
        chosen, own = (make(dataset, method, epsilon, seed, **changes) for method in ("tp-topk", "tp-rand"))
        chance = matched(make, dataset, epsilon, seed, **changes)
        return [chosen, chance, *([replace(own, variant=f"ρ = {ratio:g}, {OWN}")] if own != chance else [])]

    dense = [make(dataset, "dp-sgd", epsilon, seed, variant="ρ = 1") for dataset, epsilon in cells for seed in SEEDS]
    control = [
        make(dataset, "tp-topk", epsilon, seed, active_ratio=1.0, variant=TWO_PHASES)
        for dataset, epsilon in cells
        for seed in SEEDS
    ]
    return [*dense, *control] + [
        recipe
        for dataset, epsilon in cells
        for ratio in RATIOS
        for seed in SEEDS
        for recipe in of_ratio(dataset, epsilon, ratio, seed)
    ]


def table_split(make: Make = recipe) -> list[Recipe]:
    return [
        make("cifar10", "tp-topk", 3.0, seed, warmup=warmup, warmup_budget=budget, variant=f"({warmup:g}, {budget:g})")
        for warmup in SPLITS
        for budget in SPLITS
        for seed in SEEDS
    ]


def table_medical(make: Make = recipe) -> list[Recipe]:
    return [
        make("pneumoniamnist", method, epsilon, seed)
        for epsilon in (8.0, 3.0)
        for method in ("non-private", "dp-sgd", "tp-rand", "tp-topk")
        for seed in SEEDS
        if method != "non-private" or epsilon == 8.0
    ]


def table_context(make: Make = recipe) -> list[Recipe]:
    """The peers that can be run here, each with the network and the settings of the method of ours that it changes."""
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("dp-sgd", "AUTO-S", {"clipping": "auto-s"}),
        ("dp-sgd", "SA-DP-SGD", {"annealed": True}),
        ("on-rand", "random sparsification", {"ratio_schedule": "linear", "active_ratio": 0.3}),
    ]
    return [
        make(dataset, method, epsilon, seed, variant=variant, **changes)
        for dataset in DATASETS
        for epsilon in EPSILONS
        for method, variant, changes in rows
        for seed in SEEDS
    ]


def table_diagnostics(make: Make = recipe) -> list[Recipe]:
    """Runs that keep training records out, on which supports are judged at the end of the warm-up."""
    return [
        make("cifar10", "tp-topk", epsilon, seed, held_out=HELD_OUT, variant="diagnostics")
        for epsilon in EPSILONS
        for seed in SEEDS
    ]


TABLES: dict[str, Callable[[Make], list[Recipe]]] = {
    "main": table_main,
    "further": table_further,
    "ratio": table_ratio,
    "split": table_split,
    "medical": table_medical,
    "context": table_context,
    "diagnostics": table_diagnostics,
}


def table_named(name: str, quick: bool = False, only: str | None = None, *, of_all: bool = False) -> list[Recipe]:
    """The runs of a table; or, quick, those of one seed in a reduced version that two cores finish in minutes.

    `only`: datasets, separated by commas; the others need not have been tuned. One that the table does not have is
    refused, unless this is one table `of_all`.
    """
    if name not in TABLES:
        raise Refusal(f"unknown table {name!r}{nearest(name, TABLES)}")
    named = list(SETTINGS) if only is None else [word for word in map(str.strip, only.split(",")) if word]
    if not named:
        raise Refusal(f"--only names no dataset; give some of {','.join(SETTINGS)}, or leave it out")
    for dataset in named:
        if dataset not in SETTINGS:
            raise Refusal(f"unknown dataset {dataset!r}{nearest(dataset, SETTINGS)}")
    has = list(dict.fromkeys(r.dataset for r in TABLES[name](quick_recipe)))
    for dataset in () if only is None or of_all else named:
        if dataset not in has:
            raise Refusal(f"table {name} has no runs on {dataset}; give --only {','.join(has)}, or leave it out")

    def make(dataset: str, *cell: Any, **changes: Any) -> Recipe:
        return (quick_recipe if quick or dataset not in named else recipe)(dataset, *cell, **changes)

    return [r for r in TABLES[name](make) if r.dataset in named and (not quick or r.seed == SEEDS[0])]
