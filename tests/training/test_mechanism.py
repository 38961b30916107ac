"""Promises 2 and 3: sum, noise on the support alone, divide by a public constant."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.nn import functional as F

import tptopk
from tptopk.gradients.clipping import clipped_sum
from tptopk.gradients.traces import ModelChanged
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.randomness import Streams
from tptopk.supports.selection import top_k
from tptopk.supports.support import Support, trainable
from tptopk.training.mechanism import Mechanism

PLAN = Plan(
    phases=(
        Phase(steps=50, sample_rate=0.1, noise_multiplier=1.3, clip_norm=0.7),
        Phase(steps=50, sample_rate=0.2, noise_multiplier=0.9, clip_norm=0.4),
    ),
    delta=1e-5,
    dataset_size=1000,
    accountant="rdp",
)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 150), nn.Tanh(), nn.Linear(150, 3))


def half(model: nn.Module) -> Support:
    generator = torch.Generator().manual_seed(1)
    return top_k(
        {n: torch.rand(p.shape, generator=generator) for n, p in trainable(model).items()},
        Support.full(model).total // 2,
    )


def flat(values) -> torch.Tensor:
    return torch.cat([v.flatten() for v in values.values()]).double()


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("engine", ["capture", "vmap"])
def test_noise_has_the_plans_variance_on_the_support_and_none_elsewhere(phase, sparse, engine):
    """Over 500,000 draws through the whole step the variance is within 1.2% of (σC/B)².

    Its relative standard error is √(2/n) ≤ 0.2%, so 1.2% is 6 standard errors: a false alarm once in 1e8 runs.
    """
    model = wide()
    support = half(model) if sparse else Support.full(model)
    mechanism = Mechanism(model, F.cross_entropy, PLAN, ledger := Ledger(PLAN), Streams("r"), engine)
    if phase == 1:
        ledger.steps[0] = PLAN.phases[0].steps
    numbers = PLAN.phases[phase]
    data = (torch.randn(6, 200), torch.randint(0, 3, (6,)))
    signal = flat(
        clipped_sum(model, F.cross_entropy, data, support, numbers.clip_norm).values
    ) / PLAN.expected_batch_size(numbers)
    active = flat(support.masks).bool()
    draws = []
    for step in range(math.ceil(500_000 / support.size)):
        private = mechanism.private_gradient([data], support, phase, step)
        assert not flat(private.values)[~active].any()
        draws.append((flat(private.values) - signal)[active])
    noise = torch.cat(draws)
    expected = (numbers.noise_multiplier * numbers.clip_norm / (numbers.sample_rate * 1000)) ** 2
    assert noise.numel() >= 500_000
    assert private.noise_std**2 == pytest.approx(expected)
    assert abs(noise.square().mean() / expected - 1) < 0.012
    assert abs(noise.mean()) < 6 * math.sqrt(expected / noise.numel())


def test_no_two_steps_phases_or_parameters_share_noise():
    model = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
    mechanism = Mechanism(model, F.cross_entropy, PLAN, Ledger(PLAN), Streams("r"))
    support = Support.full(model)
    seen = []
    for phase, numbers in enumerate(PLAN.phases):
        for step in range(numbers.steps):
            private = mechanism.private_gradient([], support, phase, step)
            seen += [
                v.flatten() * numbers.sample_rate / (numbers.noise_multiplier * numbers.clip_norm)
                for v in private.values.values()
            ]
    noise = torch.stack(seen)  # 200 × 900 standard normal numbers, scaled alike
    correlation = torch.corrcoef(noise).fill_diagonal_(0)
    assert noise.unique().numel() > 0.99 * noise.numel()
    assert correlation.abs().max() < 7 / math.sqrt(900), "19,900 pairs, each beyond once in 7e11: once in 3e7 runs"


def test_an_empty_batch_is_a_full_charged_noisy_step():
    model = wide()
    mechanism = Mechanism(model, F.cross_entropy, PLAN, ledger := Ledger(PLAN), Streams("r"))
    private = mechanism.private_gradient([], Support.full(model), 0, 0)
    assert ledger.steps[0] == 1 and flat(private.values).std() == pytest.approx(
        PLAN.noise_std(PLAN.phases[0]), rel=0.05
    )


def test_the_divisor_does_not_know_the_batch():
    """The same record alone or among copies of itself: the sum grows, the divisor does not."""
    model = wide()
    x, y = torch.randn(1, 200), torch.tensor([0])
    found = []
    for copies in (1, 5):
        mechanism = Mechanism(model, F.cross_entropy, PLAN, Ledger(PLAN), Streams("r", seed=7))
        found.append(
            flat(
                mechanism.private_gradient([(x.repeat(copies, 1), y.repeat(copies))], Support.full(model), 0, 0).values
            )
        )
    one = flat(clipped_sum(model, F.cross_entropy, (x, y), Support.full(model), 0.7).values)
    torch.testing.assert_close(found[1] - found[0], 4 * one / 100, rtol=1e-3, atol=1e-7)


RECORDS = {  # [n, 200] inputs whose gradients are ordinary, far beyond the clip, on biases and the last layer alone, mixed
    "none": torch.zeros(0, 200),
    "ordinary": 0.1 * torch.randn(1, 200, generator=torch.Generator().manual_seed(3)),
    "huge": torch.full((1, 200), 1e4),
    "nothing": torch.zeros(1, 200),
    "many": torch.randn(40, 200, generator=torch.Generator().manual_seed(4)) * torch.logspace(-2, 2, 40)[:, None],
}


def release(model, x, support, phase=0, engine="capture", seed=7) -> torch.Tensor:
    """What the first step of the phase releases for records of class 0; the noise is the same at every call."""
    mechanism = Mechanism(model, F.cross_entropy, PLAN, ledger := Ledger(PLAN), Streams("r", seed=seed), engine)
    for earlier in range(phase):
        ledger.steps[earlier] = PLAN.phases[earlier].steps
    batches = [(part, torch.zeros(len(part), dtype=torch.long)) for part in x.split(16)] if len(x) else []
    return flat(mechanism.private_gradient(batches, support, phase, 0).values)


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("records", [name for name in RECORDS if name != "none"])
def test_the_noise_does_not_know_the_data(records, sparse, phase):
    """With the stream held, the release less the true clipped sum is the same for any records, and for none."""
    model = wide()
    support, numbers = half(model) if sparse else Support.full(model), PLAN.phases[phase]
    x = RECORDS[records]
    truth = clipped_sum(
        model, F.cross_entropy, (x, torch.zeros(len(x)).long()), support, numbers.clip_norm, engine="reference"
    )
    noise = release(model, x, support, phase) - flat(truth.values) / PLAN.expected_batch_size(numbers)
    torch.testing.assert_close(noise, release(model, RECORDS["none"], support, phase), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("engine", ["capture", "vmap", "reference"])
def test_one_record_moves_the_release_by_at_most_the_clip_norm_over_the_divisor(engine, sparse, phase):
    """‖M(D ∪ {x}) − M(D)‖ ≤ C/B at equal noise, and = C/B for a record far beyond the clip."""
    model = wide()
    support, numbers = half(model) if sparse else Support.full(model), PLAN.phases[phase]
    most = numbers.clip_norm / PLAN.expected_batch_size(numbers)
    for others in ("none", "ordinary", "many"):
        without = release(model, RECORDS[others], support, phase, engine)
        for record in ("ordinary", "huge", "nothing"):
            moved = release(model, torch.cat([RECORDS[others], RECORDS[record]]), support, phase, engine) - without
            assert moved.norm() <= most * (1 + 1e-3)
            assert record != "huge" or moved.norm() == pytest.approx(most, rel=1e-3)


@pytest.mark.parametrize("drawn", [0, 3])
def test_every_active_coordinate_has_noise_of_its_own(drawn):
    """Over 1,000 steps each coordinate's variance is the plan's and no two coordinates go together, with a record or none,
    also where every record's gradient is zero. False alarm: below 1e-6 a run (14 variances at 1e-8, 91 correlations
    beyond 7 standard errors at 3e-12).
    """
    steps = 1000
    numbers = Phase(steps=steps, sample_rate=0.1, noise_multiplier=1.3, clip_norm=0.7)
    plan = Plan(phases=(numbers,), delta=1e-5, dataset_size=100, accountant="rdp")
    model = nn.Linear(6, 4)
    x, y = torch.randn(drawn, 6), torch.arange(drawn) % 4
    x[:, 3:] = 0.0  # half of the weights get no gradient
    support = top_k({n: torch.rand(p.shape) for n, p in trainable(model).items()}, 14)
    mechanism = Mechanism(model, F.cross_entropy, plan, Ledger(plan), Streams("r"))
    batches = [(x, y)] if drawn else []
    signal = flat(clipped_sum(model, F.cross_entropy, (x, y), support, 0.7).values) / 10
    found = [flat(mechanism.private_gradient(batches, support, 0, step).values) for step in range(steps)]
    noise = (torch.stack(found) - signal)[:, flat(support.masks).bool()]  # [steps, 14]
    statistic = noise.square().sum(0) / plan.noise_std(numbers) ** 2
    low, high = chi2.ppf([5e-9, 1 - 5e-9], steps)
    assert ((low < statistic) & (statistic < high)).all()
    assert torch.corrcoef(noise.T).fill_diagonal_(0).abs().max() < 7 / math.sqrt(steps)


def test_the_weights_of_a_fitted_model_carry_the_plans_noise():
    """Where no record has a gradient, SGD at rate 1 moves the weights by the noise alone: of the plan's size, in each
    phase, on the support. The 150,000 or more draws a phase have a relative standard error of variance of 0.4%, so 2.5%
    is 6 standard errors: a false alarm once in 1e8 runs.
    """
    model = nn.Linear(200, 150, bias=False)
    plan = Plan(
        phases=(
            Phase(steps=5, sample_rate=0.1, noise_multiplier=1.3, clip_norm=0.7),
            Phase(steps=10, sample_rate=0.2, noise_multiplier=0.9, clip_norm=0.4),
        ),
        delta=1e-5,
        dataset_size=100,
        method="tp-topk",
        active_ratio=0.5,
        accountant="rdp",
    )
    weights = [model.weight.detach().double()]
    run = tptopk.fit(
        model,
        (torch.zeros(100, 200), torch.zeros(100, dtype=torch.long)),
        plan,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=F.cross_entropy,
        on_step=lambda record: weights.append(model.weight.detach().double()),
    )
    moves = torch.stack(weights).diff(dim=0)
    assert not moves[5:, ~run.support["weight"]].any()
    for drawn, numbers in zip((moves[:5], moves[5:, run.support["weight"]]), plan.phases, strict=True):
        assert drawn.numel() >= 150_000
        assert abs(drawn.square().mean() / plan.noise_std(numbers) ** 2 - 1) < 0.025


def test_a_step_that_fails_half_way_leaves_nothing_for_the_next():
    """Its charge stands, and the next step is what it would have been without it."""
    model, x = wide(), RECORDS["many"]

    def broken():
        yield x, torch.zeros(len(x), dtype=torch.long)
        raise OSError("disk error")

    found = []
    for fails in (False, True):
        mechanism = Mechanism(model, F.cross_entropy, PLAN, ledger := Ledger(PLAN), Streams("r", seed=7))
        if fails:
            with pytest.raises(OSError, match="disk error"):
                mechanism.private_gradient(broken(), Support.full(model), 0, 0)
        else:
            mechanism.private_gradient([], Support.full(model), 0, 0)
        assert ledger.steps[0] == 1
        found.append(flat(mechanism.private_gradient([], Support.full(model), 0, 1).values))
    assert torch.equal(*found)


def test_micro_batches_of_any_size_give_the_same_release():
    model = wide()
    data = (torch.randn(12, 200), torch.randint(0, 3, (12,)))
    found = []
    for size in (1, 5, 12):
        mechanism = Mechanism(model, F.cross_entropy, PLAN, Ledger(PLAN), Streams("r", seed=7))
        batches = [(data[0][i : i + size], data[1][i : i + size]) for i in range(0, 12, size)]
        found.append(flat(mechanism.private_gradient(batches, half(model), 0, 0).values))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=1e-8)


def test_the_charge_comes_before_the_noise():
    order = []

    class Witness(Ledger):
        def charge(self, *args):
            super().charge(*args)
            order.append("charge")

    class Watched(Streams):
        def normal(self, *args):
            order.append("noise")
            return super().normal(*args)

    model = nn.Linear(3, 3, bias=False)
    Mechanism(model, F.cross_entropy, PLAN, Witness(PLAN), Watched("r")).private_gradient([], Support.full(model), 0, 0)
    assert order == ["charge", "noise"]


def test_a_charge_that_fails_draws_no_noise():
    class Full(Ledger):
        def charge(self, *args):
            raise OSError("no space left on device")

    class Silent(Streams):
        def normal(self, *args):
            raise AssertionError("noise was drawn without a charge")

    model = nn.Linear(3, 3)
    with pytest.raises(OSError, match="no space"):
        Mechanism(model, F.cross_entropy, PLAN, Full(PLAN), Silent("r")).private_gradient([], Support.full(model), 0, 0)


def test_a_model_that_is_written_to_during_a_step_stops_the_run():
    class Sly(nn.Module):
        """Behaves for a while, then keeps a statistic of its data."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 3), 0
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.calls += 1
            if self.calls > 2:
                self.mean += x.detach().mean(0)
            return self.layer(x)

    model = Sly()
    mechanism = Mechanism(model, F.cross_entropy, PLAN, Ledger(PLAN), Streams("r"))
    data = (torch.randn(3, 4), torch.zeros(3, dtype=torch.long))
    mechanism.private_gradient([data, data], Support.full(model), 0, 0)
    with pytest.raises(ModelChanged, match="must not be saved or released"):
        mechanism.private_gradient([data], Support.full(model), 0, 1)


