"""The recipes of the paper's tables: within a cell nothing differs but the method and what was tuned for it."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from tests.data.made import make_mnist
from tptopk.experiments import published, recipes, reproduce
from tptopk.privacy import accounting
from tptopk.privacy.refusal import Refusal
from tptopk.training.standardize import Standardize

SIZES = {"main": 189, "further": 27, "ratio": 168, "split": 27, "medical": 21, "context": 81, "diagnostics": 9}


def toml() -> str:
    """Something tuned for every cell; learning rates and epochs differ between methods, as they may."""
    cells = {
        (r.dataset, r.target_epsilon, r.method) for make in recipes.TABLES.values() for r in make(recipes.quick_recipe)
    }
    lines = []
    for dataset, epsilon, method in sorted(cells):
        lines += [f'[{dataset}."{epsilon:g}".{method}]', "batch_size = 512", f"epochs = {10 + len(method)}"]
        lines += ["learning_rate = 2.0", "second_learning_rate = 4.0", "ema = 0.9", "held_out = 91.5"]
        lines += [
            f'[{dataset}."{epsilon:g}".{method}.further]',
            "batch_size = 512",
            "epochs = 33",
            "learning_rate = 1.0",
            "held_out = 92",
        ]
    return "\n".join(lines)


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """A made-up tuned.toml, or whatever text a test puts there."""
    path = tmp_path / "tuned.toml"
    path.write_text(toml())
    monkeypatch.setattr(recipes, "TUNED", path)
    recipes.tuned.cache_clear()
    yield path
    recipes.tuned.cache_clear()


def test_every_method_of_a_cell_shares_network_views_batch_and_delta(tuned):
    for name, size in SIZES.items():
        table = recipes.table_named(name)
        assert len(table) == size == len({str(r.identity()) for r in table})
        shared = defaultdict(set)
        for r in table:
            shared[r.dataset, r.target_epsilon].add(
                (r.network, r.views, r.batch_size, r.delta, r.momentum, r.clip_norm, r.query_noise, r.records)
            )
        assert all(len(numbers) == 1 for numbers in shared.values())
        assert {r.seed for r in table} == set(recipes.SEEDS)


def test_what_was_really_tuned_was_tuned_for_all_methods_of_a_cell_with_one_batch_size():
    for dataset, by_epsilon in tomllib.loads(recipes.TUNED.read_text()).items():
        medical = dataset == "pneumoniamnist"
        for epsilon, by_method in by_epsilon.items():
            expected = {"dp-sgd", "tp-rand", "tp-topk"} if medical else set(recipes.METHODS)
            assert set(by_method) == expected | ({"non-private"} if medical and epsilon == "8" else set())
            assert len({chosen["batch_size"] for chosen in by_method.values()}) == 1


def test_the_main_table_has_the_papers_cells_and_its_setting(tuned):
    ours = {(r.dataset, r.target_epsilon, r.method) for r in recipes.table_named("main") if r.variant == recipes.PAPER}
    assert ours == set(published.MAIN)
    for r in recipes.table_named("main"):
        assert (r.active_ratio, r.warmup, r.warmup_budget, r.held_out) == (0.4, 0.3, 0.3, 0)
        assert (r.variant == recipes.TWIN) <= (r.method == "tp-rand")
        assert r.score == ("factored" if r.variant == "factored score" else "paper")


def test_what_is_tuned_further_is_what_was_chosen_then_and_nothing_of_what_was_chosen_before(tuned):
    table = recipes.table_named("further")
    assert {(r.dataset, r.target_epsilon) for r in table} == set(recipes.FURTHER_CELLS)
    assert {r.method for r in table} == {"dp-sgd", "tp-rand", "tp-topk"}
    assert {(r.epochs, r.learning_rate, r.second_learning_rate, r.ema) for r in table} == {(33, 1.0, None, None)}
    assert not any(r.epochs == 33 for name in SIZES if name != "further" for r in recipes.table_named(name))
    pairs = defaultdict(set)
    for r in table:
        if r.method != "dp-sgd":
            pairs[r.dataset, r.target_epsilon, r.seed].add(replace(r, method=""))
    assert all(len(found) == 1 for found in pairs.values()), "TP-Rand is run as TP-TopK"
    tuned.write_text(tuned.read_text().replace('[mnist."1".dp-sgd.further]', "[elsewhere]"))
    recipes.tuned.cache_clear()
    with pytest.raises(Refusal, match="nothing for dp-sgd on mnist at ε = 1 tuned further"):
        recipes.table_named("further")
    assert len(recipes.table_named("main")) == SIZES["main"]


def test_two_phase_methods_differ_in_nothing_but_the_ranking():
    for name in ("main", "ratio"):
        pairs = defaultdict(list)
        for r in recipes.TABLES[name](recipes.quick_recipe):
            if r.method in ("tp-rand", "tp-topk"):
                pairs[r.dataset, r.target_epsilon, r.variant, r.seed].append(replace(r, method=""))
        assert all(len(set(found)) == 1 for found in pairs.values())


def test_a_random_support_is_compared_on_equal_steps_noise_and_learning_rates(tuned):
    """Whatever was tuned for each: in `main` TP-Rand has a row with TP-TopK's recipe, in `ratio` at most its averaging is its own."""
    text = tuned.read_text()
    fewer = text.replace(
        '[fmnist."1".tp-rand]',
        '[fmnist."1".tp-rand]\nepochs = 40\nema = 0.97\nbatch_size = 512\nlearning_rate = 2.0\n[elsewhere]',
    )
    slower = fewer.replace('[cifar10."8".tp-rand]', '[cifar10."8".tp-rand]\nepochs = 17\nema = 0.97\nbatch_size = 512\nlearning_rate = 2.0\nsecond_learning_rate = 4.0\n[nowhere]')  # fmt: skip
    tuned.write_text(slower)
    recipes.tuned.cache_clear()

    def pairs(name, variants):
        found = defaultdict(dict)
        for r in recipes.table_named(name):
            if r.method in ("tp-topk", "tp-rand") and r.variant in variants:
                place = (r.dataset, r.target_epsilon, r.active_ratio, r.seed)
                found[place][r.method] = replace(r, method="", variant="")
        return {place: (pair["tp-topk"], pair["tp-rand"]) for place, pair in found.items() if len(pair) == 2}

    own = pairs("main", {recipes.PAPER})
    assert own["fmnist", 1.0, 0.4, 0][0].epochs != own["fmnist", 1.0, 0.4, 0][1].epochs == 40
    main = {r.identity()["seed"]: r for r in recipes.table_named("main") if r.variant == recipes.TWIN}
    assert len(main) == 3
    twins = {(r.dataset, r.target_epsilon, r.seed): r for r in recipes.table_named("main") if r.variant == recipes.TWIN}
    assert len(twins) == 27
    for r in recipes.table_named("main"):
        if r.method == "tp-topk" and r.variant == recipes.PAPER:
            assert replace(twins[r.dataset, r.target_epsilon, r.seed], method="tp-topk", variant=recipes.PAPER) == r
    matched = pairs("ratio", {f"ρ = {ratio:g}" for ratio in recipes.RATIOS})
    assert len(matched) == 72 and all(replace(one, ema=two.ema) == two for one, two in matched.values())
    assert matched["fmnist", 1.0, 0.2, 0][1].ema == 0.9 and matched["cifar10", 8.0, 0.2, 0][1].ema == 0.97


