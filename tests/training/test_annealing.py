"""Steps that are taken back: the question is charged, bounded and noised; what is taken back stays paid for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tptopk
from tptopk.gradients.examples import per_example
from tptopk.gradients.traces import ModelChanged
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.training.annealing import Annealer, Annealing
from tptopk.training.mechanism import Mechanism
from tptopk.training.sampling import Records
from tptopk.training.verify import verify

RECORDS, STEPS = 200, 6
CPU = torch.device("cpu")


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(RECORDS, 5, generator=generator), torch.arange(RECORDS) % 3


def plan(settings, epsilon=3.0, **options):
    numbers = {"delta": 1e-5, "batch_size": 40, "dataset_size": RECORDS, "steps": STEPS, "accountant": "rdp", **options}
    return Plan.calibrate("dp-sgd", epsilon=epsilon, queries=settings.queries(STEPS, 0.2), **numbers)


def fitted(settings, numbers, rate=0.1, **options):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    run = tptopk.fit(model, data(), numbers, optimizer, loss=F.cross_entropy, seed=1, annealing=settings, **options)
    return run, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_at_a_high_temperature_every_step_stands_and_steps_that_hurt_are_taken_back_at_a_low_one():
    hot, cold = Annealing(temperature=1e9), Annealing(temperature=1e-9, noise_multiplier=0.05)
    _, plain = fitted(None, replace(plan(hot), queries=()))
    _, stood = fitted(hot, plan(hot))
    torch.testing.assert_close(plain, stood)
    torch.manual_seed(0)
    start = torch.cat([p.detach().flatten() for p in nn.Linear(5, 3).parameters()])
    _, moved = fitted(cold, plan(cold, epsilon=1e4), rate=500.0)  # every step overshoots
    assert torch.equal(moved, start)


def test_the_questions_are_charged_before_the_first_step(tmp_path):
    settings = Annealing()
    numbers = plan(settings)
    run, _ = fitted(settings, numbers, out=tmp_path / "run")
    lines = read_ledger(tmp_path / "run" / "ledger.jsonl").lines
    assert lines[2]["kind"] == "query" and lines[2]["steps"] == STEPS and lines[3]["kind"] == "steps"
    assert run.epsilon <= 3.0 and sum(run.facts.charged_steps) == STEPS and verify(tmp_path / "run").holds
    free = Plan.calibrate(
        "dp-sgd", epsilon=3.0, delta=1e-5, batch_size=40, dataset_size=RECORDS, steps=STEPS, accountant="rdp"
    )
    assert numbers.phases[0].noise_multiplier > free.phases[0].noise_multiplier


def test_one_record_moves_the_answer_by_at_most_the_bound(monkeypatch):
    """Every record is in the sample; one of them has a huge change in loss, or none."""
    settings = Annealing(bound=0.5)
    numbers = Plan.calibrate(
        "dp-sgd", epsilon=3.0, delta=1e-5, batch_size=RECORDS, dataset_size=RECORDS, steps=STEPS, accountant="rdp",
        queries=settings.queries(STEPS, 1.0),
    )  # fmt: skip
    totals = []
    monkeypatch.setattr(Mechanism, "answer", lambda self, index, total, step=0: totals.append(total) or total)
    for size in (1.0, 1e6, float("nan")):
        x, y = data()
        x[3] = size
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        with torch.no_grad():
            model.weight.zero_()
        mechanism = Mechanism(model, per_example(F.cross_entropy), numbers, Ledger(numbers), Streams("r"))
        annealer = Annealer(
            settings, model, per_example(F.cross_entropy), Records((x, y)), numbers, mechanism, Streams("r", seed=1), 64, CPU
        )  # fmt: skip
        with torch.no_grad():
            model.weight.copy_(torch.arange(15.0).view(3, 5))
        annealer.judge()
    assert abs(float(totals[1] - totals[2])) <= 0.5 * (1 + 1e-5) and abs(float(totals[0] - totals[2])) <= 0.5 * (
        1 + 1e-5
    )


def test_what_the_plan_does_not_pay_for_is_refused():
    settings = Annealing()
    with pytest.raises(Refusal, match="change in loss"):
        fitted(settings, plan(Annealing(noise_multiplier=9.0)))
    with pytest.raises(Refusal, match="cannot be resumed"):
        fitted(settings, plan(settings), resume=True, out="nowhere")
    with pytest.raises(Refusal, match="bound"):
        Annealing(bound=0.0)


@pytest.mark.parametrize("resume", [False, True])
def test_questions_that_nobody_would_ask_are_refused_before_they_are_charged(tmp_path, resume):
    with pytest.raises(Refusal, match="nothing would ask it: give fit annealing="):
        fitted(None, plan(Annealing()), out=tmp_path / "run", resume=resume)
    assert not (tmp_path / "run").exists()


def test_a_model_that_remembers_what_it_was_asked_is_stopped():
    """Nothing may be written to the model while losses are computed, whatever the mode."""

    class Remembers(nn.Linear):
        def __init__(self):
            super().__init__(5, 3)
            self.register_buffer("seen", torch.zeros(5))
            self.armed = False

        def forward(self, x):
            if self.armed and not torch.is_grad_enabled():  # as when steps are judged
                self.seen.copy_(x.mean(0))
            return super().forward(x)

    settings = Annealing()
    model = Remembers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def arm(record):
        model.armed = True

    with pytest.raises(ModelChanged, match="while losses were computed"):
        tptopk.fit(model, data(), plan(settings), optimizer, loss=F.cross_entropy, annealing=settings, on_step=arm)


def test_a_record_moves_a_long_sum_of_changes_by_the_bound():
    """As for Standardize: float32 would be driven about by the other records' last bits."""
    size, fill = 512, 2**17
    settings = Annealing(bound=1.0)

    def asked(first):
        x = torch.zeros(fill + 601 * size, 1)
        x[:fill], x[fill], x[fill + size :: size] = 1.0, 0.5, -0.9 * 2.0 ** (17 - 24)
        x[0] = first
        numbers = Plan.calibrate(
            "dp-sgd", epsilon=3.0, delta=1e-9, batch_size=len(x), dataset_size=len(x), steps=1, accountant="rdp",
            queries=replace(settings, noise_multiplier=30.0).queries(1, 1.0),
        )  # fmt: skip
        model, found = nn.Linear(1, 1, bias=False), []
        nn.init.zeros_(model.weight)
        mechanism = Mechanism(model, lambda m, b: m(b)[:, 0], numbers, Ledger(numbers), Streams("r"))
        mechanism.answer = lambda index, total, step: found.append(float(total)) or total
        annealer = Annealer(
            replace(settings, noise_multiplier=30.0), model, lambda m, b: m(b)[:, 0], Records(x), numbers, mechanism,
            Streams("r"), size, CPU,
        )  # fmt: skip
        with torch.no_grad():
            model.weight.fill_(1.0)  # each record's loss changes by the record itself
        annealer.judge()
        return found[0]

    assert abs(asked(1.0) - asked(torch.nan)) <= 1 + 1e-6
