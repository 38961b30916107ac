"""`fit` from end to end: methods, run folders, bad input, interrupts."""

from __future__ import annotations

import json
import math
import os

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


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].private])
@pytest.mark.parametrize("score", ["paper", "factored"])
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


def test_a_run_folder_can_be_loaded(tmp_path):
    run = fit(out=tmp_path / "run", test_set=data(seed=1), config={"words": "mine"})
    again = tptopk.load(tmp_path / "run", network(5))
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), again.model.parameters(), strict=True))
    assert again.plan == run.plan and again.support == run.support and again.history == run.history
    assert (again.epsilon, again.test, again.status, again.config) == (
        run.epsilon,
        run.test,
        "finished",
        {"words": "mine"},
    )
    assert again.statement() == run.statement() == (tmp_path / "run" / "statement.md").read_text()[:-1]
    ledger = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert len(ledger) == 2 + 40 + 1 and ledger[-1]["kind"] == "end"


def test_a_run_folder_holds_no_secret(tmp_path, monkeypatch):
    secret = bytes(range(100, 132))
    monkeypatch.setattr("tptopk.privacy.randomness.secrets.token_bytes", lambda n: secret[:n])
    fit(out=tmp_path / "run", seed=None)
    for path in (tmp_path / "run").iterdir():
        content = path.read_bytes()
        assert secret[:8] not in content and secret.hex()[:16].encode() not in content and b"seed=" not in content
        assert b'"seed"' not in content


def test_tied_weights_survive_saving(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.out = nn.Embedding(6, 6), nn.Linear(6, 6, bias=False)
            self.out.weight = self.tokens.weight

        def forward(self, ids):
            return self.out(torch.tanh(self.tokens(ids)).mean(1))

    x = torch.randint(0, 6, (SIZE, 4))
    run = fit(Tied(), (x, x[:, 0]), out=tmp_path / "run")
    again = tptopk.load(tmp_path / "run", Tied())
    assert again.model.out.weight is again.model.tokens.weight
    assert torch.equal(again.model.out.weight, run.model.out.weight)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_is_readable_and_counts(tmp_path, error):
    def stop(record):
        if record.step == 15:
            raise error("stop")

    model = network()
    with pytest.raises(error):
        fit(model, out=tmp_path / "run", on_step=stop, test_set=data(seed=1))
    again = tptopk.load(tmp_path / "run", network(3))
    assert again.status == ("interrupted" if error is KeyboardInterrupt else "failed")
    assert again.facts.charged_steps == [12, 3] and 0 < again.epsilon < 8.0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.model.parameters(), strict=True))


def test_a_folder_with_a_run_is_never_overwritten(tmp_path):
    fit(out=tmp_path / "run")
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with pytest.raises(Refusal, match="already holds a run"):
        fit(out=tmp_path / "run", seed=3)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


