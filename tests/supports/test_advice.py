"""Advice from simulated warm-ups, where the truth is known: no bias, honest intervals, and the courage not to know."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import pytest
import torch

from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.refusal import Refusal
from tptopk.supports.advice import RATIOS, advise
from tptopk.supports.energy import Grown, Interval, Variance, share_kept_by_all
from tptopk.supports.scores import SCORES
from tptopk.supports.selection import top_k
from tptopk.supports.warmup import PARTS, WarmUp

SHAPE, NOISE = (20, 30), 0.01


def plan(warmup=24, steps=60, clip_norms=(1.0, 1.0)):
    """ν = 0.01 in both phases, B = 100 of N = 1000."""
    phases = [
        Phase(steps=n, sample_rate=0.1, noise_multiplier=100 * NOISE / c, clip_norm=c)
        for n, c in zip((warmup, steps), clip_norms, strict=True)
    ]
    return Plan(phases=tuple(phases), delta=1e-5, dataset_size=1000, method="tp-topk", active_ratio=0.4)


def warmup_of(signal, generator, *, by=None, sampling=None, bends=False):
    """Private gradients of a fixed signal; every step's sample adds a standard normal multiple of `sampling`.

    `bends`: the records' own gradients reach all coordinates alike, so that samples add (1 − q)C²/B in all directions.
    """
    warmup = WarmUp(by or plan())
    for step in range(warmup.plan.phases[0].steps):
        value = signal + NOISE * torch.randn(signal.shape, generator=generator)
        if sampling is not None:
            value = value + sampling * float(torch.randn((), generator=generator))
        if bends:
            value = value + math.sqrt(0.009 / signal.numel()) * torch.randn(signal.shape, generator=generator)
        warmup.add(PrivateGradient({"w": value}, NOISE, 0, step))
    return warmup


def concentrated(active, value):
    signal = torch.zeros(SHAPE)
    signal.view(-1)[torch.randperm(signal.numel(), generator=torch.Generator().manual_seed(3))[:active]] = value
    return signal


def chosen_energies(warmup, signal, k, score):
    """The true signal on the six supports that the estimate looks at."""
    found = []
    for pair in combinations(range(PARTS), 2):
        scores = warmup.scores(part for part in range(PARTS) if part not in pair)
        found.append(float(top_k(SCORES[score](scores), k).keep("w", signal.square()).sum()))
    return sum(found) / len(found)


def test_energies_have_no_bias_though_the_support_was_chosen_by_its_scores():
    """Over 300 warm-ups the error is 0 to 4.5 standard errors, for 2 scores × 3 sizes (false alarm about 4e-5)."""
    generator = torch.Generator().manual_seed(0)
    signal, ratios = concentrated(60, 0.005), (0.4, 0.1, 0.02)
    errors, naive = [], []
    for _ in range(300):
        warmup = warmup_of(signal, generator)
        found = advise(warmup, ratios=ratios)
        errors.append([c.energy - chosen_energies(warmup, signal, c.active, c.score) for c in found.candidates])
        scores = warmup.scores()
        kept = top_k(scores, 60)
        naive.append(float(kept.keep("w", scores["w"]).sum() - kept.keep("w", signal.square()).sum()))
    errors, naive = torch.tensor(errors), torch.tensor(naive)
    assert ((errors.mean(0) / (errors.std(0) / math.sqrt(300))).abs() < 4.5).all()
    assert naive.mean() / (naive.std() / math.sqrt(300)) > 50, "the same steps for both give a large bias"


@pytest.mark.parametrize("sampling", [None, "along", "inside", "spread"])
def test_intervals_hold_the_truth_at_the_rate_they_state(sampling):
    """100 warm-ups at 95%: fewer than 85 hits has a chance below 1e-4 at the stated rate, and bounds may only widen it."""
    generator = torch.Generator().manual_seed(1)
    signal = concentrated(60, 0.012)
    most = math.sqrt(0.9 / 100)  # of the sampling noise's norm, by C = 1
    directions = {
        None: None,
        "along": 0.5 * most * signal / signal.norm(),
        "inside": 0.5 * most * concentrated(10, math.sqrt(0.1)),
        "spread": 0.5 * most * torch.full(SHAPE, math.sqrt(1 / 600)),
    }
    hits = Counter()
    for _ in range(100):
        warmup = warmup_of(signal, generator, sampling=directions[sampling])
        found = advise(warmup, ratios=(0.4, 0.1))
        whole = float(signal.square().sum())
        hits["signal"] += found.signal.low <= whole <= found.signal.high
        for c in found.candidates:
            share = chosen_energies(warmup, signal, c.active, c.score) / whole
            hits[c.score, c.active] += c.kept.low - 5e-4 <= share <= c.kept.high + 5e-4
    assert all(count >= 85 for count in hits.values()), hits
    assert len(hits) == 5


@pytest.mark.parametrize(
    "active, value, floor", [(60, 0.012, 0.0), (30, 0.01, 0.0), (120, 0.008, 0.002), (60, 0.006, 0.004)]
)
def test_the_ranking_that_training_uses_keeps_what_the_range_says(active, value, floor):
    """It is by the whole warm-up, and keeps more than the rankings by half that can be judged; 40 warm-ups at 95%."""
    generator, kept = torch.Generator().manual_seed(2), Counter()
    signal = concentrated(active, value).clamp(min=floor)
    whole = float(signal.square().sum())
    for _ in range(40):
        warmup = warmup_of(signal, generator)
        for c in advise(warmup, ratios=(0.4, 0.1)).candidates:
            support = top_k(SCORES[c.score](warmup.scores()), c.active)
            share = float(support.keep("w", signal.square()).sum()) / whole
            kept[c.score, c.active] += c.kept.low - 5e-4 <= share <= c.kept.high + 5e-4
    assert all(kept[cell] >= 33 for cell in kept) and len(kept) == 4, (
        kept
    )  # below that by chance less than once in 1,000 runs


def test_the_upper_end_is_raised_by_twice_the_growth_and_its_error():
    kept, certain, rough = Interval(0.5, 0.4, 0.6), Variance(0.0, 0.0, 0.0), Variance(0.01, 0.0, 0.0)
    grown = Grown(0.05 * 3.0, 25.0)
    assert share_kept_by_all(kept, grown, 3.0, 10, 100, certain, 2.0) == (0.5, 0.4, pytest.approx(0.7))
    more = share_kept_by_all(kept, grown, 3.0, 10, 100, rough, 0.3)  # a deviation of √(.01 · 25) = .5
    assert more.high == pytest.approx(0.6 + 2 * (0.15 + 0.3 * 0.5) / 3.0)
    assert share_kept_by_all(kept, grown, 3.0, 10, 100, rough, 20.0).high == 1
    assert share_kept_by_all(kept, Grown(-0.1, 25.0), 3.0, 10, 100, certain, 2.0) == kept
    assert share_kept_by_all(kept, grown, 3.0, 100, 100, rough, 2.0) == kept


def test_noise_alone_is_never_a_reason_to_restrict():
    """200 warm-ups without signal. A wrong "restrict" needs signal at 97.5% and a share far above its own interval."""
    generator = torch.Generator().manual_seed(2)
    verdicts, shares = Counter(), []
    for _ in range(200):
        found = advise(warmup_of(torch.zeros(SHAPE), generator))
        verdicts[found.verdict] += 1
        shares.append([c.energy for c in found.candidates if c.active_ratio == 0.2] + [found.signal.estimate])
    assert verdicts["restrict"] == 0 and verdicts["cannot tell"] >= 180
    shares = torch.tensor(shares)
    assert ((shares.mean(0) / (shares.std(0) / math.sqrt(200))).abs() < 4.5).all(), (
        "energies of noise are zero on average"
    )


def test_concentrated_signal_under_heavy_noise_is_a_reason_to_restrict():
    found = advise(warmup_of(concentrated(12, 0.03), torch.Generator().manual_seed(4), by=plan(steps=10), bends=True))
    assert found.verdict == "restrict" and found.score == "paper" and 0.02 <= found.active_ratio <= 0.1
    low, high = found.learning_rate
    assert 1 < low < high < 1 / found.active_ratio
    assert found.misranking["paper"].high < 0.2 and "progress is at least" in found.reasons[1]


def test_coordinates_without_signal_in_which_the_loss_may_be_flat_are_no_reason_to_restrict():
    """The same signal, but nothing of the records' gradients elsewhere: noise there may cost nothing."""
    found = advise(warmup_of(concentrated(12, 0.03), torch.Generator().manual_seed(4), by=plan(steps=10)))
    assert found.verdict == "cannot tell" and any("flat" in reason for reason in found.reasons)
    assert max(c.kept.low for c in found.candidates if c.active < 60) > 0.8


