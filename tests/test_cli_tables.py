"""Tables on the command line: the schema stays with the run, the network comes from it, and patients can be protected."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch

from tptopk.data.table_checks import faults
from tptopk.data.tables import read_with, schema_of
from tptopk.integrations.sklearn import TPTopKClassifier
from tptopk.privacy.refusal import Refusal
from tptopk.training.loading import load
from tptopk.training.verify import verify

WORDS = ["--accountant", "rdp", "--steps", "4", "--batch-size", "10", "--delta", "1e-3"]
SCHEMA = 'target = "ill"\nclasses = ["no", "yes"]\n[numeric]\nage = [0, 120]\n[categories]\nsex = ["f", "m"]\n'
UNIT = 'unit = "patient_id"\nmost-rows = 3\n'
NETWORK = "from torch import nn\ndef build():\n    return nn.Linear(5, 2)\n"


@pytest.fixture
def clinic(tmp_path):
    """20 patients with three records each."""
    rows = [f"p{i % 20},{20 + i},{'fm'[i % 2]},{'yes' if i > 30 else 'no'},seen" for i in range(60)]
    (tmp_path / "clinic.csv").write_text("patient_id,age,sex,ill,notes\n" + "\n".join(rows) + "\n")
    (tmp_path / "clinic.toml").write_text(SCHEMA)
    (tmp_path / "new.csv").write_text("age,sex\n30,f\n70,m\n")
    return tmp_path


def begin_and_kill(folder, *words: str) -> None:
    """Begin a long run in another process, and kill it after its first checkpoint."""
    running = subprocess.Popen([sys.executable, "-m", "tptopk", "train", *words, "--out", "run"], cwd=folder)
    deadline = time.monotonic() + 120
    while not (folder / "run" / "checkpoint.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert (folder / "run" / "checkpoint.json").exists()


def test_a_table_needs_no_network_of_ones_own(tptopk, clinic):
    done = tptopk("plan", *WORDS, "--data", "clinic.csv", "--dataset-size", "60", cwd=clinic)
    assert "d = 12 " in done.stdout and "counted in tptopk.models.networks:table_linear(5, 2)" in done.stdout
    (clinic / "clinic.csv").rename(clinic / "away.csv")
    values = json.loads(
        tptopk("plan", *WORDS, "--data", "clinic.csv", "--dataset-size", "60", "--json", cwd=clinic).stdout
    )
    assert values["model"] == "tptopk.models.networks:table_linear(5, 2)", "planning reads the schema and no table"
    (clinic / "away.csv").rename(clinic / "clinic.csv")
    tptopk("train", *WORDS, "--data", "clinic.csv", "--dataset-size", "60", "--out", "run", cwd=clinic)
    own = load(clinic / "run").model
    other = TPTopKClassifier(classes=[0, 1], bounds=(0, 1), dataset_size=4, epochs=1, accountant="rdp", delta=1e-3)
    other.fit([[0.0] * 5, [1.0] * 5] * 2, [0, 1] * 2)
    assert {n: p.shape for n, p in own.state_dict().items()} == {
        n: p.shape for n, p in other.run_.model.state_dict().items()
    }
    assert not any(p.any() for p in load_network().parameters()), "as the classifier's, it starts at zero"


def load_network():
    from tptopk.settings import build

    return build("tptopk.models.networks:table_linear(5, 2)")


def test_the_schema_stays_with_the_run_and_predict_uses_it(tptopk, clinic):
    tptopk("train", *WORDS, "--data", "clinic.csv", "--dataset-size", "60", "--out", "run", cwd=clinic)
    kept = json.loads((clinic / "run" / "schema.json").read_text())
    assert kept["numeric"] == {"age": [0.0, 120.0]} and kept["classes"] == ["no", "yes"]
    verdict = verify(clinic / "run")
    assert verdict.holds and ("schema", True) in [(what, ok) for what, ok, _ in verdict.checks]
    lines = tptopk("predict", "run", "--data", "new.csv", cwd=clinic).stdout.splitlines()
    assert lines[0] == "record,class,probability" and len(lines) == 3
    assert {line.split(",")[1] for line in lines[1:]} <= {"no", "yes"}
    (clinic / "named.csv").write_text("patient,age,sex\np7,30,f\n,70,m\n")
    named = tptopk("predict", "run", "--data", "named.csv", "--id", "patient", cwd=clinic).stdout.splitlines()
    assert [line.split(",")[0] for line in named] == ["patient", "p7", ""]
    assert [line.split(",")[1:] for line in named] == [line.split(",")[1:] for line in lines]
    refused = tptopk("predict", "run", "--data", "named.csv", "--id", "pateint", cwd=clinic, check=False)
    assert refused.returncode == 2 and "patient" in refused.stderr and not refused.stdout
    (clinic / "clinic.toml").write_text(SCHEMA.replace("120", "12000"))
    assert tptopk("predict", "run", "--data", "new.csv", cwd=clinic).stdout.splitlines() == lines
    refused = tptopk("predict", "run", "--data", "new.csv", "--schema", "clinic.toml", cwd=clinic, check=False)
    assert refused.returncode == 2 and "not the schema that the model was trained with" in refused.stderr
    (clinic / "run" / "schema.json").write_text(json.dumps({**kept, "numeric": {"age": [0.0, 12000.0]}}))
    refused = tptopk("predict", "run", "--data", "new.csv", cwd=clinic, check=False)
    assert refused.returncode == 2 and "not the schema that the run was trained with" in refused.stderr
    assert ("schema", False) in [(what, ok) for what, ok, _ in verify(clinic / "run").checks]


def test_a_schema_that_was_slipped_into_a_run_is_found(tptopk, tmp_path):
    tptopk("train", "--accountant", "rdp", "--steps", "4", "--out", "run", cwd=tmp_path)
    assert verify(tmp_path / "run").holds
    (tmp_path / "run" / "schema.json").write_text("{}")
    assert not verify(tmp_path / "run").holds


def test_a_run_names_a_network_in_this_folder_but_no_other_code(tptopk, clinic):
    (clinic / "mynet.py").write_text(NETWORK)
    (clinic / "nets").mkdir()
    (clinic / "nets" / "mine.py").write_text(NETWORK)
    words = [*WORDS, "--data", "clinic.csv", "--dataset-size", "60"]
    for model, named in (("mynet:build", True), ("nets.mine:build", False)):
        folder = f"run-{named}"
        tptopk("train", *words, "--model", model, "--out", folder, cwd=clinic)
        done = tptopk("predict", folder, "--data", "new.csv", cwd=clinic, check=False)
        assert (done.returncode == 0) is named and ("--model" in done.stderr) is not named
    (clinic / "run-True" / "mynet.py").write_text(NETWORK)  # a file that came with the run is not run
    done = tptopk("predict", ".", "--data", "../new.csv", cwd=clinic / "run-True", check=False)
    assert done.returncode == 2 and "--model" in done.stderr


def test_resuming_refuses_another_schema(tptopk, clinic):
    words = ["--accountant", "rdp", "--steps", "3000", "--batch-size", "10", "--delta", "1e-3"]
    begin_and_kill(clinic, *words, "--data", "clinic.csv", "--dataset-size", "60")
    ledger = (clinic / "run" / "ledger.jsonl").read_bytes()
    (clinic / "clinic.toml").write_text(SCHEMA.replace("120", "100"))
    refused = tptopk("train", "--resume", "run", cwd=clinic, check=False)
    assert refused.returncode == 2 and "schema is not the one that the run in run was begun with" in refused.stderr
    assert (clinic / "run" / "ledger.jsonl").read_bytes() == ledger, "nothing was charged"


def test_a_schema_with_a_unit_protects_patients_and_can_be_resumed(tptopk, clinic):
    (clinic / "clinic.toml").write_text(UNIT + SCHEMA)
    words = ["--accountant", "rdp", "--steps", "2000", "--batch-size", "5", "--delta", "1e-3", "--data", "clinic.csv"]
    refused = tptopk("train", *words, cwd=clinic, check=False)
    assert "declare the number of training patients" in refused.stderr
    refused = tptopk("train", *words, "--dataset-size", "60", "--out", "no", cwd=clinic, check=False)
    assert refused.returncode == 2 and "declares a dataset of 60 patients" in refused.stderr
    refused = tptopk("train", *words, "--dataset-size", "20", "--audit-canaries", "4", cwd=clinic, check=False)
    assert refused.returncode == 2 and "--audit-canaries" in refused.stderr
    shown = tptopk("plan", *words, "--dataset-size", "20", cwd=clinic).stdout
    assert "d = 12 " in shown and "N = 20 patients" in shown, "the ids are no input"
    begin_and_kill(clinic, *words, "--dataset-size", "20")
    tptopk("train", "--resume", "run", cwd=clinic)
    run = load(clinic / "run")
    assert run.plan.unit == "patient" and run.plan.dataset_size == 20 and run.facts.attempts == 2
    assert "one patient" in tptopk("statement", "run", cwd=clinic).stdout and verify(clinic / "run").holds
    assert len(tptopk("predict", "run", "--data", "new.csv", cwd=clinic).stdout.splitlines()) == 3


def test_records_of_a_patient_are_one_example(tptopk, clinic, monkeypatch):
    """What `fit` is given: the ids of the column, and the schema's number."""
    given = {}

    def seen(*args, **words):
        given.update(words)
        raise KeyboardInterrupt

    monkeypatch.setattr("tptopk.cli.running.fit", seen)
    (clinic / "clinic.toml").write_text(UNIT + SCHEMA)
    tptopk("train", *WORDS, "--data", "clinic.csv", "--dataset-size", "20", cwd=clinic, check=False)
    assert given["unit"] == [f"p{i % 20}" for i in range(60)] and given["most_rows"] == 3
    assert given["schema"]["unit"] == "patient_id"


