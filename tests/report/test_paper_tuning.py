"""What was tried and chosen, as the document says it."""

from __future__ import annotations

import math
from typing import Any

from tests.report.runs import row
from tptopk.experiments import recipes
from tptopk.report.paper_tuning import tuned


def test_the_further_trials_are_listed_apart_and_the_chosen_one_is_marked(tmp_path, monkeypatch):
    def trial(variant: str, measured: float, **changes: Any) -> dict[str, Any]:
        r = recipes.quick_recipe("mnist", "dp-sgd", 1.0, 100, variant=variant, **{"learning_rate": 4.0, **changes})
        return {"recipe": r.identity(), "measured": [measured - 1, measured], "seconds": 1.0}

    chosen = '[mnist."1".dp-sgd]\nbatch_size = 60\nepochs = 1.5\nlearning_rate = 4.0\nheld_out = 90.0\n'
    further = chosen.replace("dp-sgd]", "dp-sgd.further]").replace("90.0", "91.0") + "shift = 1\nema = 0.9\n"
    (tmp_path / "tuned.toml").write_text(chosen + further)
    monkeypatch.setattr(recipes, "TUNED", tmp_path / "tuned.toml")
    trials = [
        trial("tuning", 90.0), trial("tuning", 89.0, learning_rate=8.0),
        trial(recipes.FURTHER, 91.0, shift=1), trial(recipes.FURTHER, 91.0, shift=2), trial(recipes.FURTHER, 90.5, shift=1, epochs=3),
    ]  # fmt: skip
    first, rest = tuned({"tuning": trials, "tuning_range": []}).split("Tuned further")
    assert row(first, "MNIST", "1", "60")[3:5] == ["1.5", "4, 8"] and "dp-sgd 2 |" in first
    assert row(first, "MNIST", "1", "dp-sgd")[8] == "90.00"
    assert row(rest, "MNIST", "1", "dp-sgd", "1", "1.5")[7] == "91.00 (chosen)"
    assert row(rest, "MNIST", "1", "dp-sgd", "2", "1.5")[7] == "91.00"
    assert row(rest, "MNIST", "1", "dp-sgd", "1", "3")[7] == "90.50"


def test_which_choices_lie_on_the_edge_is_computed(tmp_path, monkeypatch):
    """Of three rates, one method has the lowest, one the middle one and three the highest."""
    best = dict.fromkeys(recipes.METHODS, 16.0) | {"dp-sgd": 4.0, "on-topk": 8.0}
    trials, lines = [], []
    for method in recipes.METHODS:
        warm = method.startswith("tp")
        for rate in (4.0, 8.0, 16.0):
            rates = {"learning_rate": 4.0, "second_learning_rate": rate} if warm else {"learning_rate": rate}
            r = recipes.quick_recipe("cifar10", method, 1.0, 100, **rates)
            level = 50.0 - abs(math.log2(rate / best[method]))
            trials.append({"recipe": r.identity(), "measured": [level - 1, level, level - 2], "seconds": 1.0})
        chosen = (
            f"learning_rate = 4.0\nsecond_learning_rate = {best[method]}" if warm else f"learning_rate = {best[method]}"
        )
        lines.append(f'[cifar10."1".{method}]\nbatch_size = 60\nepochs = 1.5\n{chosen}\nheld_out = 50.0\n')
    (tmp_path / "tuned.toml").write_text("".join(lines))
    monkeypatch.setattr(recipes, "TUNED", tmp_path / "tuned.toml")
    found = tuned({"tuning": trials, "tuning_range": []})
    assert "That is so for 4 of the 5 choices among several learning rates: 4 on CIFAR-10." in found
    assert row(found, "CIFAR-10", "1", "dp-sgd")[5:7] == ["4 (lowest)", "–"]
    assert row(found, "CIFAR-10", "1", "on-topk")[5:7] == ["8", "–"]
    assert row(found, "CIFAR-10", "1", "tp-topk")[5:7] == ["4", "16 (highest)"]


def test_how_close_the_choices_were_is_said():
    def trial(method: str, rate: float, *measured: float) -> dict[str, Any]:
        return {"recipe": recipes.quick_recipe("mnist", method, 1.0, 100, learning_rate=rate).identity(), "measured": measured, "seconds": 1.0}  # fmt: skip

    trials = [
        trial("dp-sgd", 4.0, 90.0, 91.0), trial("dp-sgd", 4.0, 92.0), trial("dp-sgd", 8.0, 91.75),
        trial("on-rand", 4.0, 90.0), trial("on-rand", 8.0, 89.0), trial("on-topk", 4.0, 90.0),
    ]  # fmt: skip
    found = tuned({"tuning": trials, "tuning_range": []})
    assert "by 0.62 points in the median, and by less than .3 in 1 of 2 choices" in found, (
        "of .25 and 1; one rate is no choice"
    )
