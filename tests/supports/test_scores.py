from __future__ import annotations

import pytest
import torch

from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.refusal import Refusal
from tptopk.supports.scores import CoordinateScores, factored, score_named
from tptopk.supports.support import Support


def gradient(values, noise_std=0.5, step=0):
    return PrivateGradient({"w": values}, noise_std, 0, step)


def test_the_score_is_the_papers():
    """a_p = (1/T₁) Σ g̃² − ν²"""
    everything = Support({"w": torch.ones(2, 2, dtype=torch.bool)})
    steps = [torch.randn(2, 2) for _ in range(5)]
    scores = CoordinateScores()
    for g in steps:
        scores.add(gradient(g), everything)
    torch.testing.assert_close(scores.values()["w"], torch.stack(steps).square().mean(0) - 0.25)


def test_the_score_is_unbiased():
    """Over 200,000 noisy copies of G the mean score is G² to 5 standard errors (false alarm below 1e-6 a coordinate)."""
    g, noise_std, copies = torch.tensor([0.0, 0.3, 1.0]), 0.5, 200_000
    noisy = g + noise_std * torch.randn(copies, 3, generator=torch.Generator().manual_seed(0))
    scores = CoordinateScores()
    scores.add(gradient(noisy, noise_std), Support({"w": torch.ones(copies, 3, dtype=torch.bool)}))
    error = (2 * noise_std**4 + 4 * noise_std**2 * g**2).div(copies).sqrt()  # the paper's variance
    assert ((scores.values()["w"].mean(0) - g**2).abs() < 5 * error).all()


def test_only_steps_in_which_a_coordinate_was_active_count():
    scores = CoordinateScores()
    first, second = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    scores.add(gradient(torch.tensor([1.0, 2.0, 0.0]), 0.0), Support({"w": first}))
    scores.add(gradient(torch.tensor([3.0, 0.0, 0.0]), 0.0, 1), Support({"w": second}))
    assert scores.values()["w"].tolist() == [5.0, 4.0, 0.0]
    assert scores.seen()["w"].tolist() == [True, True, False]


@pytest.mark.parametrize("raw", [torch.ones(3), {"w": torch.ones(3)}, None])
def test_only_private_gradients_are_scored(raw):
    with pytest.raises(TypeError, match="PrivateGradient"):
        CoordinateScores().add(raw, Support({"w": torch.ones(3, dtype=torch.bool)}))


def test_the_factored_score_recovers_rows_times_columns():
    rows, columns = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, 1.0])
    score = torch.outer(rows, columns)
    ranked = factored({"w": score, "b": torch.tensor([1.0, -2.0])})
    torch.testing.assert_close(ranked["w"], score)
    assert ranked["b"].tolist() == [1.0, -2.0]
    conv = factored({"w": score.view(3, 2, 1, 1)})["w"]
    assert conv.shape == (3, 2, 1, 1)


def test_the_factored_score_is_finite_on_noise():
    for seed in range(20):
        score = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
        assert torch.isfinite(factored({"w": score - score.mean() - 0.1})["w"]).all()


def test_unknown_scores_come_with_the_nearest():
    with pytest.raises(Refusal, match="did you mean 'factored'"):
        score_named("factord")
