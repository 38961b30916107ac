"""Channel statistics are released by two charged queries, and one record moves neither by more than its clip norm."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tptopk
from tptopk.privacy.account import open_account, read_account
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.training.mechanism import Mechanism
from tptopk.training.sampling import Records
from tptopk.training.standardize import Standardize
from tptopk.training.verify import verify

CPU = torch.device("cpu")
RECORDS = 500


def data():
    generator = torch.Generator().manual_seed(0)
    deviations, means = torch.tensor([0.1, 2.0, 1.0]), torch.tensor([0.5, -1.0, 0.0])
    noise = torch.randn(RECORDS, 3, 4, 4, generator=generator)
    return noise * deviations.view(-1, 1, 1) + means.view(-1, 1, 1), torch.arange(RECORDS) % 3


def plan(layer, sigma=0.01, **options):
    given = {"epsilon": 3.0, "delta": 1e-5, "batch_size": 50, "dataset_size": RECORDS, "steps": 4, "accountant": "rdp"}
    queries = layer.queries(sigma) if sigma else ()
    method = options.pop("method", "dp-sgd")
    return Plan.calibrate(
        method, queries=queries, **{**given, "epsilon": 1e6 if sigma and sigma < 1 else 3.0, **options}
    )


def network(layer):
    torch.manual_seed(0)
    return nn.Sequential(layer, nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3))


def fitted(layer, numbers, train_set=None, **options):
    model = network(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_set = data() if train_set is None else train_set
    return tptopk.fit(model, train_set, numbers, optimizer, loss=F.cross_entropy, standardize=layer, **options)


def asked(x, sigma=0.01, scale=2.0):
    layer = Standardize(torch.full((3,), scale))
    numbers = plan(layer, sigma)
    ledger = Ledger(numbers)
    ledger.charge_queries()
    mechanism = Mechanism(network(layer), lambda m, b: m(b[0]).sum(1), numbers, ledger, Streams("r", seed=1))
    layer.ask(Records((x, torch.zeros(len(x)))), mechanism, 64, CPU)
    return layer


def test_with_little_noise_the_statistics_are_the_data_s():
    x, _ = data()
    layer = asked(x)
    out = layer(x)
    torch.testing.assert_close(layer.mean, x.mean((0, 2, 3)), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-2)
    torch.testing.assert_close(out.std((0, 2, 3)), torch.ones(3), rtol=5e-2, atol=0)


def test_one_record_moves_a_query_by_at_most_its_clip_norm():
    """Noise is the same in both: only the record differs, which is large, or not finite and so contributes nothing."""
    x, _ = data()
    near, far = x.clone(), x.clone()
    near[7], far[7] = float("nan"), 1e6
    moved = (asked(far).mean - asked(near).mean) / 2.0  # in units of the scale
    assert 0 < moved.norm() <= math.sqrt(3) / RECORDS * (1 + 1e-4)
    assert torch.isfinite(asked(far).factor).all()


def test_the_noise_has_its_standard_deviation():
    """Of 3 × 400 draws; beyond these bounds once in a million runs."""
    layer = Standardize(torch.ones(3))
    draws = []
    for seed in range(400):
        numbers = plan(layer, 40.0)
        ledger = Ledger(numbers)
        ledger.charge_queries()
        mechanism = Mechanism(network(layer), lambda m, b: m(b[0]).sum(1), numbers, ledger, Streams("r", seed=seed))
        draws.append(mechanism.answer(0, torch.zeros(3)))
    found = torch.cat(draws).square().mean().sqrt() / (40.0 * math.sqrt(3) / RECORDS)
    assert abs(float(found) - 1) < 4.9 / math.sqrt(2 * 1200)


def test_queries_are_charged_first_and_answered_once(tmp_path):
    layer = Standardize(torch.ones(3))
    numbers = plan(layer, 40.0)
    run = fitted(layer, numbers, out=tmp_path / "run")
    kinds = [line["kind"] for line in read_ledger(tmp_path / "run" / "ledger.jsonl").lines]
    assert kinds[:5] == ["plan", "attempt", "query", "query", "steps"]
    assert run.epsilon <= 3.0 and verify(tmp_path / "run").holds and "channel means" in run.statement()
    ledger = Ledger(numbers)
    mechanism = Mechanism(network(layer), lambda m, b: m(b[0]).sum(1), numbers, ledger, Streams("r"))
    with pytest.raises(RuntimeError, match="not charged"):
        mechanism.answer(0, torch.zeros(3))
    ledger.charge_queries()
    mechanism.answer(0, torch.zeros(3))
    with pytest.raises(RuntimeError, match="answered before"):
        mechanism.answer(0, torch.zeros(3))
    answer = mechanism.answer(1, torch.full((3,), 1 / 3, dtype=torch.float64))
    assert answer.dtype == torch.float32, "digits that the noise does not have would be the sum's own"
    without = plan(layer, 0)
    assert numbers.phases[0].noise_multiplier > without.phases[0].noise_multiplier, "the queries cost something"


def interrupted(layer, numbers, folder, **options):
    """A run that ends after its first step."""

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(layer, numbers, out=folder, on_step=stop, **options)


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
@pytest.mark.parametrize(
    "options", [{}, {"method": "tp-topk", "steps": 20}]
)  # their checkpoint is from before a warm-up
def test_a_resumed_run_keeps_the_statistics_that_were_released(tmp_path, options):
    layer = Standardize(torch.ones(3))
    numbers = plan(layer, 40.0, **options)
    interrupted(layer, numbers, tmp_path / "run", checkpoint_every=100)
    again = Standardize(torch.ones(3))
    run = fitted(again, numbers, out=tmp_path / "run", resume=True)
    assert torch.equal(again.mean, layer.mean) and run.epsilon <= 3.0 and verify(tmp_path / "run").holds
    interrupted(Standardize(torch.ones(3)), numbers, tmp_path / "other")
    for name in (tmp_path / "other").glob("checkpoint*"):
        name.unlink()
    with pytest.raises(Refusal, match="begin a new run"):
        fitted(Standardize(torch.ones(3)), numbers, out=tmp_path / "other", resume=True)


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_views_count_as_one_record_and_ordinary_training_is_exact():
    x, y = data()
    layer = Standardize(torch.ones(3))
    fitted(layer, plan(layer), train_set=(x, y), views=lambda x: torch.stack([x, x.flip(-1)], 1))
    torch.testing.assert_close(layer.mean, x.mean((0, 2, 3)), rtol=0, atol=0.05)
    exact = Standardize(torch.ones(3))
    numbers = Plan.calibrate("non-private", epsilon=1.0, delta=1e-5, batch_size=50, dataset_size=RECORDS, steps=2)
    fitted(exact, numbers)
    torch.testing.assert_close(exact.mean, x.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


def bare(model, numbers, **options):
    """Training that is not told of the layer."""
    return tptopk.fit(
        model, data(), numbers, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, **options
    )


def test_queries_that_nobody_would_ask_are_refused_before_they_are_charged(tmp_path):
    open_account(tmp_path / "account", 10.0, 1e-5)
    layer = Standardize(torch.ones(3))
    for model in (network(layer), network(nn.Identity())):
        with pytest.raises(Refusal, match="nothing would ask them: give fit standardize=layer"):
            bare(model, plan(layer, 40.0), account=tmp_path / "account", out=tmp_path / "run")
    assert not read_account(tmp_path / "account").runs and not (tmp_path / "run").exists()


def test_a_layer_that_was_never_asked_is_refused_and_one_that_was_may_be_trained_again():
    layer = Standardize(torch.ones(3))
    with pytest.raises(Refusal, match="a Standardize that was never asked"):
        bare(network(layer), plan(layer, 0))
    with pytest.raises(Refusal, match="a model has one"):
        bare(nn.Sequential(Standardize(torch.ones(3)), network(layer)), plan(layer, 40.0), standardize=layer)
    trained = fitted(layer, plan(layer, 40.0)).model
    again = network(Standardize(torch.ones(3)))
    again.load_state_dict(trained.state_dict())
    mean = again[0].mean.clone()
    assert bare(again, plan(layer, 0)).status == "finished" and torch.equal(again[0].mean, mean)


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_a_run_that_asked_may_be_resumed_without_its_layer_but_not_from_before_the_answers(tmp_path):
    layer = Standardize(torch.ones(3))
    numbers = plan(layer, 40.0)
    interrupted(layer, numbers, tmp_path / "run", checkpoint_every=100)
    model = network(Standardize(torch.ones(3)))
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    bare(model, numbers, out=tmp_path / "run", resume=True)
    assert torch.equal(model[0].mean, layer.mean) and verify(tmp_path / "run").holds
    for name in (tmp_path / "other").glob("checkpoint*"):
        name.unlink()
    with pytest.raises(Refusal, match="begin a new run"):
        bare(network(Standardize(torch.ones(3))), numbers, out=tmp_path / "other", resume=True)


def test_what_does_not_fit_is_refused(tmp_path):
    layer = Standardize(torch.ones(3))
    open_account(tmp_path / "account", 10.0, 1e-5)
    x, y = data()

    def loss(model, batch):
        return model(batch.transpose(1, 2).unsqueeze(-1)).sum(1)

    for train_set, objective in ((x.flatten(2).transpose(1, 2), loss), ((x[:, :2], y), F.cross_entropy)):
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(48 if isinstance(train_set, torch.Tensor) else 32, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(Refusal, match="inputs, targets|channels|failed on made-up"):
            tptopk.fit(
                model, train_set, plan(layer, 40.0), optimizer, loss=objective, standardize=layer,
                account=tmp_path / "account",
            )  # fmt: skip
    assert not read_account(tmp_path / "account").runs, "refused before anything is paid"
    with pytest.raises(Refusal, match=r"queries=layer.queries\(\)"):
        fitted(layer, plan(layer, 0))
    with pytest.raises(Refusal, match="layer of the model"):
        other = network(nn.Identity())
        optimizer = torch.optim.SGD(other.parameters(), lr=1)
        tptopk.fit(other, data(), plan(layer), optimizer, loss=F.cross_entropy, standardize=layer)
    with pytest.raises(Refusal, match="one positive number"):
        Standardize(torch.tensor([1.0, 0.0]))


def test_a_record_moves_a_long_sum_by_its_norm():
    """In float32 records that sum to 0.9 of its last bit would add a whole one below a power of two, and none above it."""
    size, fill = 512, 2**17
    last_bit = 2.0 ** (17 - 24)
    x = torch.zeros(fill + 601 * size, 1)
    x[:fill], x[fill], x[fill + size :: size] = 1.0, 0.5, -0.9 * last_bit
    layer, sums = Standardize(torch.ones(1)), []

    class Exact:
        def query_clip_norm(self, index):
            return layer.queries()[index].clip_norm

        def answer(self, index, total, step=0):
            sums.append(float(total))
            return torch.zeros_like(total)

    near = x.clone()
    near[0] = torch.nan  # contributes nothing
    for records in (x, near):
        layer.ask(Records((records, torch.zeros(len(records)))), Exact(), size, CPU)
    assert abs(sums[0] - sums[2]) <= 1 + 1e-6 and abs(sums[1] - sums[3]) <= 1 + 1e-6
