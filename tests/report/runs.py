"""Small run folders to report on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import tptopk

BAD = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">'\"&\x00"


def make_run(
    folder: Path, method: str = "tp-topk", *, seed: int | None = None, delta: float = 1e-4, **config: object
) -> Path:
    """A run of nobody's data: 60 steps on 200 made-up records."""
    torch.manual_seed(0)
    x = torch.rand(200, 6) - 0.5
    data = (x, (x[:, 0] > 0).long())
    others = torch.rand(50, 6) - 0.5
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    plan = tptopk.Plan.calibrate(
        method, epsilon=8.0, delta=delta, batch_size=50, dataset_size=200, steps=60, warmup=0.4, accountant="rdp"
    )
    tptopk.fit(
        model,
        data,
        plan,
        torch.optim.SGD(model.parameters(), lr=0.5),
        loss=nn.functional.cross_entropy,
        test_set=(others, (others[:, 0] > 0).long()),
        out=folder,
        seed=seed,
        config={"score": "paper", **config},
    )
    return folder


def row(document: str, *cells: str) -> list[str]:
    """The one table row that begins with these cells."""
    begins = "| " + " | ".join(cells) + " |"
    (found,) = (line for line in document.splitlines() if line.startswith(begins))
    return [part.strip() for part in found.strip("|").split("|")]
