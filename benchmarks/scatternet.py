"""The whole of a CIFAR-10 run on scattering features, timed: 366 private steps of batch 8192 on the ScatterNet CNN.

    python benchmarks/scatternet.py [--device cuda] [--compile] [--steps 366]

Features are random numbers of the right shape ([50000, 243, 8, 8], 3.1 GB on the device): only time is measured. The
median step is that of replayed steps; `all_steps_s` counts recording too, and `with_start_s` everything that `fit` does.
"""

import argparse
import json
import time
from itertools import pairwise

import torch
from torch.nn import functional as F

from tptopk import Plan, fit
from tptopk.models.networks import scatter_cnn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=366)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--batch-size", type=int, default=8192)
    given = parser.parse_args()
    torch.manual_seed(0)
    x = torch.rand(given.records, 243, 8, 8, device=given.device)
    y = torch.randint(0, 10, (given.records,), device=given.device)
    for method in ("dp-sgd", "tp-topk"):
        plan = Plan.calibrate(
            method, epsilon=3.0, delta=1e-5, batch_size=given.batch_size, dataset_size=given.records, steps=given.steps,
            active_ratio=0.1, clip_norm=0.1, accountant="rdp",
        )  # fmt: skip
        model = scatter_cnn().to(given.device)
        ends: list[float] = []
        started = time.perf_counter()
        fit(
            model, (x, y), plan, torch.optim.SGD(model.parameters(), lr=4.0, momentum=0.9), loss=F.cross_entropy,
            compile=given.compile, on_step=lambda record, ends=ends: ends.append(time.perf_counter()),
        )  # fmt: skip
        steps = sorted(b - a for a, b in pairwise(ends))
        usual = steps[len(steps) // 2]
        print(
            json.dumps({
                "method": method, "compiled": given.compile, "steps": given.steps, "batch_size": given.batch_size,
                "median_step_ms": round(1e3 * usual, 3), "steps_x_median_s": round(given.steps * usual, 3),
                "all_steps_s": round(ends[-1] - ends[0], 3), "with_start_s": round(time.perf_counter() - started, 3),
            })
        )  # fmt: skip


if __name__ == "__main__":
    main()