def test_budgets_are_matched():
    for method in recipes.METHODS:
        r = recipes.quick_recipe("mnist", method, 3.0, 0)
        plan = reproduce.planned(r, 20, Standardize(torch.ones(81)).queries(r.query_noise))
        assert 0.999 * 3.0 <= plan.epsilon() <= 3.0 and plan.method == method and len(plan.queries) == 2


def test_without_a_tuned_file_the_refusal_says_how_to_make_it_and_quick_needs_none(tuned):
    tuned.unlink()
    with pytest.raises(Refusal, match="tune_paper.py --choose"):
        recipes.table_named("main")
    assert {name: len(recipes.table_named(name, quick=True)) for name in SIZES} == {n: s // 3 for n, s in SIZES.items()}


def test_a_cell_that_was_not_tuned_is_named(tuned):
    tuned.write_text("[mnist]\n")
    with pytest.raises(Refusal, match="nothing for dp-sgd on mnist at ε = 1"):
        recipes.table_named("main")


def test_datasets_that_are_not_asked_for_need_not_be_tuned(tuned):
    text = tuned.read_text()
    assert len(recipes.table_named("main", only="mnist,fmnist")) == 126
    tuned.write_text(text.replace("[cifar10.", "[elsewhere."))
    recipes.tuned.cache_clear()
    assert {r.dataset for r in recipes.table_named("main", only="mnist,fmnist")} == {"mnist", "fmnist"}
    with pytest.raises(Refusal, match="on cifar10 at ε = 1"):
        recipes.table_named("main", only="mnist,cifar10")
    with pytest.raises(Refusal, match="did you mean 'cifar10'"):
        recipes.table_named("main", only="cifar")


def test_an_unknown_table_is_refused_with_the_nearest():
    with pytest.raises(Refusal, match="did you mean 'ratio'"):
        recipes.table_named("ration")


def test_a_ratio_that_leaves_no_coordinate_is_refused(tmp_path):
    make_mnist(tmp_path)
    r = replace(recipes.quick_recipe("mnist", "tp-topk", 3.0, 0), active_ratio=1e-6)
    with pytest.raises(Refusal, match="leaves k = 0 of d ="):
        reproduce.run_one(r, str(tmp_path), "cpu")


def test_an_unknown_network_is_refused(tmp_path):
    make_mnist(tmp_path)
    r = replace(recipes.quick_recipe("mnist", "dp-sgd", 3.0, 0), network="scatter-cmn")
    with pytest.raises(Refusal, match="did you mean 'scatter-cnn'"):
        reproduce.run_one(r, str(tmp_path), "cpu")


@pytest.mark.parametrize("epsilon", recipes.EPSILONS)
def test_what_annealing_asks_leaves_the_budget_room_to_train(epsilon):
    """At ε = 1 the default noise of its questions alone costs more than the whole budget."""
    recipe = next(r for r in recipes.table_context() if r.annealed and r.target_epsilon == epsilon)
    plan = reproduce.planned(recipe, 60_000, ())
    assert 0.99 * epsilon <= plan.epsilon() <= epsilon
    asked = accounting.epsilon([query.segment for query in plan.queries], plan.delta)
    assert 0.19 * epsilon <= asked <= 0.2 * epsilon
