"""Means, differences and intervals, beside scipy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tptopk.experiments import published
from tptopk.report import paper_tables as tables
from tptopk.report.outcomes import Difference, Spread, averaged, paired, spread, unpaired


@pytest.mark.parametrize("count", [2, 3, 5])
def test_intervals_are_those_of_scipys_paired_t_test(count):
    generator = np.random.default_rng(count)
    one, two = generator.random(count), generator.random(count)
    ours = paired(dict(enumerate(one)), dict(enumerate(two)))
    theirs = stats.ttest_rel(one, two).confidence_interval(0.95)
    assert ours is not None and ours.interval == pytest.approx((theirs.low, theirs.high))
    assert ours.mean == pytest.approx((one - two).mean()) and ours.seeds == count
    found = spread(dict(enumerate(one)))
    assert found is not None and (found.mean, found.std) == pytest.approx((one.mean(), one.std(ddof=1)))


def test_intervals_beside_published_numbers_are_those_of_scipys_welch_test():
    generator = np.random.default_rng(0)
    one, two = generator.random(3), 1 + 2 * generator.random(3)
    ours = unpaired(Spread(one.mean(), one.std(ddof=1), 3), Spread(two.mean(), two.std(ddof=1), 3))
    theirs = stats.ttest_ind(one, two, equal_var=False).confidence_interval(0.95)
    assert ours.interval == pytest.approx((theirs.low, theirs.high))
    assert ours.mean == pytest.approx(one.mean() - two.mean())
    assert unpaired(Spread(1.0, None, 1), Spread(0.5, 0.1, 3)) == Difference(0.5, None, 1)


def test_the_papers_differences_have_the_freedom_of_both_its_sides():
    """Three means of three runs each, as they would be tested with the runs at hand."""
    one, two = published.Value(71.05, 0.37), published.Value(69.67, 0.41)
    paper = tables.of_paper(one, two)
    assert (paper.mean, paper.std) == pytest.approx((1.38, math.hypot(0.37, 0.41)))
    assert paper.degrees == pytest.approx((0.37**2 + 0.41**2) ** 2 / ((0.37**4 + 0.41**4) / 2))
    theirs = stats.ttest_ind_from_stats(71.05, 0.37, 3, 69.67, 0.41, 3, equal_var=False)
    variance, degrees = paper.uncertainty
    assert 2 * stats.t.sf(1.38 / math.sqrt(variance), degrees) == pytest.approx(theirs.pvalue)


def test_the_papers_deviations_count_where_they_are_known():
    ours = paired({0: 0.3, 1: 0.2, 2: 0.4}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert ours is not None and ours.verdict == "higher"
    for paper, agrees in (
        (Spread(0.9, None, 1), "yes in direction; the paper's size is ruled out"),
        (Spread(0.9, 0.01, 3), "yes in direction; the paper's size is ruled out"),
        (Spread(0.9, 0.6, 3), "yes"),
        (Spread(-0.9, 0.6, 3), "no: the opposite"),
    ):
        assert ours.agrees(paper) == agrees


def test_differences_are_taken_on_shared_seeds_alone():
    ours = paired({0: 5.0, 1: 7.0, 2: 100.0}, {1: 6.0, 0: 4.0, 9: 0.0})
    assert ours == Difference(1.0, (1.0, 1.0), 2, 0.0)
    assert paired({0: 1.0}, {1: 1.0}) is None
    one = paired({0: 1.0}, {0: 0.5})
    assert (
        one is not None
        and one.interval is None
        and one.verdict == "one seed: no interval" == one.agrees(Spread(0.5, None, 1))
    )


def test_an_average_over_cells_is_taken_seed_by_seed():
    """Two cells whose differences vary by seed in opposite ways: their averages do not vary at all."""
    one, other = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 3.0, 1: 2.0, 2: 1.0}
    nothing = dict.fromkeys(range(3), 0.0)
    assert averaged([(one, nothing), (other, nothing)]) == Difference(2.0, (2.0, 2.0), 3, 0.0)
    assert averaged([(one, nothing), (one, nothing)]) == paired(one, nothing), "cells of one seed count as one"
    assert averaged([(one, nothing), ({0: 3.0, 9: 0.0}, nothing)]) == Difference(2.0, None, 1), "seeds that all have"
    assert averaged([]) is None


@pytest.mark.parametrize(
    "interval, paper, verdict, reproduced",
    [
        ((0.1, 0.5), 0.2, "higher", "yes"),
        ((0.1, 0.5), 0.9, "higher", "yes in direction; the paper's size is ruled out"),
        ((0.1, 0.5), -0.2, "higher", "no: the opposite"),
        ((-0.5, -0.1), 0.2, "lower", "no: the opposite"),
        ((-0.5, -0.1), -0.2, "lower", "yes"),
        ((-0.1, 0.5), 0.2, "no difference seen", "undecided: neither 0 nor the paper's is ruled out"),
        ((-0.1, 0.5), 0.9, "no difference seen", "no: the paper's is ruled out"),
        ((0.0, 0.5), 0.9, "no difference seen", "no: the paper's is ruled out"),
    ],
)
def test_a_verdict_goes_by_whether_the_interval_excludes_zero(interval, paper, verdict, reproduced):
    found = Difference(sum(interval) / 2, interval, 3)
    assert (found.verdict, found.agrees(Spread(paper, None, 1))) == (verdict, reproduced)
