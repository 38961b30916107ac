"""The command line, as a stranger would use it: in an empty folder, with typos, without data, piped, interrupted."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from tests.data.made import make_image, make_medmnist
from tptopk.cli.loading import COMMANDS, command_named
from tptopk.data.files import read_archive
from tptopk.training.loading import load

QUICK = ["--accountant", "rdp", "--steps", "10"]
NETWORK = """
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))

def other():
    return nn.Sequential(nn.Flatten(), nn.Linear(13, 3))

def broken():
    return 3

def needy(width):
    return nn.Linear(width, 3)
"""


@pytest.fixture
def own(tmp_path):
    """A folder with somebody's own data and network."""
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((90, 3, 4)).astype(np.float32), generator.integers(0, 3, 90)
    np.savez(tmp_path / "mine.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    np.savez(tmp_path / "no_test.npz", x_train=x, y_train=y)
    np.savez(tmp_path / "no_labels.npz", x_train=x)
    np.savez(tmp_path / "pickled.npz", x_train=np.array([{}, {}], dtype=object), y_train=y[:2])
    (tmp_path / "mynet.py").write_text(NETWORK)
    return tmp_path


def test_train_writes_a_run_and_prints_what_it_cost(tptopk, tmp_path):
    done = tptopk("train", *QUICK, cwd=tmp_path)
    for word in ("test accuracy", "ε", "δ", "σ₁", "σ₂", "k/d", "runs/tp-topk-1"):
        assert word in done.stdout
    said = done.stderr.removeprefix("calibrating the noise …\n")  # on a slow machine
    assert said == "", "nothing but the result when piped"
    names = {p.name for p in (tmp_path / "runs" / "tp-topk-1").iterdir()}
    assert names == {
        "run.json",
        "plan.json",
        "ledger.jsonl",
        "metrics.jsonl",
        "support.safetensors",
        "model.safetensors",
        "statement.md",
        "warmup.safetensors",
    }
    tptopk("train", *QUICK, cwd=tmp_path)
    assert (tmp_path / "runs" / "tp-topk-2").is_dir()
    predicted = tptopk("predict", "runs/tp-topk-1", cwd=tmp_path).stdout.splitlines()
    assert predicted[0] == "record,class,probability" and len(predicted) == 361
    again = load("runs/tp-topk-1")
    assert again.status == "finished" and again.support.size == 2020
    assert "differential privacy" in tptopk("statement", "runs/tp-topk-1", cwd=tmp_path).stdout


def test_json_is_one_object(tptopk, tmp_path):
    done = tptopk("train", *QUICK, "--json", "--seed", "1", "--out", "here", cwd=tmp_path)
    run = json.loads(done.stdout)
    assert run["status"] == "finished" and run["folder"] == "here" and run["facts"]["seeded"]
    plan = json.loads(tptopk("plan", *QUICK, "--json", cwd=tmp_path).stdout)
    assert plan["phases"][1]["noise_energy"] == pytest.approx(0.4 * plan["phases"][1]["noise_energy_if_dense"])
    assert plan["epsilon"]["pld"] <= plan["epsilon"]["rdp"] <= plan["epsilon"]["rdp-paper"]


def test_all_but_predict_and_data_speak_json(tptopk, tmp_path):
    opened = json.loads(tptopk("account", "open", "a.account", "--epsilon", "6", "--json", cwd=tmp_path).stdout)
    assert opened["epsilon"] == 6 and opened["runs"] == []
    for name in set(COMMANDS) - {"predict", "data"}:
        command = command_named(name)
        for one in getattr(command, "commands", {name: command}).values():
            assert "--json" in {option for parameter in one.params for option in parameter.opts}, one.name


def test_plan_touches_no_data(tptopk, tmp_path):
    done = tptopk(
        "plan", "--data", "nowhere.npz", "--dataset-size", "5000", "--coordinates", "1000000", *QUICK, cwd=tmp_path
    )
    assert "d = 1,000,000" in done.stdout and "400,000" in done.stdout


def test_a_plan_that_leaves_no_coordinate_is_refused_as_training_refuses_it(tptopk, tmp_path, monkeypatch):
    def calibrate(**numbers):
        raise AssertionError("it is refused before the noise is worked out")

    monkeypatch.setattr("tptopk.privacy.plan.Plan.calibrate", calibrate)
    said = []
    for words in (["plan"], ["plan", "--coordinates", "5050"], ["train"]):
        done = tptopk(*words, *QUICK, "--active-ratio", "0.00001", cwd=tmp_path, check=False)
        assert done.returncode == 2 and not done.stdout
        said.append(done.stderr)
    assert len(set(said)) == 1 and "leaves k = 0 of d = 5050 coordinates" in said[0]


def test_own_data_and_model(tptopk, own):
    words = [
        "--data",
        "mine.npz",
        "--dataset-size",
        "60",
        "--model",
        "mynet:build",
        "--batch-size",
        "20",
        "--delta",
        "1e-3",
    ]
    tptopk("train", *QUICK, *words, "--out", "run", cwd=own)
    predicted = tptopk("predict", "run", "--data", "mine.npz", "--model", "mynet:build", cwd=own).stdout
    assert len(predicted.splitlines()) == 31
    assert tptopk("predict", "run", "--data", "mine.npz", cwd=own).stdout == predicted, (
        "the run names a file of this folder"
    )
    refused = tptopk("predict", "run", cwd=own, check=False)
    assert refused.returncode == 2 and "give --data" in refused.stderr
    rows = json.loads(
        tptopk(
            "compare",
            *QUICK,
            *words,
            "--seeds",
            "2",
            "--methods",
            "dp-sgd,on-rand,non-private",
            "--plot",
            "figure.png",
            "--json",
            cwd=own,
        ).stdout
    )["rows"]
    assert [row["method"] for row in rows] == ["dp-sgd", "on-rand", "non-private"]
    assert all(len(row["accuracies"]) == 2 for row in rows) and rows[2]["epsilon"] is None
    assert (own / "figure.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("value", [1e300, -1e-300, np.inf, np.nan])
def test_what_train_says_does_not_depend_on_one_record(tptopk, tmp_path, value):
    """Two files that differ in one record; the numbers of either are float64."""
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((60, 3, 4)), generator.integers(0, 3, 60)
    (tmp_path / "mynet.py").write_text(NETWORK)
    words = ["--dataset-size", "60", "--model", "mynet:build", "--batch-size", "20", "--delta", "1e-3", "--seed", "0"]
    said = []
    for first in (0.5, value):
        x[0, 0, 0] = first
        np.savez(tmp_path / "mine.npz", x_train=x, y_train=y)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read_archive(tmp_path / "mine.npz")
        done = tptopk("train", *QUICK, *words, "--data", "mine.npz", "--out", f"run{first}", cwd=tmp_path)
        said.append((done.stderr.removeprefix("calibrating the noise …\n"), [str(w.message) for w in caught]))
    assert said[0] == said[1]


def test_a_config_file_says_the_same_words(tptopk, own):
    (own / "run.toml").write_text('method = "dp-sgd"\nactive-ratio = 0.5\nsteps = 4\naccountant = "rdp"\nepsilon = 2\n')
    values = json.loads(tptopk("plan", "--config", "run.toml", "--epsilon", "5", "--json", cwd=own).stdout)
    assert values["method"] == "dp-sgd" and values["phases"][0]["steps"] == 4
    assert 5 * 0.999 <= values["epsilon"]["rdp"] <= 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--metod", "dp-sgd"], "--method"),
        (["trian"], "train"),
        (["train", "--method", "dpsgd"], "did you mean 'dp-sgd'"),
        (["train", "--unit", "patient_id"], 'unit = "patient_id"'),
        (["train", "--epsilon", "0"], "epsilon is 0"),
        (["train", "--epsilon", "nan"], "epsilon is nan"),
        (["train", "--epsilon", "three"], "--epsilon"),
        (["train", "--delta", "2"], "delta is 2"),
        (["train", "--active-ratio", "0"], "active_ratio is 0"),
        (["train", "--warmup", "1"], "warmup is 1"),
        (["train", "--epochs", "3", "--steps", "3"], "not both"),
        (["train", "--steps", "0"], "steps is 0"),
        (["train", "--clip-norm", "-1"], "clip_norm is -1"),
        (["train", "--learning-rate", "0"], "learning_rate is 0"),
        (["train", "--optimizer", "sdg"], "did you mean 'sgd'"),
        (["train", "--data", "mine.npz", "--model", "mynet:build"], "--dataset-size"),
        (
            ["train", "--data", "nowhere.npz", "--dataset-size", "9", "--batch-size", "3", "--model", "mynet:build"],
            "there is no file nowhere.npz",
        ),
        (
            ["train", "--data", "no_labels.npz", "--dataset-size", "9", "--batch-size", "3", "--model", "mynet:build"],
            "has no y_train",
        ),
        (
            ["train", "--data", "mynet.py", "--dataset-size", "9", "--batch-size", "3", "--model", "mynet:build"],
            "cannot be read",
        ),
        (
            ["train", "--data", "pickled.npz", "--dataset-size", "9", "--batch-size", "3", "--model", "mynet:build"],
            "cannot be read",
        ),
        (
            ["train", "--data", "mine.npz", "--dataset-size", "61", "--batch-size", "9", "--model", "mynet:build"],
            "declares a dataset of 61 records",
        ),
        (["train", "--data", "mine.npz", "--dataset-size", "60", "--batch-size", "9"], "give --model FILE:FUNCTION"),
        (["plan", "--data", "mine.npz", "--dataset-size", "60"], "give --model FILE:FUNCTION"),
        (
            ["train", "--data", "mine.npz", "--dataset-size", "60", "--batch-size", "9", "--model", "mynet:other"],
            "made-up examples",
        ),
        (["train", "--model", "mynet"], "package.module:factory"),
        (["train", "--model", "nowhere:build"], "No module named 'nowhere'"),
        (["train", "--model", "mynet:buidl"], "has no function 'buidl'; did you mean 'build'"),
        (["train", "--model", "mynet.py:build"], "write it without .py: mynet:build"),
        (["train", "--model", "mynet:broken"], "not a torch.nn.Module"),
        (["train", "--model", "mynet:needy"], "needs no arguments"),
        (["train", "--config", "nowhere.toml"], "cannot read nowhere.toml"),
        (["train", "--config", "mynet.py"], "not a TOML file"),
        (["train", "--config", "typo.toml"], "did you mean 'epsilon'"),
        (["train", "--config", "type.toml"], "must be of type int"),
        (["train", "--out", "mynet.py"], "cannot write to mynet.py"),
        (["train", "--device", "cuda:77"], "cuda:77"),
        (["train", "--ema", "2"], "ema is 2"),
        (["compare", "--methods", "dp-sgd,tp-top"], "did you mean 'tp-topk'"),
        (["compare", "--seeds", "0"], "seeds is 0"),
        (["compare", "--data", "no_test.npz", "--dataset-size", "90", "--batch-size", "9"], "needs a test set"),
        (["plan", "--coordinates", "0"], "coordinates is 0"),
        (["predict", "nowhere"], "there is no run in nowhere"),
        (["statement", "nowhere"], "there is no run in nowhere"),
        (["verify", "nowhere"], "there is no run in nowhere"),
        (["advise", "nowhere"], "there is no run in nowhere"),
        (["train", "--resume", "nowhere"], "there is no run in nowhere"),
    ],
)
def test_mistakes_get_one_clear_line(tptopk, own, words, message):
    (own / "typo.toml").write_text("epsilom = 3\n")
    (own / "type.toml").write_text("steps = 2.5\n")
    done = tptopk(*words, *(["--accountant", "rdp"] if words[0] in ("train", "compare") else []), cwd=own, check=False)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""
    assert not (own / "runs").exists()


