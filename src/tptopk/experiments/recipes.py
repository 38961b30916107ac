"""Every run of the paper's tables and figures: which network, which numbers, which seeds.

All five methods train the same network on a dataset. What is not in the paper (network, batch, learning rates, epochs)
was chosen on held-out training records from the same few values for each method (`tuned.toml`, written by
`benchmarks/tune_paper.py` from `results/tuning.jsonl`); the test set was not looked at.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tptopk.privacy.refusal import Refusal, nearest

SEEDS = (0, 1, 2)
METHODS = ("dp-sgd", "tp-rand", "tp-topk", "on-rand", "on-topk")
EPSILONS = (1.0, 3.0, 8.0)
PAPER = "ρ = .40, split (.3, .3)"


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
    momentum: float = 0.9
    clip_norm: float = 0.1
    active_ratio: float = 0.4
    warmup: float = 0.3
    warmup_budget: float | None = 0.3
    score: str = "paper"
    ratio_schedule: str = "constant"
    clipping: str = "flat"
    ema: float | None = None
    query_noise: float = 32.0  # σ of the two queries for the channels' statistics
    delta: float = 1e-5
    records: int | None = None  # of the training set, the first so many; all unless said
    held_out: int = 0  # measure on that many training records, held out, instead of the test set

    def identity(self) -> dict[str, Any]:
        return asdict(self)


SETTINGS: dict[str, dict[str, Any]] = {
    "mnist": {"network": "scatter-cnn-small"},
    "fmnist": {"network": "scatter-cnn-small", "views": 2},
    "cifar10": {"network": "scatter-cnn", "views": 2},
    "pneumoniamnist": {"network": "scatter-cnn-small", "views": 2},
}


@cache
def tuned() -> dict[str, Any]:
    """dataset → ε → method → what was chosen for it on held-out records."""
    return tomllib.loads(Path(__file__).with_name("tuned.toml").read_text(encoding="utf-8"))


def recipe(dataset: str, method: str, epsilon: float, seed: int, **changes: Any) -> Recipe:
    """The tuned recipe of a cell, with changes."""
    chosen = {key: value for key, value in tuned()[dataset][f"{epsilon:g}"][method].items() if key != "held_out"}
    numbers = {**SETTINGS[dataset], **chosen, **changes}
    return Recipe(dataset=dataset, method=method, target_epsilon=epsilon, seed=seed, **numbers)


def table_main() -> list[Recipe]:
    return [
        recipe(dataset, method, epsilon, seed)
        for dataset in ("mnist", "fmnist", "cifar10")
        for epsilon in EPSILONS
        for method in METHODS
        for seed in SEEDS
    ] + [
        recipe(dataset, "tp-topk", epsilon, seed, score="factored", variant="factored score")
        for dataset in ("mnist", "fmnist", "cifar10")
        for epsilon in EPSILONS
        for seed in SEEDS
    ]


def table_ratio() -> list[Recipe]:
    dense = [
        recipe(dataset, "dp-sgd", epsilon, seed, variant="ρ = 1")
        for dataset in ("cifar10", "fmnist")
        for epsilon in (8.0, 1.0)
        for seed in SEEDS
    ]
    return dense + [
        recipe(dataset, method, epsilon, seed, active_ratio=ratio, variant=f"ρ = {ratio:g}")
        for dataset in ("cifar10", "fmnist")
        for epsilon in (8.0, 1.0)
        for ratio in (0.8, 0.6, 0.4, 0.2, 0.05, 0.01)
        for method in ("tp-topk", "tp-rand")
        for seed in SEEDS
    ]


def table_split() -> list[Recipe]:
    return [
        recipe(
            "cifar10", "tp-topk", 3.0, seed, warmup=warmup, warmup_budget=budget, variant=f"({warmup:g}, {budget:g})"
        )
        for warmup in (0.2, 0.3, 0.4)
        for budget in (0.2, 0.3, 0.4)
        for seed in SEEDS
    ]


def table_medical() -> list[Recipe]:
    return [
        recipe("pneumoniamnist", method, epsilon, seed)
        for epsilon in (8.0, 3.0)
        for method in ("non-private", "dp-sgd", "tp-rand", "tp-topk")
        for seed in SEEDS
        if method != "non-private" or epsilon == 8.0
    ]


def table_context() -> list[Recipe]:
    """The peers that can be run here, on CIFAR-10 with the same network."""
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("dp-sgd", "AUTO-S", {"clipping": "auto-s"}),
        ("on-rand", "random sparsification", {"ratio_schedule": "linear", "active_ratio": 0.3}),
    ]
    return [
        recipe("cifar10", method, epsilon, seed, variant=variant, **changes)
        for epsilon in EPSILONS
        for method, variant, changes in rows
        for seed in SEEDS
    ]


def table_diagnostics() -> list[Recipe]:
    """Runs that keep 5,000 training records out, on which supports are judged at the end of the warm-up."""
    return [
        recipe("cifar10", "tp-topk", epsilon, seed, held_out=5000, variant="diagnostics")
        for epsilon in EPSILONS
        for seed in SEEDS
    ]


TABLES = {
    "main": table_main,
    "ratio": table_ratio,
    "split": table_split,
    "medical": table_medical,
    "context": table_context,
    "diagnostics": table_diagnostics,
}


def table_named(name: str) -> list[Recipe]:
    if name not in TABLES:
        raise Refusal(f"unknown table {name!r}{nearest(name, TABLES)}")
    return TABLES[name]()


def quick(recipes: list[Recipe]) -> list[Recipe]:
    """A reduced version that a laptop finishes in minutes: one seed, few records and steps. Its figures mean nothing."""
    return [
        replace(
            r, records=600, batch_size=100, epochs=1.5, views=1, network="scatter-linear", held_out=min(r.held_out, 100)
        )
        for r in recipes
        if r.seed == SEEDS[0]
    ]