def test_out_of_memory_takes_the_same_records_again_in_halves_and_charges_once(monkeypatch):
    """As though a GPU had room for three examples: the release is the same, to rounding, as where all fit."""
    model, data = nn.Linear(4, 3), (torch.randn(10, 4), torch.arange(10) % 3)
    plan = Plan(
        phases=(Phase(steps=3, sample_rate=0.5, noise_multiplier=1.0, clip_norm=1.0),), delta=1e-5, dataset_size=20
    )
    sizes, released = [], []
    for most in (100, 3):

        def limited(model, loss, batch, *args, most=most, **kwargs):
            sizes.append(len(batch[1]))
            if len(batch[1]) > most:
                raise torch.OutOfMemoryError("out of memory")
            return clipped_sum(model, loss, batch, *args, **kwargs)

        monkeypatch.setattr("tptopk.training.mechanism.clipped_sum", limited)
        ledger = Ledger(plan)
        mechanism = Mechanism(model, F.cross_entropy, plan, ledger, Streams("r", seed=1))
        released.append(
            [mechanism.private_gradient([data], Support.full(model), 0, n).values["weight"] for n in range(3)]
        )
        assert sum(segment.steps for segment in ledger.segments()) == 3
    for a, b in zip(*released, strict=True):
        torch.testing.assert_close(a, b)
    assert sizes[3:5] == [10, 5] and max(sizes[5:]) <= 3, "the size that fitted is remembered"
    assert sum(sizes[5:]) == 3 * 10, "every record once a step"


