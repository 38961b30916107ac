"""The command line with runs that were stopped: they can be read, and each is told how it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import torch

from tests.test_cli import QUICK
from tptopk.privacy.plan import Plan
from tptopk.training.trainer import fit


def test_ctrl_c_leaves_a_readable_run(tptopk, tmp_path):
    running = subprocess.Popen(
        [sys.executable, "-m", "tptopk", "train", "--accountant", "rdp", "--steps", "100000", "--out", "run"],
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job put into the background ignores it
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size > 500) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(running.pid, signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 130 and "interrupted" in stderr and "Traceback" not in stderr
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["status"] == "interrupted" and 0 < run["epsilon"] < 3
    assert len(tptopk("predict", "run", cwd=tmp_path).stdout.splitlines()) == 361


def stopped_in_python(folder, **options):
    """A run of `fit` on 1,437 made-up records, the number of the embedded digits, that is interrupted after its second step."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    plan = Plan.calibrate(
        "dp-sgd", epsilon=3.0, delta=1e-5, batch_size=100, dataset_size=1437, steps=6, accountant="rdp"
    )

    def stop(record):
        if record.step == 2:
            raise KeyboardInterrupt

    given = {"loss": torch.nn.functional.cross_entropy, "out": folder, "on_step": stop, **options}
    records = torch.zeros(1437, 1, 8, 8), torch.arange(1437) % 10
    with contextlib.suppress(KeyboardInterrupt):
        fit(model, records, plan, torch.optim.SGD(model.parameters(), lr=0.1), **given)


def test_a_run_begun_in_python_is_resumed_in_python(tptopk, tmp_path):
    stopped_in_python(tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    refused = tptopk("train", "--resume", "run", cwd=tmp_path, check=False)
    assert refused.returncode == 2 and "begun in Python" in refused.stderr
    assert "tptopk.fit(…, out='run', resume=True)" in refused.stderr
    again = tptopk("train", *QUICK, "--out", "run", cwd=tmp_path, check=False)
    assert again.returncode == 2 and "tptopk.fit(…, out='run', resume=True)" in again.stderr
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    stopped_in_python(tmp_path / "done", on_step=None)
    finished = tptopk("train", "--resume", "done", "--epsilon", "1", cwd=tmp_path, check=False)
    assert "is finished" in finished.stderr and "another folder" in finished.stderr
    for words in (["train", "--resume", "runn"], ["predict", "runn"], ["verify", "runn"]):
        assert "there is no run in runn; did you mean run?" in tptopk(*words, cwd=tmp_path, check=False).stderr


def test_where_a_run_of_the_command_line_is_the_command_to_go_on_is_named(tptopk, tmp_path, monkeypatch):
    tptopk("train", *QUICK, "--out", "run", cwd=tmp_path)
    assert "it is finished: choose another folder" in tptopk("train", "--out", "run", cwd=tmp_path, check=False).stderr
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))  # as after kill -9
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**summary, "status": "running"}))
    for words in (["predict", "run"], ["train", "--out", "run"], ["statement", "run"], ["verify", "run", "--json"]):
        done = tptopk(*words, cwd=tmp_path, check=False)
        assert "tptopk train --resume run" in done.stdout + done.stderr, words
