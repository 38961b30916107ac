"""What the command line says at once, and in which order: nobody should wait to be told of a typo."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest

from tptopk.cli import running
from tptopk.cli.loading import COMMANDS, command_named
from tptopk.cli.options import GROUPS
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal
from tptopk.settings import Settings
from tptopk.supports.advice import LEVEL

AT_ONCE = """
import sys
from tptopk.cli import main
for words in {words}:
    sys.argv = ["tptopk", *words]
    try:
        main()
    except SystemExit as ended:
        print("exit", ended.code)
print("heavy", sorted(dict.fromkeys(("torch", "scipy", "dp_accounting", "sklearn")) & sys.modules.keys()))
"""


def test_versions_help_and_typos_do_not_wait_for_pytorch(tmp_path):
    wrong = [["trian"], ["train", "--epsilom", "3"], ["compare", "--method", "dp-sgd"], ["plan", "--device", "cpu"]]
    wrong += [["verify", "nowhere"], ["statement", "nowhere"], ["predict", "nowhere"], ["advise", "nowhere"]]
    helped = [[name, "--help"] for name in COMMANDS]
    words = [["--version"], ["--help"], ["data", "check", "--help"], *helped, *wrong]
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE.format(words=words)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("exit 0") == len(words) - len(wrong) and done.stdout.count("exit 2") == len(wrong)
    assert "verify [OPTIONS] RUN\n" in done.stdout and "advise [OPTIONS] [RUN]\n" in done.stdout
    assert "Did you mean 'train'" in done.stderr and "--epsilon" in done.stderr and "--methods" in done.stderr
    assert done.stdout.endswith("heavy []\n") and done.stderr.count("there is no run in nowhere") == 4


def test_everything_public_is_there_when_it_is_asked_for():
    import tptopk

    assert all(getattr(tptopk, name) is not None for name in tptopk.__all__) and set(tptopk.__all__) <= set(dir(tptopk))
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        tptopk.fitt  # noqa: B018


def test_advice_has_one_usual_level_on_the_command_line_and_in_python():
    (level,) = (parameter for parameter in command_named("advise").params if parameter.name == "level")
    assert level.default == LEVEL


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_its_own_and_is_not_cut_off(name):
    line = COMMANDS[name][1]
    assert len(line) <= 45 and command_named(name).help.splitlines()[0] == line
    for inner in getattr(command_named(name), "commands", {}).values():
        assert len(inner.help.splitlines()[0]) <= 45


def test_every_setting_stands_in_one_group_of_the_help():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(f.name for f in fields(Settings))


def test_options_stand_in_groups_and_a_command_has_those_it_reads(tptopk, tmp_path):
    shown = tptopk("train", "--help", cwd=tmp_path).stdout
    titles = [f"\n{title}:\n" for title in ("Privacy budget", "Data", "Model and training", "Machine", "Options")]
    places = [shown.index(title) for title in titles]
    assert places == sorted(places) and "(tp-topk)" not in shown and "[tp-topk]" in shown
    assert shown.index("\nData:") < shown.index("\n  --data ") < shown.index("\nModel and training:")
    assert not {"--device", "--ema", "--learning-rate"} & set(tptopk("plan", "--help", cwd=tmp_path).stdout.split())


@pytest.fixture
def no_calibration(monkeypatch):
    def never(*given, **named):
        raise AssertionError("calibrated before a cheap check")

    monkeypatch.setattr(Plan, "calibrate", never)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "taken"], "already holds a run"),
        (["--data", "nowhere.npz", "--dataset-size", "9", "--batch-size", "3", "--model", "net:build"], "nowhere.npz"),
        (["--data", "table.csv", "--dataset-size", "9", "--batch-size", "3"], "schema"),
        (["--account", "nowhere.account"], "nowhere.account"),
        (["--model", "net:normed"], "return tptopk.fix(model)"),
        (["--optimizer", "sdg"], "did you mean 'sgd'"),
        (["--epsilon", "0"], "epsilon is 0"),
        (["--accountant", "pdl"], "did you mean 'pld'"),
        (["--secure-noise"], "cryptography"),
    ],
)
def test_what_is_cheap_to_check_is_checked_before_the_calibration(
    tptopk, tmp_path, no_calibration, monkeypatch, words, message
):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "run.json").write_text("{}")
    (tmp_path / "table.csv").write_text("age,ill\n30,no\n")
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Linear(2, 2)\n"
        "def normed():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.BatchNorm1d(9), nn.Linear(9, 10))\n"
    )
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)  # as if it were not installed
    done = tptopk("train", *words, cwd=tmp_path, check=False)
    assert done.returncode == 2 and message in done.stderr
    if words[0] in ("--out", "--account", "--epsilon"):
        done = tptopk("advise", *words, cwd=tmp_path, check=False)
        assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_long_calibration_is_said_in_the_words_of_the_command_line(tptopk, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "PATIENCE", 0.0)
    done = tptopk("plan", "--steps", "10", "--coordinates", "9", cwd=tmp_path)
    assert "calibrating" in done.stderr and "--accountant rdp" in done.stderr
    done = tptopk("plan", "--steps", "10", "--coordinates", "9", "--accountant", "rdp", cwd=tmp_path)
    assert "--accountant" not in done.stderr


def test_what_a_comparison_costs_is_said_before_its_first_run(tptopk, tmp_path, monkeypatch):
    def stop(*given, **named):
        raise Refusal("here the first run would begin")

    monkeypatch.setattr(running, "train", stop)
    x, y = np.zeros((9, 2), np.float32), np.arange(9) % 2
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    words = ["--data", "mine.npz", "--dataset-size", "9", "--batch-size", "3", "--steps", "9", "--accountant", "rdp"]
    done = tptopk("compare", *words, "--delta", "0.01", cwd=tmp_path, check=False)
    assert done.stderr.index("none may be released") < done.stderr.index("the first run would begin")
