"""Records planted in a real run: coins that nobody wrote down, and a bound that finds training without noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from tptopk import Plan, fit
from tptopk.experiments.planted import NO_CLASS, audit_planted, canary_records, guesses_by_rank, one_step_plan, plant
from tptopk.models.networks import mlp
from tptopk.privacy.refusal import Refusal


def test_records_that_do_not_take_part_contribute_nothing():
    data = torch.rand(20, 3, 32, 32), torch.arange(20) % 10
    (inputs, labels), planted = plant(data, 30)
    assert len(inputs) == len(labels) == 50 and torch.equal(inputs[:20], data[0]) and torch.equal(labels[:20], data[1])
    assert torch.equal(labels[20:] == NO_CLASS, ~planted.included) and 0 < planted.included.sum() < 30
    assert not torch.equal(plant(data, 30)[1].included, plant(data, 30)[1].included), "fresh coins every time"


def test_a_run_that_learns_its_records_by_heart_is_found_out_and_a_private_one_is_not():
    """Almost no noise against ε = 1, 200 planted records; the second verdict fails once in twenty at most, by its bound."""
    torch.manual_seed(0)
    training, planted = plant((torch.rand(20, 3, 32, 32), torch.arange(20) % 10), 200)
    bounds = []
    for noise in (1e-3, 20.0):
        phase = one_step_plan(1.0, 1e-5).phases[0]
        phases = (type(phase)(steps=60, sample_rate=1.0, noise_multiplier=noise, clip_norm=1.0),)
        plan = Plan(phases=phases, delta=1e-5, dataset_size=220, accountant="rdp")
        torch.manual_seed(1)
        model = mlp()
        run = fit(model, training, plan, torch.optim.SGD(model.parameters(), lr=1.0), loss=F.cross_entropy, seed=1)
        bounds.append((audit_planted(run, planted).bounds["one run"], run.epsilon))
    assert bounds[0][0] > 1.0 and bounds[1][0] <= bounds[1][1]


def test_one_step_costs_what_it_is_calibrated_to():
    for epsilon in (1.0, 8.0):
        assert 0.999 * epsilon <= one_step_plan(epsilon, 1e-5).epsilon() <= epsilon


def test_guesses_are_made_at_both_ends():
    assert guesses_by_rank([0.3, 0.9, 0.1, 0.5, 0.7], 4).tolist() == [-1, 1, -1, 0, 1]
    assert guesses_by_rank([3, 1, 2], 3).tolist() == [1, -1, 1]
    with pytest.raises(Refusal, match="at most one each"):
        guesses_by_rank([1, 2], 3)


def test_canaries_look_like_the_data_and_their_coins_are_fair():
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(10, 1, 4, 4) * 2 - 1, torch.arange(10) % 3
    made, targets, included = canary_records(images, labels, 2000, generator)
    assert made.shape == (2000, 1, 4, 4) and made.dtype == images.dtype
    assert images.min() <= made.min() and made.max() <= images.max()
    assert targets.unique().tolist() == [0, 1, 2] and targets.dtype == labels.dtype
    assert abs(included.float().mean() - 0.5) < 5 * 0.5 / math.sqrt(2000)
    tokens, _, _ = canary_records(torch.randint(0, 50, (10, 6)), labels, 20, generator)
    assert tokens.shape == (20, 6) and tokens.dtype == torch.long and int(tokens.max()) < 50
