"""Promise 5: a killed and resumed run never under-counts, never repeats noise, and stays within its budget."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tptopk
from tptopk.privacy import ledger as ledger_module
from tptopk.privacy.account import open_account, read_account
from tptopk.privacy.accounting import renyi_cost
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.plan import Plan, PrivacyWarning
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal
from tptopk.privacy.statement import statement
from tptopk.training import checkpoint
from tptopk.training.checkpoint import load_checkpoint
from tptopk.training.facts import facts_in
from tptopk.training.mechanism import Mechanism
from tptopk.training.run import schema_in
from tptopk.training.updates import Updater
from tptopk.training.verify import verify

RECORDS = 60
PLAN = Plan.calibrate(
    "tp-topk", epsilon=3.0, delta=1e-5, batch_size=12, dataset_size=RECORDS, steps=12, warmup=0.4, accountant="rdp"
)


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(RECORDS, 6, generator=generator), torch.arange(RECORDS) % 3


def run(folder, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, PLAN.steps)
    given = {"checkpoint_every": 3, "ema": 0.9, "scheduler": scheduler, "loss": F.cross_entropy, "out": folder}
    return tptopk.fit(model, data(), PLAN, optimizer, **{**given, **options})


def in_a_child(action) -> int:
    """Run `action` in a process of its own and return how that ended: −9 if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            action()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def note(witness: Path, **line) -> None:
    with open(witness, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def killed_at(owner, name, call, when, witness, folder):
    """Train, with a witness of every noise drawn, and kill the process before or after the given call."""

    def wrap(function, die):
        calls = 0

        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if die and calls == call and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if die and calls == call and when == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    def draw(streams, size, device, purpose, phase, step, *more):
        values = normal(streams, size, device, purpose, phase, step, *more)
        note(witness, phase=phase, step=step, noise=hashlib.sha256(values.numpy().tobytes()).hexdigest())
        return values

    def action():
        Streams.normal = draw
        if owner is not None:
            setattr(owner, name, wrap(getattr(owner, name), True))
        run(folder, resume=(folder / "ledger.jsonl").exists())

    normal = Streams.normal
    return in_a_child(action)


PLACES = [
    (Ledger, "charge", 1, "before"), (Ledger, "charge", 1, "after"), (Ledger, "charge", 5, "before"), (Ledger, "charge", 8, "after"),
    (Ledger, "_write", 1, "before"), (Ledger, "_write", 2, "after"), (Ledger, "_write", 7, "before"), (Ledger, "_write", 10, "after"),
    (Mechanism, "_release", 2, "before"), (Mechanism, "_release", 2, "after"), (Mechanism, "_release", 9, "after"),
    (Updater, "apply", 3, "before"), (Updater, "apply", 3, "after"), (Updater, "apply", 12, "after"),
    (checkpoint, "write_durably", 1, "before"), (checkpoint, "write_durably", 1, "after"), (checkpoint, "write_durably", 2, "before"),
    (checkpoint, "write_durably", 2, "after"), (checkpoint, "write_durably", 5, "after"), (os, "replace", 3, "before"),
    (os, "replace", 3, "after"), (os, "replace", 5, "before"), (os, "fsync", 9, "before"), (Ledger, "close", 1, "before"),
    (Ledger, "close", 1, "after"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "call", "when"), PLACES)
@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_killed_anywhere_and_resumed_the_ledger_counts_all_noise_and_none_repeats(owner, name, call, when, tmp_path):
    folder, witness = tmp_path / "run", tmp_path / "witness"
    witness.touch()
    assert killed_at(owner, name, call, when, witness, folder) == -signal.SIGKILL
    if (folder / "ledger.jsonl").exists() and b"\n" in (folder / "ledger.jsonl").read_bytes():
        record = read_ledger(folder / "ledger.jsonl")
        seen = [json.loads(line) for line in witness.read_text().splitlines()]
        assert all(sum(line["phase"] == phase for line in seen) <= record.charged[phase] for phase in (0, 1))
        assert record.end is not None or verify(folder).facts.epsilon >= PLAN.epsilon()
        load_checkpoint(folder)  # whole, or none yet
    elif folder.exists():  # killed before anything was charged: a new run takes the place
        assert not witness.read_text()
        shutil.rmtree(folder)
    finished = (
        (folder / "ledger.jsonl").exists()
        and (end := read_ledger(folder / "ledger.jsonl").end)
        and end["status"] == "finished"
    )
    if not finished:
        assert killed_at(None, "", 0, "", witness, folder) == 0
    seen = [json.loads(line) for line in witness.read_text().splitlines()]
    assert len({line["noise"] for line in seen}) == len(seen), "noise was repeated"
    verdict = verify(folder)
    record = read_ledger(folder / "ledger.jsonl")
    assert record.end is not None and record.end["status"] == "finished"
    assert verdict.facts.epsilon <= 3.0 and all(
        sum(line["phase"] == phase for line in seen) <= record.charged[phase] for phase in (0, 1)
    )
    wrong = [words for what, ok, words in verdict.checks if not ok]
    assert not wrong or name == "close", wrong  # killed between the closing line and run.json, the folder says so


def stopped(folder, step, **options):
    """A run that ends with an error after that step."""

    def stop(record):
        if record.step == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, on_step=stop, **options)


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_a_resumed_run_goes_on_where_it_stood(tmp_path, monkeypatch):
    """With the same noise and samples in both attempts, nothing lost: the same model as an unbroken run."""
    monkeypatch.setattr(Streams, "_key", lambda self, purpose, place, size: hash((purpose, place)) % 2**60)
    whole = run(tmp_path / "whole")
    stopped(tmp_path / "broken", 6, checkpoint_every=6)
    resumed = run(tmp_path / "broken", resume=True, micro_batch_size=2, checkpoint_every=6)
    assert resumed.facts.taken_steps == whole.facts.taken_steps and resumed.history[:6] == whole.history[:6]
    assert [r.step for r in resumed.history] == list(range(1, 13)) and resumed.support == whole.support
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert resumed.facts.attempts == 2 and verify(tmp_path / "broken").holds


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_a_run_is_resumed_again_and_again(tmp_path):
    """Also after its warm-up, when a checkpoint has nothing of that: its file has."""
    stopped(tmp_path / "run", 7)
    before = (tmp_path / "run" / "warmup.safetensors").read_bytes()
    for stop in (9, 10):
        stopped(tmp_path / "run", stop, resume=True)
    assert run(tmp_path / "run", resume=True).status == "finished" and verify(tmp_path / "run").holds
    assert (tmp_path / "run" / "warmup.safetensors").read_bytes() == before


