"""What `fit` leaves in a run's folder, and what is read from it again."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tptopk
from tests.gradients.cases import LateMean
from tests.training.test_fit import SIZE, data, fit, network, plan
from tptopk.gradients.traces import ModelChanged
from tptopk.privacy.refusal import Refusal
from tptopk.training.checks import refuse_own_records


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


@pytest.mark.parametrize("written", ["data", "copy_"])
def test_a_model_that_was_changed_past_the_mechanism_is_not_saved(tmp_path, written):
    model = LateMean(network(), written)

    def arm(record):
        model.armed = record.step == 20

    with pytest.raises(ModelChanged, match="must not be saved or released"):
        fit(model, out=tmp_path / "run", on_step=arm)
    assert model.mean.any()
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert "model.safetensors" not in files and "statement.md" not in files
    kept = load_file(next((tmp_path / "run").glob("checkpoint-*")))
    assert not any(value.any() for name, value in kept.items() if "mean" in name)
    with pytest.raises(Refusal, match="was killed before it could save a model"):
        tptopk.load(tmp_path / "run", LateMean(network(), written))
    with pytest.warns(tptopk.PrivacyWarning, match="steps were dropped"):
        run = fit(LateMean(network(), written), out=tmp_path / "run", resume=True)
    assert run.status == "finished" and not run.model.mean.any()


def test_the_training_records_are_no_test_set():
    records = data()
    x, y = records
    held = torch.utils.data.TensorDataset(*records)
    for same in (records, (x, y.clone()), held, (x[1:], y[1:]), torch.utils.data.Subset(held, range(5))):
        with pytest.raises(Refusal, match="test_set holds the records of train_set"):
            fit(train_set=records, test_set=same)


def test_records_that_are_kept_apart_are_a_test_set():
    """Also where they lie in one memory, or have one thing in common that is none of the records."""

    class Other(torch.utils.data.Dataset):
        tensors = None

        def __len__(self):
            return 5

        def __getitem__(self, i):
            return x[i] + 0, y[i]

    x, y = data()
    both = torch.cat([x, x + 1]), torch.cat([y, y])
    refuse_own_records((both[0][:SIZE], both[1][:SIZE]), (both[0][SIZE:], both[1][SIZE:]))
    refuse_own_records((both[0][::2], both[1][::2]), (both[0][1::2], both[1][1::2]))
    refuse_own_records((x, y), (x + 1, y))
    refuse_own_records((x, y), (x.to_sparse(), y))
    refuse_own_records((x, y), Other())
    halves = torch.utils.data.random_split(torch.utils.data.TensorDataset(x, y), [SIZE // 2, SIZE - SIZE // 2])
    refuse_own_records(*halves)


def test_a_loaded_model_is_known_to_have_been_trained(tmp_path):
    fit(out=tmp_path / "run")
    again = tptopk.load(tmp_path / "run", network(5)).model
    for model in (again, nn.Sequential(again)):
        with pytest.warns(tptopk.PrivacyWarning, match="trained before"):
            fit(model)
