"""Records planted in a real run: coins that nobody wrote down, and a bound that finds training without noise."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tptopk import Plan, fit
from tptopk.experiments.planted import NO_CLASS, audit_planted, canary_records, guesses_by_rank, one_step_plan, plant
from tptopk.models.networks import mlp
from tptopk.privacy.refusal import Refusal
from tptopk.training.distributed import Team


def test_records_that_do_not_take_part_contribute_nothing():
    data = torch.rand(20, 3, 32, 32), torch.arange(20) % 10
    (inputs, labels), planted = plant(data, 30, mlp())
    assert len(inputs) == len(labels) == 50 and torch.equal(inputs[:20], data[0]) and torch.equal(labels[:20], data[1])
    assert torch.equal(labels[20:] == NO_CLASS, ~planted.included) and 0 < planted.included.sum() < 30
    assert not torch.equal(plant(data, 30, mlp())[1].included, plant(data, 30, mlp())[1].included), (
        "fresh coins every time"
    )


def test_a_run_that_learns_its_records_by_heart_is_found_out_and_a_private_one_is_not():
    """Almost no noise against ε = 1, 200 planted records; the second verdict fails once in twenty at most, by its bound."""
    torch.manual_seed(0)
    training, planted = plant((torch.rand(20, 3, 32, 32), torch.arange(20) % 10), 200, mlp())
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


def test_nothing_of_the_records_but_their_shape_and_type_is_in_a_canary():
    """A range or a class read off the records would let one of them shape every canary."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    def canaries(images, labels):
        return canary_records(images, labels, model, 2000, torch.Generator().manual_seed(0))

    images, labels = torch.rand(10, 1, 4, 4) * 2 - 1, torch.arange(10) % 2
    found = canaries(images, labels)
    for value in (1e30, torch.nan, -torch.inf):
        other, strange = images.clone(), labels.clone()
        other[3, 0, 2, 2], strange[3] = value, 9
        assert all(torch.equal(a, b) for a, b in zip(found, canaries(other, strange), strict=True))
    made, targets, included = found
    assert made.shape == (2000, 1, 4, 4) and made.dtype == images.dtype and made.min() >= 0 and made.max() < 1
    assert targets.unique().tolist() == [0, 1, 2], "all that the model tells apart"
    assert abs(included.float().mean() - 0.5) < 5 * 0.5 / math.sqrt(2000)


def test_canaries_of_whole_numbers_are_ids_that_the_model_has():
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(24, 3)).eval()
    tokens = torch.full((10, 6), 7)
    made, _, _ = canary_records(tokens, torch.arange(10) % 3, model, 200, torch.Generator().manual_seed(0))
    assert made.shape == (200, 6) and made.dtype == torch.long and made.min() == 0 and made.max() == 49
    assert not model.training
    with pytest.raises(Refusal, match="failed on a made-up canary"):
        canary_records(torch.rand(10, 7), torch.arange(10), model, 20, torch.Generator())


def test_a_run_with_canaries_says_so_and_is_of_one_process(tmp_path, monkeypatch, tptopk):
    words = ["train", "--epsilon", "3", "--epochs", "1", "--audit-canaries", "50", "--out"]
    tptopk(*words, "run", cwd=tmp_path)
    statement = (tmp_path / "run" / "statement.md").read_text()
    assert "- Data: digits, with 50 made-up records planted; declared size: 1,487 records" in statement
    assert json.loads((tmp_path / "run" / "audit.json").read_text())["observations"] == 50
    monkeypatch.setattr(Team, "__init__", lambda self: vars(self).update(size=2, rank=0))
    monkeypatch.setattr(Team, "together", lambda self: nullcontext())
    done = tptopk(*words, "other", cwd=tmp_path, check=False)
    assert done.returncode == 2 and "plants records in one process" in done.stderr
    assert not (tmp_path / "other").exists()