def test_what_was_lost_stays_charged_and_is_said(tmp_path):
    stopped(tmp_path / "run", 5)
    with pytest.warns(PrivacyWarning, match="were dropped"):
        resumed = run(tmp_path / "run", resume=True)
    assert sum(resumed.facts.charged_steps) > sum(resumed.facts.taken_steps) and resumed.epsilon <= 3.0
    assert "2 steps were charged and lost" in resumed.statement() and verify(tmp_path / "run").holds
    from_ledger = facts_in(tmp_path / "run", read_ledger(tmp_path / "run" / "ledger.jsonl"))
    assert from_ledger.taken_steps == resumed.facts.taken_steps
    (tmp_path / "run" / "run.json").unlink()  # the ledger alone says how much was lost
    assert "2 steps were charged and lost" in statement(
        PLAN, facts_in(tmp_path / "run", read_ledger(tmp_path / "run" / "ledger.jsonl"))
    )


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
@pytest.mark.parametrize(
    ("first", "then", "words"),
    [({}, {"secure_noise": True}, "from Philox streams"), ({"seed": 1}, {}, "Not for release")],
    ids=["another generator", "a seed"],
)
def test_a_caveat_of_the_first_attempt_is_in_the_statement_of_the_second(first, then, words, tmp_path):
    stopped(tmp_path / "run", 5, **first)
    resumed = run(tmp_path / "run", resume=True, **then)
    assert words in resumed.statement() and verify(tmp_path / "run").holds