def test_benchmarks_tables_and_folders_are_named_like_files(tptopk, own, monkeypatch):
    monkeypatch.delenv("TPTOPK_DATA", raising=False)
    make_medmnist(own / "sets" / "pneumoniamnist.npz")
    (own / "table.csv").write_text("age,ill\n" + "30,no\n60,yes\n" * 30)
    (own / "table.toml").write_text('target = "ill"\nclasses = ["no", "yes"]\n[numeric]\nage = [0, 120]\n')
    for name in ("cat", "dog"):
        for i in range(10):
            make_image(own / "pets" / name / f"{i}.png", (9 + i, 9))
    (own / "nets.py").write_text(
        "from torch import nn\ndef table():\n    return nn.Linear(2, 3)\n"
        "def images():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n"
    )
    words = ["--accountant", "rdp", "--steps", "3", "--batch-size", "5", "--delta", "1e-3"]
    table = ["--data", "table.csv", "--model", "nets:table"]
    tptopk("train", *words, *table, "--dataset-size", "60", "--out", "table-run", cwd=own)
    assert len(tptopk("predict", "table-run", *table, cwd=own).stdout.splitlines()) == 61
    pets = ["--data", "pets", "--image-size", "8", "--image-mode", "L", "--model", "nets:images"]
    tptopk("train", *words, *pets, "--dataset-size", "20", "--out", "pets-run", cwd=own)
    assert len(tptopk("predict", "pets-run", *pets, cwd=own).stdout.splitlines()) == 21
    for given, message in (
        (table, "--dataset-size"),
        ([*table, "--schema", "no.toml", "--dataset-size", "60"], "cannot read the schema no.toml"),
        ([*pets[:2], *pets[-2:], "--dataset-size", "20"], "--image-size 9"),
        (["--data", "mnist", "--batch-size", "500", *pets[-2:]], "tptopk data fetch mnist --data-dir data"),
        (["--data", "mnits", "--dataset-size", "60", *pets[-2:]], "did you mean 'mnist'"),
        (
            ["--data", "pneumoniamnist", "--data-dir", "sets", "--batch-size", "500", *pets[-2:]],
            "dataset of 4708 records",
        ),
        (["--data", "mnist", "--batch-size", "500"], "give --model FILE:FUNCTION for mnist"),
    ):
        refused = tptopk("train", *words, *given, "--out", "refused", cwd=own, check=False)
        assert refused.returncode == 2 and message in refused.stderr, given
    cifar10 = ["--data", "cifar10", "--batch-size", "500", "--coordinates", "1000"]
    plan = json.loads(tptopk("plan", *QUICK, *cifar10, "--json", cwd=own).stdout)
    assert plan["dataset_size"] == 50_000, "a published size needs no declaring, and planning no data"


