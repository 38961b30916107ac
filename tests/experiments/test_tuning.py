"""benchmarks/tune_paper.py: which trials are asked for, and what is chosen of them."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tptopk.experiments import recipes
from tptopk.experiments.recipes import Recipe

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tune_paper.py"
described = importlib.util.spec_from_file_location("tune_paper", SCRIPT)
assert described is not None and described.loader is not None
tune = importlib.util.module_from_spec(described)
described.loader.exec_module(tune)

Measure = Callable[[Recipe], list[float]]  # as it ends, and with its weights averaged in two ways


def line(r: Recipe, measured: list[float]) -> dict[str, Any]:
    return {"recipe": r.identity(), "measured": measured}


def by_rate(r: Recipe) -> list[float]:
    """The best rate of every method is 8, the best of few epochs."""
    rate = r.second_learning_rate or r.learning_rate
    value = 90.0 - abs(rate - 8.0) - 0.01 * r.epochs
    return [value, value, value]


def measured(further: Measure = by_rate) -> list[dict[str, Any]]:
    """All that is ever asked for, each as it is asked."""
    found: list[dict[str, Any]] = []
    while True:
        done = [one["recipe"] for one in found]
        wanted = [r for r in tune.all_trials(found) if r.identity() not in done]
        if not wanted:
            return found
        found += [line(r, (further if r.variant == recipes.FURTHER else by_rate)(r)) for r in wanted]


def further_of(found: list[dict[str, Any]], dataset: str, method: str) -> list[dict[str, Any]]:
    return [
        one["recipe"]
        for one in found
        if (one["recipe"]["variant"], one["recipe"]["dataset"], one["recipe"]["method"])
        == (recipes.FURTHER, dataset, method)
    ]


@pytest.fixture(scope="module")
def all_measured() -> list[dict[str, Any]]:
    return measured()


def test_trials_go_on_until_the_best_rate_has_neighbours(all_measured):
    chosen = tune.choose(all_measured, {})
    for (dataset, epsilon, method), numbers in chosen.items():
        rate = numbers.get("second_learning_rate", numbers["learning_rate"])
        tried = {
            one["recipe"]["second_learning_rate"] or one["recipe"]["learning_rate"]
            for one in all_measured
            if [one["recipe"][key] for key in ("dataset", "target_epsilon", "method")] == [dataset, epsilon, method]
        }
        assert rate == 8.0 and (not tried or min(tried) < rate < max(tried))


def test_while_a_trial_of_a_cell_is_missing_its_choice_of_before_stands(all_measured):
    some = [one for one in all_measured if one["recipe"]["dataset"] != "mnist"]
    before = {"mnist": {"1": {"dp-sgd": {"learning_rate": 3.0}}}, "fmnist": {"1": {"dp-sgd": {"learning_rate": 3.0}}}}
    chosen = tune.choose(some, before)
    assert chosen["mnist", 1.0, "dp-sgd"] == {"learning_rate": 3.0}
    assert chosen["fmnist", 1.0, "dp-sgd"]["learning_rate"] == 8.0


def test_each_further_change_is_made_to_the_best_so_far():
    """Shifts by one and 1.5 times the epochs are better, nothing else is."""

    def value(r: Recipe) -> list[float]:
        rise = {0: 0.0, 1: 2.0, 2: 1.0}[r.shift] + (1.0 if r.epochs == 45 else 0.0) - abs(r.learning_rate - 4.0)
        return [80.0 + rise, 90.0 + rise, 85.0]

    found = measured(value)
    seen = [(r["shift"], r["epochs"], r["learning_rate"]) for r in further_of(found, "mnist", "tp-topk")]
    assert seen == [(1, 30, 4.0), (2, 30, 4.0), (1, 45, 4.0), (1, 45, 2.0), (1, 45, 8.0)]
    assert {r["second_learning_rate"] for r in further_of(found, "mnist", "tp-topk")} == {8.0}
    chosen = tune.choose(found, {})["mnist", 1.0, "tp-topk"]
    assert "shift" not in chosen and chosen["epochs"] == 30
    assert chosen["further"] == {
        "batch_size": 4096, "epochs": 45.0, "learning_rate": 4.0, "second_learning_rate": 8.0, "ema": 0.9, "shift": 1, "held_out": 93.0,
    }  # fmt: skip


def test_where_no_further_change_is_better_the_choice_stays_and_is_not_tried_again():
    """Half the rate is tried, and twice that of the best, which is not the half."""
    found = measured(lambda r: [1.0, 1.0, 1.0])
    rates = [r["learning_rate"] for r in further_of(found, "mnist", "dp-sgd")]
    assert rates == [8.0, 8.0, 8.0, 4.0, 16.0]
    chosen = tune.choose(found, {})["mnist", 1.0, "dp-sgd"]
    assert chosen["further"] == {key: value for key, value in chosen.items() if key != "further"}


def test_what_is_tried_from_half_the_rate_is_not_the_first_choice_again():
    found = measured(lambda r: [99.0 if r.learning_rate == 4.0 else 1.0] * 3)
    assert [r["learning_rate"] for r in further_of(found, "mnist", "dp-sgd")] == [8.0, 8.0, 8.0, 4.0]


def test_no_further_trial_is_asked_for_before_the_choice_is_made():
    assert tune.further([]) == {} and all(r.variant == "tuning" for r in tune.all_trials([]))


def test_what_is_written_is_what_recipes_read(all_measured, tmp_path, monkeypatch):
    tune.write(tune.choose(all_measured, {}), tmp_path / "tuned.toml")
    monkeypatch.setattr(recipes, "TUNED", tmp_path / "tuned.toml")
    recipes.tuned.cache_clear()
    try:
        assert len(recipes.table_named("main")) == 189 and len(recipes.table_named("further")) == 27
        assert recipes.recipe("mnist", "dp-sgd", 1.0, 0).learning_rate == 8.0
    finally:
        recipes.tuned.cache_clear()
    assert "further" in tomllib.loads((tmp_path / "tuned.toml").read_text())["mnist"]["1"]["tp-topk"]
