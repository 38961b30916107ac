"""How the time and memory of a private step grow: with the batch, the coordinates, the active ones, the positions.

Each curve changes one size over at least two decades and holds the others. Its exponent is the slope of a straight
line through the logarithms, over the whole range and over the upper half of it, where fixed costs no longer count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tptopk.experiments import bench
from tptopk.gradients.memory import peak_bytes
from tptopk.gradients.precision import computing_in
from tptopk.models import networks
from tptopk.supports.support import Support


@dataclass(frozen=True)
class Curve:
    """One size, what was measured at each of its values, and how fast that grows."""

    size: str  # in words: what changes
    held: str  # and what does not
    values: list[int]
    milliseconds: list[float]
    peak_bytes: list[int]
    time_exponents: tuple[float, float]  # over all values, over the upper half
    memory_exponents: tuple[float, float]


# network, its inputs, support (None: all), batch
Built = tuple[nn.Module, Callable[[int], Tensor], Support | None, int]


class Tokens(nn.Module):
    """Two linear layers at every one of T positions, then their mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        return self.head(self.layers(x).mean(1))  # type: ignore[no-any-return]


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))


def _subjects(large: bool) -> Iterator[tuple[str, str, dict[int, Callable[[], Built]]]]:
    def images(n: int) -> Tensor:
        return torch.rand(n, 3, 32, 32)

    def at_batch(batch: int) -> Built:
        return networks.cnn(), images, None, batch

    def at_width(width: int) -> Built:
        return _mlp(width), lambda n: torch.rand(n, width), None, 256 if large else 64

    def at_active(active: int) -> Built:
        model = networks.cnn()
        ratio = active / sum(p.numel() for p in model.parameters())
        return model, images, bench.random_support(model, ratio), 256 if large else 16

    def at_positions(positions: int) -> Built:
        width = 256 if large else 64
        return Tokens(width), lambda n: torch.rand(n, positions, width), None, 64 if large else 16

    batches = [16, 64, 256, 1024, 4096] if large else [1, 4, 16, 64, 128]
    widths = [64, 128, 256, 512, 1024, 2048] if large else [32, 64, 128, 256, 512]
    actives = [1_000, 5_000, 25_000, 125_000, 500_000]
    positions = [8, 32, 128, 512, 2048] if large else [4, 16, 64, 256, 512]
    count = {w: sum(p.numel() for p in _mlp(w).parameters()) for w in widths}
    yield "batch size B", "CNN, dense", {b: lambda b=b: at_batch(b) for b in batches}  # type: ignore[misc]
    yield "coordinates d", "MLP, dense", {count[w]: lambda w=w: at_width(w) for w in widths}  # type: ignore[misc]
    yield "active coordinates k", "CNN", {k: lambda k=k: at_active(k) for k in actives}  # type: ignore[misc]
    yield "positions T", "linear layers, dense", {t: lambda t=t: at_positions(t) for t in positions}  # type: ignore[misc]


def curves(device: str, rounds: int, precision: str = "tf32") -> list[Curve]:
    place = bench.device_called(device)
    return [
        _curve(size, held, values, place, rounds, precision) for size, held, values in _subjects(place.type == "cuda")
    ]


def _curve(
    size: str, held: str, values: dict[int, Callable[[], Built]], place: torch.device, rounds: int, precision: str
) -> Curve:
    times, peaks = [], []
    for build in values.values():
        torch.manual_seed(0)
        model, inputs, support, batch = build()
        model = model.to(place).train()
        support = Support.full(model) if support is None else support.to(place)
        data = inputs(batch).to(place), torch.randint(0, 10, (batch,)).to(place)
        with computing_in(precision, place):
            step = bench.private_step(model, lambda data=data: data, support, precision=precision)  # type: ignore[misc]
            peak = [peak_bytes(step, place) for _ in range(bench.WARM_UP)]
            spent = [bench.timed(step, place) for _ in range(rounds)]
        times.append(1e3 * (median(spent) if place.type == "cuda" else min(spent)))
        peaks.append(max(peak))
    return Curve(
        size, held, list(values), [round(t, 3) for t in times], peaks, _exponents(values, times), _exponents(values, peaks)
    )  # fmt: skip


def _exponents(values: dict[int, Any], measured: list[float] | list[int]) -> tuple[float, float]:
    x, y = np.log(list(values)), np.log(np.maximum(measured, 1e-9))
    half = len(x) // 2
    return round(float(np.polyfit(x, y, 1)[0]), 2), round(float(np.polyfit(x[half:], y[half:], 1)[0]), 2)


def as_rows(found: list[Curve]) -> list[dict[str, Any]]:
    return [asdict(curve) for curve in found]