def test_advice_on_patients_is_charged_for_patients(tptopk, clinic):
    (clinic / "clinic.toml").write_text(UNIT + SCHEMA)
    words = ["--accountant", "rdp", "--steps", "40", "--batch-size", "5", "--delta", "1e-3", "--data", "clinic.csv"]
    tptopk("advise", *words, "--dataset-size", "20", "--out", "advice", cwd=clinic)
    assert json.loads((clinic / "advice" / "plan.json").read_text())["unit"] == "patient"


def test_checking_a_table_says_what_becomes_of_its_columns(tptopk, clinic):
    shown = tptopk("data", "check", "clinic.csv", cwd=clinic).stdout
    assert "5 inputs = 1 number × 2 + sex 3; 2 classes" in shown and "not used: patient_id, notes" in shown
    (clinic / "clinic.toml").write_text(UNIT.replace("3", "2") + SCHEMA)
    shown = tptopk("data", "check", "clinic.csv", cwd=clinic).stdout
    assert "not used: notes" in shown and "20 patients, 20 of them with more than 2 records" in shown


def test_a_network_may_be_given_its_numbers():
    assert torch.equal(load_network()(torch.ones(3, 5)), torch.zeros(3, 2))


def test_a_table_is_not_its_own_test_set(tptopk, clinic):
    (clinic / "clinic.toml").write_text('test = "./clinic.csv"\n' + SCHEMA)
    done = tptopk("train", "--data", "clinic.csv", "--dataset-size", "60", *WORDS, cwd=clinic, check=False)
    assert done.returncode == 2 and "names the same file as its test table" in done.stderr