def test_a_run_that_its_account_refuses_leaves_nothing_behind(tmp_path):
    open_account(tmp_path / "account", 0.5, 1e-5)
    with pytest.raises(Refusal, match="budget"):
        run(tmp_path / "run", account=tmp_path / "account")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_somebody_else_s_files_is_left_alone(tmp_path):
    open_account(tmp_path / "account", 0.5, 1e-5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(Refusal, match="budget"):
        run(tmp_path / "mine", account=tmp_path / "account")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    (tmp_path / "mine" / "plan.json").write_text("mine")
    with pytest.raises(Refusal, match=r"plan\.json"):
        run(tmp_path / "mine")
    assert (tmp_path / "mine" / "plan.json").read_text() == "mine"


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_an_account_pays_for_a_resumed_run_once_and_for_what_was_lost_too(tmp_path):
    open_account(tmp_path / "account", 10.0, 1e-5)
    for name, begun_with in (("paid", tmp_path / "account"), ("unpaid", None)):
        stopped(tmp_path / name, 5, account=begun_with)
        run(tmp_path / name, resume=True, account=tmp_path / "account")
    account = read_account(tmp_path / "account")
    assert [line["name"] for line in account.runs] == [str(tmp_path / "paid"), str(tmp_path / "unpaid")]
    record = read_ledger(tmp_path / "paid" / "ledger.jsonl")
    assert record.account_order == account.order
    for name, line in zip(("paid", "unpaid"), account.runs, strict=True):
        charged = read_ledger(tmp_path / name / "ledger.jsonl").charged
        spent = [PLAN.phases[i].segment._replace(steps=n) for i, n in charged.items() if n]
        assert renyi_cost(spent, account.order) <= line["cost"] * (1 + 1e-9)


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_another_runs_payment_does_not_pay_for_one_of_the_same_name_and_plan(tmp_path, monkeypatch):
    account = tmp_path / "account"
    open_account(account, 20.0, 1e-5)
    for folder, begun_with in (("one", account), ("two", None)):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        stopped(Path("run"), 5, account=begun_with)
    run(Path("run"), resume=True, account=account)
    assert [line["name"] for line in read_account(account).runs] == ["run", "run"]
    record = read_ledger(Path("run") / "ledger.jsonl")
    assert record.payment == read_account(account).runs[1]["payment"] != read_account(account).runs[0]["payment"]


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_wrong_ways_to_resume_are_refused(tmp_path):
    with pytest.raises(Refusal, match="holds no run"):
        run(tmp_path / "nowhere", resume=True)
    with pytest.raises(Refusal, match="needs out="):
        run(None, resume=True)
    folder = tmp_path / "run"
    stopped(folder, 7)
    with pytest.raises(Refusal, match="already holds a run"):
        run(folder)
    with pytest.raises(Refusal, match="ema"):
        run(folder, resume=True, ema=None)
    with pytest.raises(Refusal, match="scheduler"):
        run(folder, resume=True, scheduler=None)
    other = Plan.calibrate(
        "tp-topk", epsilon=2.0, delta=1e-5, batch_size=12, dataset_size=RECORDS, steps=12, accountant="rdp"
    )
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Refusal, match="another plan"):
        tptopk.fit(model, data(), other, optimizer, loss=F.cross_entropy, out=folder, resume=True)
    with pytest.raises(Refusal, match="does not fit this model|another model"):
        tptopk.fit(
            model, data(), PLAN, optimizer, loss=F.cross_entropy, out=folder, resume=True, ema=0.9,
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, PLAN.steps),
        )  # fmt: skip
    run(folder, resume=True)
    with pytest.raises(Refusal, match="is finished"):
        run(folder, resume=True)


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_a_run_is_resumed_by_its_own_schema_alone(tmp_path):
    schema = {"target": "ill", "numeric": {"age": [0.0, 120.0], "dose": [0.0, 5.0]}}
    stopped(tmp_path / "run", 6, schema=schema)
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    swapped = {"target": "ill", "numeric": {"dose": [0.0, 5.0], "age": [0.0, 120.0]}}  # the inputs in another order
    for other in (None, swapped, {**schema, "target": "well"}):
        with pytest.raises(Refusal, match="the schema is not the one that the run"):
            run(tmp_path / "run", resume=True, schema=other)
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before
    run(tmp_path / "run", resume=True, schema=schema)
    assert schema_in(tmp_path / "run") == schema and verify(tmp_path / "run").holds
    (tmp_path / "run" / "schema.json").unlink()
    assert not verify(tmp_path / "run").holds
    with pytest.raises(Refusal, match="not the schema that the run was trained with"):
        schema_in(tmp_path / "run")