class Growing(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.reads = 0

    def __len__(self):
        return SIZE + (self.reads > 500)

    def __getitem__(self, i):
        self.reads += 1
        return data()[0][i % SIZE], i % 3


class WithState(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        return None


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


class Sentences(torch.utils.data.Dataset):
    """Records of different lengths."""

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return torch.arange(2 + i % 5) % 9 + 1, i % 3


def padded(records):
    return torch.nn.utils.rnn.pad_sequence([r[0] for r in records], batch_first=True), torch.tensor(
        [r[1] for r in records]
    )


class Pooling(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.words, self.head, self.masked = nn.Embedding(30, 4), nn.Linear(4, 3), masked

    def forward(self, ids):
        words = self.words(ids)
        if not self.masked:
            return self.head(words.mean(1))
        real = (ids != 0).float()[..., None]
        return self.head((words * real).sum(1) / real.sum(1).clamp(min=1))


def test_padding_that_lets_one_record_change_another_is_refused():
    with pytest.raises(Refusal, match="Pad every record to one public length"):
        fit(Pooling(masked=False), Sentences(), collate=padded)
    assert fit(Pooling(masked=True), Sentences(), collate=padded).status == "finished"


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


def part(model):
    return torch.optim.SGD(model[0].parameters(), lr=1.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_set": data(SIZE - 1)}, "declares a dataset of 300 records and this one has 299"),
        ({"train_set": (torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))}, "empty"),
        ({"train_set": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()))}, "not a DataLoader"),
        ({"model": nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))}, "tptopk.fix"),
        ({"loss": lambda m, b: F.cross_entropy(m(b[0]), b[1])}, "one number an example"),
        ({"loss": 3}, "loss is 3"),
        ({"scaler": object()}, "no gradient scaler"),
        ({"schedular": None}, "did you mean 'scheduler'"),
        ({"epsilon": 3.0}, "it belongs to the plan: Plan.calibrate\\(…, epsilon=…\\)"),
        ({"noise_multiplier": 3.0}, "it belongs to the plan: Phase"),
        ({"engine": "fast"}, "unknown engine"),
        ({"precision": "fp16"}, "unknown precision"),
        ({"score": "papr"}, "did you mean 'paper'"),
        ({"ratio_schedule": "constand"}, "did you mean 'constant'"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"ema": 1.0}, "ema"),
        ({"the_plan": plan(active_ratio=0.001)}, "k = 0"),
        ({"test_set": (torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))}, "test set is empty"),
        ({"test_set": (torch.zeros(5, 7), torch.zeros(5, dtype=torch.long))}, "a test record"),
        ({"test_set": (data()[0], data()[1] + 1)}, "of 300 test records have a label that is no class"),
        ({"test_set": [(x, int(y) - 1) for x, y in zip(*data(5), strict=True)]}, "of 5 test records have a label"),
        ({"out": "/proc/nothing/here"}, "cannot write"),
        ({"model": nn.Sequential(WithState(6, 3)), "out": "{tmp}"}, "only tensors can be saved"),
        (
            {
                "the_plan": tptopk.Plan(
                    phases=[tptopk.Phase(steps=2, sample_rate=0.1, noise_multiplier=1e-5, clip_norm=1.0)],
                    delta=1e-5,
                    dataset_size=SIZE,
                    accountant="pld",
                )
            },
            "infinite",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_charged(tmp_path, monkeypatch, options, words):
    def never(*args):
        raise AssertionError("charged")

    monkeypatch.setattr("tptopk.privacy.ledger.Ledger.charge", never)
    if options.get("out") == "{tmp}":
        options = {**options, "out": tmp_path / "run"}
    with pytest.raises(Refusal, match=words):
        fit(**options)
    assert not (tmp_path / "run").exists()


def test_an_optimizer_over_part_of_the_model_is_refused():
    model = network()
    with pytest.raises(Refusal, match="does not hold parameter"):
        fit(model, optimizer=part(model))


def test_a_metric_scheduler_is_refused():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    short = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
    with pytest.raises(Refusal, match="the scheduler ends after 5 steps"):
        fit(model, optimizer=optimizer, scheduler=short)
    with pytest.raises(Refusal, match="ReduceLROnPlateau"):
        fit(model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_a_dataset_whose_length_changes_stops_the_run(tmp_path):
    with pytest.raises(Refusal, match="must be right throughout"):
        fit(train_set=Growing(), out=tmp_path / "run")
    assert tptopk.load(tmp_path / "run", network()).status == "failed"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(Refusal, match="cannot write"):
        fit(out=tmp_path / "run")


def test_a_test_set_that_fails_late_does_not_cost_the_model(tmp_path):
    class Unreadable(torch.utils.data.Dataset):
        def __init__(self, times):
            self.times = times  # that record 15 can be read

        def __len__(self):
            return 20

        def __getitem__(self, i):
            if i == 15:
                self.times -= 1
                if self.times < 0:
                    raise OSError("disk error")
            return data(20, seed=1)[0][i], i % 3

    with pytest.raises(Refusal, match="a test record: OSError: disk error"):
        fit(out=tmp_path / "run", test_set=Unreadable(0))
    assert not (tmp_path / "run").exists(), "what can be seen beforehand costs nothing"
    with pytest.warns(UserWarning, match="could not be measured"):
        run = fit(out=tmp_path / "run", test_set=Unreadable(1))
    assert run.status == "finished" and run.test == {}
    assert tptopk.load(tmp_path / "run", network()).status == "finished"


@pytest.mark.parametrize("damage", ["run.json", "plan.json", "model.safetensors", "support.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\x00garbage"])
def test_a_damaged_folder_is_refused(tmp_path, damage, content):
    fit(out=tmp_path / "run", the_plan=plan("dp-sgd", epochs=None, steps=2))
    path = tmp_path / "run" / damage
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(Refusal):
        tptopk.load(tmp_path / "run", network())


def test_weights_of_another_model_are_refused(tmp_path):
    fit(out=tmp_path / "run", the_plan=plan("dp-sgd", epochs=None, steps=2))
    for other in (nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 3))):
        with pytest.raises(Refusal, match="another model"):
            tptopk.load(tmp_path / "run", other)


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