def test_the_share_of_records_gradients_outside_is_not_overstated():
    """60 warm-ups: the lower bound exceeds the truth, 1 − ρ or 0, in none (each at 99.8%, all at 95%)."""
    generator = torch.Generator().manual_seed(10)
    signal = concentrated(12, 0.03)
    seen = []
    for _ in range(60):
        for bends in (False, True):
            found = advise(warmup_of(signal, generator, bends=bends), ratios=(0.2,))
            assert all(c.outside <= (1 - c.active_ratio if bends else 0.05) for c in found.candidates)
        seen.append(found.candidates[0].outside)
    assert min(seen) > 0.3, "and it is seen"


def test_the_estimate_counts_noise_where_the_scores_see_the_loss_bend():
    """40 warm-ups, signal on 12 of 600. Records disagree everywhere alike, or where the signal lies, or not at all."""
    generator = torch.Generator().manual_seed(11)
    signal = concentrated(12, 0.03)
    inside = 0.9 * math.sqrt(0.009) * signal / signal.norm()
    shares, gains = Counter(), Counter()
    for _ in range(40):
        for name, options in {"even": {"bends": True}, "inside": {"sampling": inside}}.items():
            tenth = advise(warmup_of(signal, generator, by=plan(steps=10), **options), ratios=(0.1,)).candidates[0]
            shares[name] += tenth.harm_left / 40
            gains[name] += tenth.gain.estimate / 40
    assert shares["even"] == pytest.approx(0.1, abs=0.04) and gains["even"] > 1.5
    assert shares["inside"] > 0.9 and 0.85 < gains["inside"] < 1.05, "flat outside: nothing to gain"


