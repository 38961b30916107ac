"""`fit` from end to end: methods, options, strange records and what a run says of itself."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tptopk
from tptopk.privacy.methods import METHODS
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.refusal import Refusal

SIZE = 300


def data(size: int = SIZE, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (size,), generator=generator)
    return F.one_hot(y, 6).float() * 2 + 0.5 * torch.randn(size, 6, generator=generator), y


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def plan(method: str = "tp-topk", **changes) -> tptopk.Plan:
    return tptopk.Plan.calibrate(
        method,
        **{
            "epsilon": 8.0,
            "delta": 1e-4,
            "batch_size": 60,
            "dataset_size": SIZE,
            "epochs": 8,
            "accountant": "rdp",
            **changes,
        },
    )


def fit(model=None, train_set=None, the_plan=None, **options):
    model = model or network()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    return tptopk.fit(
        model, train_set or data(), the_plan or plan(), optimizer, **{"loss": F.cross_entropy, "seed": 0, **options}
    )


@pytest.mark.parametrize(
    "method, score",
    [
        (name, score)
        for name, method in METHODS.items()
        for score in ("paper", "factored")
        if method.private and (score == "paper" or method.ranking == "score")
    ],
)
def test_every_private_method_learns_within_its_budget(method, score):
    run = fit(the_plan=plan(method), test_set=data(seed=1), score=score)
    assert run.test["accuracy"] > 0.8
    assert 8.0 * 0.999 <= run.epsilon <= 8.0 and run.status == "finished"
    assert run.support.size == (math.floor(0.4 * 163) if METHODS[method].sparse else 163)
    assert len(run.history) == run.plan.steps == 40


def test_the_non_private_method_says_so():
    with pytest.warns(PrivacyWarning, match="NOT private"):
        run = fit(the_plan=plan("non-private"), test_set=data(seed=1))
    assert run.epsilon == math.inf and "NOT private" in run.statement() and run.test["accuracy"] > 0.95


def test_inactive_coordinates_are_bit_identical_through_phase_two():
    for build in (
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.05),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.2),
    ):
        model, kept = network(), {}

        def keep(record, model=model, kept=kept):
            if record.phase == 0:
                kept.update({n: p.detach().clone() for n, p in model.named_parameters()})

        run = fit(model, optimizer=build(model.parameters()), on_step=keep)
        for name, p in model.named_parameters():
            frozen = ~run.support[name]
            assert torch.equal(p.detach()[frozen], kept[name][frozen])
        assert any(not torch.equal(p.detach(), kept[n]) for n, p in model.named_parameters())


def test_micro_batches_change_nothing_but_rounding():
    weights = [torch.cat([p.flatten() for p in fit(micro_batch_size=size).model.parameters()]) for size in (7, 64, 300)]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights[0], weights[2], rtol=1e-4, atol=1e-5)


def test_engines_agree_on_a_whole_run():
    weights = [
        torch.cat([p.flatten() for p in fit(engine=e, the_plan=plan(steps=6, epochs=None)).model.parameters()])
        for e in ("capture", "vmap", "reference")
    ]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights[0], weights[2], rtol=1e-4, atol=1e-5)


def test_a_seed_repeats_a_run_and_marks_it():
    one, two, other = fit(), fit(), fit(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert "Not for release" in one.statement() and "Not for release" not in fit(seed=None).statement()


def test_rates_so_small_that_batches_are_empty_still_train_and_charge():
    run = fit(the_plan=plan("dp-sgd", batch_size=1, epochs=None, steps=30))
    assert len(run.history) == 30 and run.facts.charged_steps == [30]


def test_schedulers_averages_precision_and_schedules_work():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    run = fit(
        model,
        optimizer=optimizer,
        scheduler=scheduler,
        ema=0.9,
        precision="bf16",
        ratio_schedule="cosine",
        test_set=data(seed=1),
    )
    rates = [record.learning_rate for record in run.history]
    assert rates[0] == 0.5 and rates == sorted(rates, reverse=True) and rates[-1] < 0.01
    assert run.history[12].support_size > run.history[-1].support_size == 65
    assert run.test["accuracy"] > 0.8 and "moving average" in run.statement()


def test_a_loss_of_the_users_own_on_dictionaries():
    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return SIZE

        def __getitem__(self, i):
            return {"ids": torch.tensor([i % 5, i % 3, i % 7]), "label": i % 3}

    model = nn.Sequential(nn.Embedding(7, 8), nn.Flatten(), nn.Linear(24, 3))
    run = fit(model, Words(), loss=lambda m, b: F.cross_entropy(m(b["ids"]), b["label"], reduction="none"))
    assert run.engine == "capture" and run.status == "finished"


def visible(folder):
    """Everything a run shows, without what differs between any two runs (name and times, and numbers that noise touches)."""
    summary = json.loads((folder / "run.json").read_text())
    facts = {k: v for k, v in summary["facts"].items() if k not in ("begun", "ended", "described")}
    own = ("- Run: ", "- Begun: ", "- Ended: ")
    return (
        sorted(p.name for p in folder.iterdir()),
        [line for line in (folder / "statement.md").read_text().splitlines() if not line.startswith(own)],
        {**{k: v for k, v in summary.items() if k != "seconds"}, "facts": facts},
        {k: v for k, v in summary["facts"]["described"].items() if k != "run"},
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_record_shows_nowhere(tmp_path, bad, recwarn, capfd):
    clean, spoilt = data(), data()
    spoilt[0][17] = bad
    shown = []
    for name, train_set in (("clean", clean), ("spoilt", spoilt)):
        run = fit(train_set=train_set, out=tmp_path / name)
        assert all(torch.isfinite(p).all() for p in run.model.parameters())
        shown.append((visible(tmp_path / name), [str(w.message) for w in recwarn], capfd.readouterr()))
        recwarn.clear()
    assert shown[0] == shown[1]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_as_the_reference_does(kind):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.layer, self.head = nn.Embedding(9, 4), kind(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, ids):
            return self.head(self.layer(self.words(ids))[0][:, -1])

    ids = torch.randint(0, 9, (SIZE, 6), generator=torch.Generator().manual_seed(0))
    few = plan(steps=4, epochs=None)
    runs = [fit(Model(), (ids, ids[:, 0] % 3), few, engine=engine) for engine in ("auto", "reference")]
    assert runs[0].engine == "capture"
    for ours, theirs in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_label_that_is_no_class_is_a_zero_and_not_a_crash(tmp_path):
    shown = []
    for name, label in (("none", None), ("high", 99), ("low", -7)):
        x, y = data()
        if label is not None:
            y[17] = label
        fit(train_set=(x, y), out=tmp_path / name)
        shown.append(visible(tmp_path / name))
    assert shown[0] == shown[1] == shown[2]


def test_a_training_record_with_a_label_that_is_no_class_is_a_silent_zero_and_a_test_record_is_not():
    x, y = data()
    y[0] = 3
    run = fit(train_set=(x, y))
    assert run.status == "finished"
    with pytest.raises(Refusal, match="1 of 300 test records have a label that is no class: the model has 3 classes"):
        tptopk.evaluate(run.model, (x, y), F.cross_entropy)
    known = tptopk.evaluate(run.model, (x[1:], y[1:]), F.cross_entropy)
    assert known["loss"] > 0 and known["accuracy"] > 0.8


def test_a_mark_for_padding_is_no_strange_label():
    model = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2)))  # three classes at each of two places
    found = tptopk.evaluate(model, (torch.zeros(5, 4), torch.tensor([[0, -100]] * 5)), F.cross_entropy)
    assert found["loss"] > 0


def test_training_a_model_twice_is_warned_about():
    model = network()
    fit(model)
    with pytest.warns(PrivacyWarning, match="trained before in this process"):
        fit(model)


def test_a_statement_says_what_is_unusual(tmp_path):
    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(out=tmp_path / "run", on_step=stop)
    assert "**interrupted**: it ended after 1 of 40 steps" in (tmp_path / "run" / "statement.md").read_text()
    with pytest.warns(PrivacyWarning):
        large = plan("dp-sgd", delta=0.01, steps=2, epochs=None)
    assert "too large" in fit(the_plan=large).statement()
    assert repr(fit()).startswith("Run(tp-topk, finished, ε=")


def test_each_phase_has_its_learning_rate():
    numbers, model = plan(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    run = tptopk.fit(
        model, data(), numbers, optimizer, loss=F.cross_entropy, learning_rates=(0.1, 0.4), clipping="auto-s"
    )
    first, second = (phase.steps for phase in numbers.phases)
    assert [r.learning_rate for r in run.history] == [0.1] * first + [0.4] * second
    for rates, said in (((0.1,), "1 values"), ((0.1, -1.0), "learning rate")):
        with pytest.raises(Refusal, match=said):
            tptopk.fit(model, data(), numbers, optimizer, loss=F.cross_entropy, learning_rates=rates)
