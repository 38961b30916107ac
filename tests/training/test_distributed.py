"""Several processes train one model as one process does: same sums, one noise, nothing uncounted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tptopk
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.randomness import Streams
from tptopk.training.distributed import Team
from tptopk.training.verify import verify

RECORDS = 60


def begin(folder: Path, processes: int, action) -> list[int]:
    """Run action(rank) in so many processes of one group; what it returns or raises is in RANK.json."""
    folder.mkdir(exist_ok=True)
    children = []
    for rank in range(processes):
        child = os.fork()
        if child:
            children.append(child)
            continue
        found, code = {}, 1
        try:
            torch.set_num_threads(1)
            meeting, patience = f"file://{folder}/meeting", timedelta(seconds=60)
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes, timeout=patience)
            found, code = action(rank) or {}, 0
        except BaseException as error:
            found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
        finally:
            (folder / f"{rank}.json").write_text(json.dumps(found))
            os._exit(code)
    return children


def end(folder: Path, children: list[int]) -> list[dict]:
    for child in children:
        os.waitpid(child, 0)
    (folder / "meeting").unlink(missing_ok=True)
    return [
        json.loads((folder / f"{rank}.json").read_text()) if (folder / f"{rank}.json").exists() else {}
        for rank in range(len(children))
    ]


def together(folder: Path, processes: int, action) -> list[dict]:
    found = end(folder, begin(folder, processes, action))
    assert not any("error" in one for one in found), found
    return found


def data(records: int = RECORDS):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(records, 8, generator=generator), torch.arange(records) % 3


def plan(method, *, epsilon=3.0, records=RECORDS, batch=12, active_ratio=0.4):
    return Plan.calibrate(
        method, epsilon=epsilon, delta=1e-5, batch_size=batch, dataset_size=records, steps=12, accountant="rdp",
        active_ratio=active_ratio,
    )  # fmt: skip


def train(rank, method, *, numbers=None, train_set=None, **options):
    torch.manual_seed(rank)  # other initial weights in every process: the first one's count
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    numbers = numbers or plan(method)
    run = tptopk.fit(model, train_set or data(), numbers, optimizer, loss=F.cross_entropy, **options)
    return {"weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), "epsilon": run.epsilon}


def without_noise(monkeypatch):
    monkeypatch.setattr(Streams, "normal", lambda self, shape, device, *place: torch.zeros(shape, device=device))


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk", "tp-rand", "on-topk", "non-private"])
@pytest.mark.filterwarnings("ignore::tptopk.privacy.plan.PrivacyWarning")
def test_two_processes_without_noise_are_one_process(tmp_path, method, monkeypatch):
    without_noise(monkeypatch)
    alone = train(0, method, seed=7)
    pair = together(tmp_path, 2, lambda rank: train(rank, method, seed=7))
    one, two = (torch.tensor(found["weights"], dtype=torch.float64) for found in (alone, pair[0]))
    assert (one - two).norm() <= 1e-6 * one.norm()
    assert pair[0]["weights"] == pair[1]["weights"], "all processes are equal to the bit"
    assert pair[0]["epsilon"] == alone["epsilon"]


def test_noise_is_drawn_once_and_has_its_variance(tmp_path):
    """2,000 coordinates × 10 steps without signal: the variance is within 4.9 standard errors, once in a million beyond."""
    phase = Phase(steps=10, sample_rate=0.5, noise_multiplier=3.0, clip_norm=0.5)
    numbers = Plan(phases=(phase,), delta=1e-5, dataset_size=40, accountant="rdp")

    def action(rank):
        model, released = nn.Linear(1000, 2, bias=False), []
        tptopk.fit(
            model, torch.zeros(40, 1000), numbers, torch.optim.SGD(model.parameters(), lr=1.0),
            loss=lambda model, batch: model(batch).square().sum(1),  # records of zeros have no gradient
            on_private_gradient=lambda g: released.append(g.values["weight"].flatten() / g.noise_std),
        )  # fmt: skip
        return {
            "weights": model.weight.flatten().tolist(),
            "released": torch.cat(released).tolist() if released else [],
        }

    found = together(tmp_path, 3, action)
    assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"] and not found[1]["released"]
    values = torch.tensor(found[0]["released"], dtype=torch.float64)
    assert len(values) == 20_000 and abs(float(values.square().mean()) - 1) < 4.9 * (2 / len(values)) ** 0.5


def test_the_sparse_phase_sends_k_numbers(tmp_path, monkeypatch):
    teams = []
    honest = Team.__init__
    monkeypatch.setattr(Team, "__init__", lambda self: (honest(self), teams.append(self))[0])

    def sent(rank, method):
        teams.clear()
        train(rank, method, numbers=plan(method, active_ratio=0.1))
        return teams[0].numbers_sent

    found = together(tmp_path, 2, lambda rank: {"dense": sent(rank, "dp-sgd"), "sparse": sent(rank, "on-rand")})
    total = 8 * 20 + 20 + 20 * 3 + 3
    assert found[0]["dense"] == 12 * 2 * total
    assert found[0]["sparse"] <= 0.11 * found[0]["dense"], "at ρ = .1 a tenth is sent, to the first process and back"


def test_more_processes_than_records(tmp_path):
    tiny = plan("dp-sgd", records=2, batch=1)
    found = together(tmp_path, 3, lambda rank: train(rank, "dp-sgd", numbers=tiny, train_set=data(2)))
    assert found[0]["weights"] == found[2]["weights"]


@pytest.mark.parametrize("draws", [lambda: torch.randn(()), np.random.default_rng().standard_normal])
def test_records_that_are_drawn_anew_whenever_they_are_read_are_not_taken_for_others(tmp_path, draws):
    class Augmented(torch.utils.data.Dataset):
        def __len__(self):
            return RECORDS

        def __getitem__(self, i):
            return data()[0][i] + 0.01 * float(draws()), data()[1][i]

    found = together(tmp_path, 2, lambda rank: train(rank, "dp-sgd", train_set=Augmented()))
    assert found[0]["weights"] == found[1]["weights"]


def test_what_one_process_refuses_all_refuse(tmp_path):
    def other_data(rank):
        train(rank, "dp-sgd", train_set=data(RECORDS + rank), out=tmp_path / "run")

    found = end(tmp_path / "a", begin(tmp_path / "a", 2, other_data))
    assert "has 61" in found[1]["error"] and "could not begin" in found[0]["error"]
    assert not (tmp_path / "run").exists()
    found = end(tmp_path / "d", begin(tmp_path / "d", 2, lambda rank: train(rank, "dp-sgd", train_set=data(61))))
    assert found[0]["error"].startswith("Refusal: ") and found[1]["error"].startswith("SaidElsewhere: "), found
    plans = [plan("dp-sgd"), plan("dp-sgd", epsilon=2.0)]
    found = end(tmp_path / "b", begin(tmp_path / "b", 2, lambda rank: train(rank, "dp-sgd", numbers=plans[rank])))
    assert all("different plans" in one["error"] or "could not begin" in one["error"] for one in found), found
    shuffled = [data(), tuple(part[torch.randperm(RECORDS)] for part in data())]
    found = end(tmp_path / "e", begin(tmp_path / "e", 2, lambda rank: train(rank, "dp-sgd", train_set=shuffled[rank])))
    assert "hold different records" in found[1]["error"] and "could not begin" in found[0]["error"], found
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "ledger.jsonl").write_text("")
    out = tmp_path / "taken"
    found = end(tmp_path / "c", begin(tmp_path / "c", 2, lambda rank: train(rank, "dp-sgd", out=out)))
    assert "already holds" in found[0]["error"] and "could not begin" in found[1]["error"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_stops_the_run_and_loses_no_charge(tmp_path, victim):
    out, witness = tmp_path / "run", tmp_path / "witness"

    def action(rank):
        def saw(gradient):
            with witness.open("a") as file:
                file.write(".")

        train(
            rank,
            "tp-topk",
            out=out,
            checkpoint_every=2,
            on_private_gradient=saw,
            on_step=lambda record: time.sleep(0.2),
        )

    children = begin(tmp_path / "a", 2, action)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (witness.exists() and len(witness.read_text()) >= 4):
        time.sleep(0.02)
    os.kill(children[victim], signal.SIGKILL)
    found = end(tmp_path / "a", children)
    assert "error" in found[1 - victim], "the other one stops"
    seen = len(witness.read_text())
    assert sum(read_ledger(out / "ledger.jsonl").charged.values()) >= seen >= 4
    assert verify(out).epsilon <= 3.0

    def again(rank):
        warnings.simplefilter("ignore")  # steps that were lost are dropped, and that is said
        return train(rank, "tp-topk", out=out, checkpoint_every=2, resume=True)

    found = together(tmp_path / "b", 2, again)
    assert found[0]["weights"] == found[1]["weights"] and found[0]["epsilon"] <= 3.0 and verify(out).holds


@pytest.mark.slow
def test_torchrun_trains_from_the_command_line(tmp_path):
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tptopk", "train",
            "--accountant", "rdp", "--steps", "6", "--out", "run", "--json",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1 and json.loads(lines[0])["status"] == "finished"
    assert verify(tmp_path / "run").holds


def test_annealing_is_for_one_process(tmp_path):
    settings = tptopk.Annealing()
    numbers = Plan.calibrate(
        "dp-sgd", epsilon=3.0, delta=1e-5, batch_size=12, dataset_size=RECORDS, steps=12, accountant="rdp",
        queries=settings.queries(12, 0.2),
    )  # fmt: skip
    found = end(tmp_path, begin(tmp_path, 2, lambda rank: train(rank, "dp-sgd", numbers=numbers, annealing=settings)))
    assert all("train it in one process" in one["error"] for one in found)


@pytest.mark.slow
def test_a_refusal_under_torchrun_is_said_once_and_again_in_its_summary(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tptopk", "train"]
    done = subprocess.run([*command, "--epsilon", "0"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and done.stderr.count("error: epsilon is 0") == 1
    assert "Refusal: epsilon is 0" in done.stderr[done.stderr.index("Root Cause") :]