def test_where_the_scores_hold_nothing_but_the_signal_no_noise_counts_as_saved():
    warmup = warmup_of(concentrated(60, 0.012), torch.Generator().manual_seed(12))
    for squares in warmup._squares:
        squares["w"] *= 0
    assert {c.harm_left for c in advise(warmup).candidates} == {1.0}


def test_even_signal_is_a_reason_to_stay_dense():
    found = advise(warmup_of(torch.full(SHAPE, 0.012), torch.Generator().manual_seed(5)))
    assert found.verdict == "stay dense" and found.active_ratio is None and found.learning_rate is None
    assert all(abs(c.kept.estimate - c.active_ratio) < 0.1 for c in found.candidates), "no ranking beats a random one"
    assert found.misranking["paper"].low < 0.5 < found.misranking["paper"].high


def test_little_noise_is_a_reason_to_stay_dense_though_the_signal_is_concentrated():
    """Four fifths of the signal on a fifth of the coordinates; dense noise, averaged over the steps, is a thousandth of it."""
    signal = torch.full(SHAPE, 0.05)
    signal.view(-1)[:120] = 0.2
    found = advise(warmup_of(signal, torch.Generator().manual_seed(6), by=plan(steps=2000)))
    fifth = next(c for c in found.candidates if c.active_ratio == 0.2 and c.score == "paper")
    assert fifth.kept.estimate == pytest.approx(0.8, abs=0.02)
    assert found.verdict == "stay dense"
    assert 4.8 < found.signal.estimate < 6.2


