"""One process beside two on the same step of the CNN, and the numbers each phase sends: python benchmarks/scaling.py

The sample is the whole dataset at every step (q = 1), so that all steps do the same work. One and two processes take turns; the
least time of a step counts, and beside it the processor time of the first process, which waiting and other programs do not
lengthen. Each process has one thread; gloo.
"""

import argparse
import json
import os
import subprocess
import sys
import time

import torch
from torch.nn import functional as F

import tptopk
from tptopk.models.networks import cnn
from tptopk.training import distributed, trainer

STEPS = 12


def one(batch: int) -> None:
    """Train a few steps in this process, of however many; the first one prints seconds and numbers for each step."""
    torch.set_num_threads(1)
    torch.manual_seed(
        0
    )  # the probe refuses this network for a few initial weights (near ties in max pooling); not for these
    teams = []

    class Team(distributed.Team):
        def __init__(self) -> None:
            super().__init__()
            teams.append(self)

    trainer.Team = Team  # the team that `fit` makes, kept to be read
    ends, work, sent = [], [], []

    def look(record) -> None:
        ends.append(time.perf_counter())
        work.append(time.process_time())
        sent.append(teams[-1].numbers_sent)

    data = torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
    plan = tptopk.Plan.calibrate("tp-topk", epsilon=8.0, delta=1e-5, batch_size=batch, dataset_size=batch, steps=STEPS,
                                 active_ratio=0.1, warmup=0.5, accountant="rdp")  # fmt: skip
    with distributed.launched("cpu"):
        model = cnn()
        run = tptopk.fit(model, data, plan, torch.optim.SGD(model.parameters(), lr=0.01), loss=F.cross_entropy,
                         on_step=look)  # fmt: skip
    if ends:
        steps = [
            {
                "phase": record.phase,
                "seconds": ends[i] - ends[i - 1],
                "work": work[i] - work[i - 1],
                "sent": sent[i] - sent[i - 1],
            }
            for i, record in enumerate(run.history)
            if i > 0 and record.phase == run.history[i - 1].phase
        ]
        print(json.dumps({"steps": steps, "coordinates": run.support.total, "active": run.support.size}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--one", action="store_true", help="what the processes that this script starts are told")
    given = parser.parse_args()
    if given.one:
        one(given.batch)
        return
    found: dict[tuple[int, int], list[dict]] = {}
    for _ in range(given.rounds):
        for processes in (1, 2):
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", __file__]
            done = subprocess.run(
                [sys.executable, *launch, "--one", "--batch", str(given.batch)],
                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            told = json.loads(done.stdout.splitlines()[-1])
            for step in told["steps"]:
                found.setdefault((processes, step["phase"]), []).append(step)
    print(f"cnn, d = {told['coordinates']:,}, k = {told['active']:,}, batch {given.batch}, torch {torch.__version__}")
    for phase, name in enumerate(("warm-up", "sparse")):
        for n in (1, 2):
            steps = found[n, phase]
            seconds, work = (1000 * min(step[key] for step in steps) for key in ("seconds", "work"))
            (sent,) = {step["sent"] for step in steps}
            print(
                f"{name}, {n} process(es): {seconds:.0f} ms a step, {work:.0f} ms of processor time, {sent:,} numbers sent"
            )


if __name__ == "__main__":
    main()