def test_data_check_lists_every_record_that_training_would_refuse(tptopk, clinic):
    """All faults at once, by record and value: the look of the data's owner, outside the guarantee."""
    rows = ["p1,44,f,yes", "p2,old,m,no", "p3,50,f,", "p4,51,m,maybe", ",inf,f,no", *["p6,7,f,NA"] * 6]
    (clinic / "bad.csv").write_text("patient_id,age,sex,ill\n" + "\n".join(rows) + "\n")
    (clinic / "bad.toml").write_text(UNIT + SCHEMA)
    done = tptopk("data", "check", "bad.csv", cwd=clinic, check=False)
    assert done.returncode == 1 and [line.strip() for line in done.stdout.splitlines()[1:-1]] == [
        "1 record has what is no number in column 'age': record 2 ('old')",
        "7 records have no label in 'ill': record 3, record 6, record 7, record 8, record 9, and 2 more",
        "1 record has a label in 'ill' that is no class: record 4 ('maybe')",
        "1 record has no 'patient_id': record 5",
    ]
    assert "not covered by any guarantee" in done.stdout


@pytest.mark.parametrize(
    "row, sound",
    [("44,f,yes", True), (",,no", True), ("inf,x,no", True), ("x,f,no", False), ("44,f,", False), ("44,f,Yes", False)],
)
def test_a_table_has_faults_where_reading_refuses_it(tmp_path, row, sound):
    path, schema = tmp_path / "t.csv", schema_of(target="ill", classes=["no", "yes"], numeric={"age": [0, 120]}, categories={"sex": ["f", "m"]})  # fmt: skip
    path.write_text(f"age,sex,ill\n44,f,yes\n{row}\n")
    assert bool(faults(path, schema)) != sound
    with nullcontext() if sound else pytest.raises(Refusal):
        read_with(path, schema)