@pytest.mark.parametrize(
    ("empty", "words"),
    [("pictures/cat", "class folder pictures/cat holds no images"), (None, "only one class folder")],
)
def test_checking_a_folder_finds_classes_that_nothing_can_be_learnt_of(tptopk, tmp_path, empty, words):
    for number in range(3):
        make_image(tmp_path / "pictures" / "ant" / f"{number}.png")
    if empty:
        (tmp_path / empty).mkdir()
    done = tptopk("data", "check", "pictures", cwd=tmp_path, check=False)
    assert done.returncode == 1 and words in done.stdout and "nothing to report" not in done.stdout
    for name in ("cat", "dog"):
        make_image(tmp_path / "pictures" / name / "0.png")
    assert "nothing to report" in tptopk("data", "check", "pictures", cwd=tmp_path).stdout


def test_checking_data_is_the_operators_own_step(tptopk, own):
    assert "nothing to report" in tptopk("data", "check", cwd=own).stdout
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 7, -1])
    x[1, 0] = np.nan
    np.savez(own / "bad.npz", x_train=x, y_train=y)
    done = tptopk("data", "check", "bad.npz", "--classes", "3", cwd=own, check=False)
    shown = done.stdout
    assert done.returncode == 1 and "inputs that are not finite" in shown
    assert "2 records have a label that is no class and would contribute nothing to training, silently" in shown
    assert "labels are -1 to 7, 3 classes are numbered from 0 to 2" in shown
    assert "not covered by any guarantee" in shown
    (own / "table.csv").write_text("age,ill\n30,no\n30,yes\n30,yes\n")
    (own / "known.toml").write_text('target = "ill"\nclasses = ["no", "yes"]\n[numeric]\nage = [0, 120]\n')
    shown = tptopk("data", "check", "table.csv", "--schema", "known.toml", cwd=own, check=False).stdout
    assert "3 records, inputs (2,)" in shown and "column 'age' is the same in all records" in shown


def test_labels_from_one_are_said_and_a_test_set_with_them_is_refused(tptopk, own):
    x, y = np.zeros((9, 3, 4), np.float32), np.arange(9) % 3 + 1
    np.savez(own / "from_one.npz", x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])
    shown = tptopk("data", "check", "from_one.npz", cwd=own, check=False)
    assert shown.returncode == 1 and "labels start at 1; classes are numbered from 0" in shown.stdout
    words = ["--data", "from_one.npz", "--dataset-size", "9", "--batch-size", "3", "--delta", "1e-3"]
    refused = tptopk("train", *QUICK, *words, "--model", "mynet:build", "--out", "run", cwd=own, check=False)
    assert refused.returncode == 2 and "2 of 6 test records have a label that is no class" in refused.stderr
    assert not (own / "run").exists(), "nothing was charged"


def test_the_non_private_method_is_loud(tptopk, tmp_path):
    done = tptopk("train", *QUICK, "--method", "non-private", cwd=tmp_path)
    assert "NOT private" in done.stderr and "not private" in done.stdout