def test_a_schema_of_somebody_s_is_not_written_over(tmp_path):
    (tmp_path / "schema.json").write_text("mine")
    with pytest.raises(Refusal, match="already holds a run .schema.json."):
        run(tmp_path, schema={"target": "ill"})
    assert (tmp_path / "schema.json").read_text() == "mine"


@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_a_run_folder_behind_a_link_and_one_that_cannot_be_written(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    stopped(tmp_path / "link", 4)
    run(tmp_path / "link", resume=True)
    assert verify(tmp_path / "link").holds and (tmp_path / "real" / "ledger.jsonl").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="cannot write"):
        run(tmp_path / "file" / "run")


@pytest.mark.parametrize("kind", ["queries", "steps"])
def test_an_interrupt_between_a_charge_and_its_count_leaves_a_folder_that_holds(tmp_path, monkeypatch, kind):
    """The line is on the disk and nobody knows of it yet: it is charged all the same, in every file."""
    append = ledger_module.append_durably
    left = {"queries": 3, "steps": 7}[kind]  # of the lines: the plan, the attempt, then what is charged

    def interrupted(file, text):
        nonlocal left
        append(file, text)
        left -= 1
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr(ledger_module, "append_durably", interrupted)
    plan = dataclasses.replace(PLAN, queries=(dataclasses.replace(PLAN.phases[0], steps=1, name="asked elsewhere"),))
    model = nn.Linear(6, 3)
    with pytest.raises(KeyboardInterrupt):
        tptopk.fit(
            model, data(), plan, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, out=tmp_path / "run"
        )
    verdict = verify(tmp_path / "run")
    assert verdict.holds, [words for _, ok, words in verdict.checks if ok is False]
    assert verdict.facts.charged_steps[0] == (0 if kind == "queries" else 4)
    assert tptopk.load(tmp_path / "run", nn.Linear(6, 3)).epsilon == pytest.approx(verdict.epsilon)


def test_no_file_of_a_run_holds_a_secret_or_a_generators_state(tmp_path, monkeypatch):
    secret = bytes(range(100, 132))
    monkeypatch.setattr("tptopk.privacy.randomness.secrets.token_bytes", lambda n: secret[:n])
    keys = []
    key = Streams._key
    monkeypatch.setattr(Streams, "_key", lambda *args: keys.append(key(*args)) or keys[-1])
    stopped(tmp_path / "run", 7)
    needles = [secret[:8], secret.hex()[:16].encode()]
    for value in keys:
        raw = value.to_bytes(64, "little")[: 64 if value >> 128 else 16]
        needles += [str(value).encode(), f"{value:x}".encode(), *(raw[i : i + 8] for i in range(0, len(raw), 8))]
    for path in (tmp_path / "run").iterdir():
        content = path.read_bytes()
        assert not any(needle in content for needle in needles if len(needle) >= 8), path.name


def test_a_run_stops_before_the_step_that_would_overspend(tmp_path):
    """A plan written by hand that costs more than its own budget: the model of the steps that it can pay for is left, readable."""
    dear = dataclasses.replace(PLAN, target_epsilon=PLAN.epsilon() / 2)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(PrivacyWarning, match="steps were dropped"):
        found = tptopk.fit(model, data(), dear, optimizer, loss=F.cross_entropy, out=tmp_path / "run")
    assert found.epsilon <= dear.target_epsilon and 0 < len(found.history) < dear.steps
    assert verify(tmp_path / "run").holds and tptopk.load(tmp_path / "run", nn.Linear(6, 3)).epsilon == found.epsilon
