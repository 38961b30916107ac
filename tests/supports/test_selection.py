from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from tptopk.supports import selection
from tptopk.supports.selection import random_ranking, top_k

numbers = st.one_of(
    st.floats(width=32, allow_nan=True), st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf")])
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(values=st.lists(numbers, min_size=1, max_size=40), share=st.floats(0, 1))
def test_top_k_is_a_stable_sort(values, share):
    k = round(share * len(values))
    split = len(values) // 3
    scores = {"a": torch.tensor(values[:split]), "b": torch.tensor(values[split:])}
    chosen = torch.cat([m.flatten() for m in top_k(scores, k).masks.values()]).tolist()
    key = [-float("inf") if np.isnan(v) else v + 0.0 for v in np.float32(values).tolist()]
    expected = sorted(range(len(values)), key=lambda i: (-key[i], i))[:k]
    assert [i for i, active in enumerate(chosen) if active] == sorted(expected)


def test_ties_are_broken_in_flat_order():
    chosen = top_k({"a": torch.zeros(2, 2), "b": torch.zeros(3)}, 5)
    assert chosen["a"].all() and chosen["b"].tolist() == [True, False, False]


@pytest.mark.parametrize("k", [-1, 8])
def test_k_is_between_zero_and_d(k):
    with pytest.raises(ValueError, match="not between"):
        top_k({"a": torch.zeros(7)}, k)


@pytest.mark.slow
def test_selection_scales_past_ten_million_coordinates():
    scores = {"a": torch.rand(3000, 3000), "b": torch.rand(2_000_000)}
    chosen = top_k(scores, 110_000)
    assert chosen.size == 110_000
    threshold = torch.cat([s.flatten() for s in scores.values()]).kthvalue(11_000_000 - 110_000 + 1).values
    assert torch.equal(chosen["b"], scores["b"] >= threshold) or (scores["b"] == threshold).any()


def test_random_supports_are_uniform():
    """Each of 20 coordinates is chosen by 8 in 20 of 5,000 rankings; χ² fails once in a million runs."""
    shapes = {"a": torch.zeros(4, 3), "b": torch.zeros(8)}
    counts, draws = torch.zeros(20), 5000
    for n in range(draws):
        chosen = top_k(random_ranking(shapes, np.random.default_rng(n)), 8)
        counts += torch.cat([m.flatten() for m in chosen.masks.values()])
    expected = draws * 8 / 20
    statistic = float(((counts - expected) ** 2).sum() / (expected * (1 - 8 / 20))) * 19 / 20
    assert statistic < chi2.isf(1e-6, 19)


@pytest.mark.parametrize("spread", [2, 2**20, 2**62])
def test_whole_numbers_of_both_signs_are_selected_piece_by_piece(spread, monkeypatch):
    monkeypatch.setattr(selection, "PIECE", 7)
    values = torch.randint(-spread, spread, (60,), generator=torch.Generator().manual_seed(0))
    order = torch.sort(values, descending=True, stable=True).indices
    for k in range(61):
        chosen = top_k({"a": values[:25].view(5, 5), "b": values[25:]}, k)
        assert set(order[:k].tolist()) == set(chosen.flat_indices.tolist())