def test_a_short_noisy_warm_up_cannot_tell():
    signal = torch.full(SHAPE, 0.004)
    signal.view(-1)[:60] = 0.012
    found = advise(warmup_of(signal, torch.Generator().manual_seed(7)))
    assert found.verdict == "cannot tell" and len(found.reasons) >= 2


def test_the_energy_that_sampling_adds_is_in_the_scores_and_not_in_the_estimate():
    """Each step's sample adds up to (1 − q)C²/B = 0.009, as much as the signal; the score's sum holds it, E does not."""
    generator = torch.Generator().manual_seed(8)
    signal = torch.full(SHAPE, 0.004)
    found, raw = [], []
    for _ in range(60):
        warmup = warmup_of(signal, generator, bends=True)
        found.append(advise(warmup))
        raw.append(float(warmup.scores()["w"].sum()))
    energies = torch.tensor([a.signal.estimate for a in found])
    assert abs(energies.mean() - 0.0096) < 4.5 * energies.std() / math.sqrt(60)
    assert torch.tensor(raw).mean() > 0.0096 + 0.008
    assert found[0].sampling_energy == pytest.approx(0.009)
    low, high = zip(*(a.step_energy for a in found), strict=True)
    assert max(low) < 0.0186 and sum(bottom <= 0.0096 + 1e-3 for bottom in low) > 50 and min(high) > 0.0096


def test_another_clip_norm_afterwards_makes_a_gain_less_sure():
    """With 3C the signal may be nine times as large, or no larger; the noise is the same in this plan."""
    warmup = warmup_of(concentrated(12, 0.03), torch.Generator().manual_seed(9), bends=True)
    same, other = advise(warmup), advise(warmup, plan=plan(clip_norms=(1.0, 3.0)))
    pairs = [(a, b) for a, b in zip(same.candidates, other.candidates, strict=True) if a.gain.low > 1]
    assert pairs and all(b.gain.low < a.gain.low and a.kept == b.kept for a, b in pairs)


def test_advice_reads_the_plan_and_changes_nothing_in_it():
    """σ₂, q₂ and T₂ stay as they are; what advice holds of a plan is ρ, a score and a factor on the learning rate."""
    warmup = warmup_of(concentrated(12, 0.03), torch.Generator().manual_seed(4), by=plan(steps=10), bends=True)
    before = warmup.plan.to_json()
    values = advise(warmup).as_values()
    assert warmup.plan.to_json() == before
    assert not {"noise_multiplier", "sample_rate", "sigma", "phases", "plan"} & set(values)


def test_ratios_are_checked_and_no_coordinates_at_all_is_refused():
    warmup = warmup_of(torch.zeros(SHAPE), torch.Generator().manual_seed(0))
    with pytest.raises(Refusal, match="k = 0 of d = 600"):
        advise(warmup, ratios=(0.001,))
    for ratio in (0.0, 1.5, float("nan")):
        with pytest.raises(Refusal, match="ratio"):
            advise(warmup, ratios=(ratio,))
    assert [c.active for c in advise(warmup).candidates][: len(RATIOS)] == [600, 480, 360, 240, 120, 60, 30, 12, 6]


def test_a_warm_up_that_is_short_or_unfinished_is_refused():
    with pytest.raises(Refusal, match="at least 8"):
        advise(warmup_of(torch.zeros(SHAPE), torch.Generator(), by=plan(warmup=6)))
    unfinished = WarmUp(plan())
    unfinished.add(PrivateGradient({"w": torch.zeros(SHAPE)}, NOISE, 0, 0))
    with pytest.raises(Refusal, match="1 of 24 steps"):
        advise(unfinished)
    one = Plan(phases=plan().phases[:1], delta=1e-5, dataset_size=1000)
    with pytest.raises(Refusal, match="one phase alone"):
        advise(warmup_of(torch.zeros(SHAPE), torch.Generator(), by=one))