def test_one_example_that_does_not_fit_is_an_error_and_nothing_is_released(monkeypatch):
    def never(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("tptopk.training.mechanism.clipped_sum", never)
    plan = Plan(
        phases=(Phase(steps=3, sample_rate=0.5, noise_multiplier=1.0, clip_norm=1.0),), delta=1e-5, dataset_size=20
    )
    mechanism = Mechanism(nn.Linear(4, 3), F.cross_entropy, plan, Ledger(plan), Streams("r"))
    with pytest.raises(RuntimeError, match="one example does not fit"):
        mechanism.private_gradient(
            [(torch.randn(2, 4), torch.zeros(2, dtype=torch.long))], Support.full(nn.Linear(4, 3)), 0, 0
        )


def test_dropout_is_secret_under_a_public_seed_and_does_not_tell_the_size_of_a_sample():
    """Masks are drawn by place in the batch: known masks would show which records were drawn, a moved generator how many."""
    plan = replace(PLAN, phases=(replace(PLAN.phases[0], noise_multiplier=1e-9),))
    model = nn.Sequential(nn.Linear(20, 30), nn.Dropout(0.5), nn.Linear(30, 3))
    x, y = torch.randn(9, 20), torch.arange(9) % 3
    sums, after = [], []
    for size in (9, 9, 4):
        torch.manual_seed(0)
        mechanism = Mechanism(model, F.cross_entropy, plan, Ledger(plan), Streams("r"))
        drawn = ((x[i : i + 3] + 0 * torch.rand(3, 20), y[i : i + 3]) for i in range(0, size, 3))  # views that draw
        sums.append(flat(mechanism.private_gradient(drawn, Support.full(model), 0, 0).values))
        after.append(torch.get_rng_state())
    assert not torch.allclose(sums[0], sums[1], rtol=1e-2)
    assert torch.equal(after[0], after[1]) and torch.equal(after[0], after[2])
