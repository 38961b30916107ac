"""How long a private step takes beside an ordinary one, and beside the peers', in one process, taking turns.

A step is all of it: drawing the records, gathering them, gradients, clipping, noise, division, optimizer.
"""

from __future__ import annotations

import copy
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from tptopk.gradients.capture import Capture
from tptopk.gradients.contributions import Products, Rows
from tptopk.models import networks
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal, nearest
from tptopk.supports.selection import top_k
from tptopk.supports.support import Support, trainable
from tptopk.training.mechanism import Mechanism
from tptopk.training.updates import Updater

RECORDS = 4096
PLAN = Plan(
    phases=(Phase(steps=10**9, sample_rate=0.25, noise_multiplier=1.0, clip_norm=1.0),),
    delta=1e-5, dataset_size=RECORDS, accountant="rdp",
)  # fmt: skip

Step = Callable[[], None]


@dataclass(frozen=True)
class Subject:
    """A network, and the batch sizes it is measured at on a GPU and on a CPU."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch: dict[str, int]


def _images(records: int) -> Tensor:
    return torch.rand(records, 3, 32, 32)


def _ids(records: int) -> Tensor:
    return torch.randint(0, 50_000, (records, 128))


SUBJECTS = {
    "mlp": Subject(networks.mlp, _images, {"cuda": 1024, "cpu": 256}),
    "cnn": Subject(networks.cnn, _images, {"cuda": 1024, "cpu": 64}),
    "wrn": Subject(networks.wrn_16_4, _images, {"cuda": 256, "cpu": 16}),
    "vit": Subject(networks.vit, _images, {"cuda": 256, "cpu": 8}),
    "text": Subject(networks.text, _ids, {"cuda": 1024, "cpu": 256}),
}


@dataclass(frozen=True)
class Measured:
    """One way of taking a step of one network."""

    model: str
    way: str
    batch: int
    milliseconds: float  # on CUDA the median of wall times, on a CPU the minimum of process times
    ratio: float  # to ordinary training
    peak_bytes: int | None  # on CUDA: the most that a step took beyond what it found
    peak_ratio: float | None


def measure(name: str, device: str, rounds: int, peers: bool) -> list[Measured]:
    """All ways for one network, taking turns."""
    if name not in SUBJECTS:
        raise Refusal(f"unknown benchmark model {name!r}{nearest(name, SUBJECTS)}")
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise Refusal("there is no CUDA device on this machine; use --device cpu")
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    model = subject.build().to(place).train()
    batch = subject.batch[place.type]
    data = (subject.inputs(RECORDS).to(place), torch.randint(0, 10, (RECORDS,)).to(place))
    steps = dict(_ways(model, data, batch, peers))
    times: dict[str, list[float]] = {way: [] for way in steps}
    peaks: dict[str, int] = {}
    for step in steps.values():  # warm-up, also for lazy initialisation and autotuning
        step()
        step()
    for _ in range(rounds):
        for way, step in steps.items():
            spent, peak = _timed(step, place)
            times[way].append(spent)
            peaks[way] = peak
    best = {way: 1e3 * (median(t) if place.type == "cuda" else min(t)) for way, t in times.items()}
    cuda = place.type == "cuda"
    return [
        Measured(name, way, batch, round(best[way], 3), round(best[way] / best["ordinary"], 3), peaks[way] if cuda else None,
                 round(peaks[way] / peaks["ordinary"], 3) if cuda else None)
        for way in steps
    ]  # fmt: skip


def _timed(step: Step, place: torch.device) -> tuple[float, int]:
    if place.type != "cuda":
        started = time.process_time()
        step()
        return time.process_time() - started, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated() - before


def _ways(model: nn.Module, data: tuple[Tensor, Tensor], batch: int, peers: bool) -> Iterator[tuple[str, Step]]:
    device = data[0].device

    def drawn() -> tuple[Tensor, Tensor]:
        chosen = torch.randperm(RECORDS, device=device)[:batch]
        return data[0][chosen], data[1][chosen]

    yield "ordinary", _ordinary(copy.deepcopy(model), drawn)
    yield "ours, dense", _ours(copy.deepcopy(model), drawn, 1.0, "capture")
    for ratio in (0.4, 0.1, 0.01):
        yield f"ours, ρ = {ratio:g}", _ours(copy.deepcopy(model), drawn, ratio, "capture")
    if peers:
        yield "vmap", _ours(copy.deepcopy(model), drawn, 1.0, "vmap")
        yield from _opacus(model, drawn, batch)


def _ordinary(model: nn.Module, drawn: Callable[[], tuple[Tensor, Tensor]]) -> Step:
    optimizer = SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        x, y = drawn()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ours(model: nn.Module, drawn: Callable[[], tuple[Tensor, Tensor]], ratio: float, engine: str) -> Step:
    mechanism = Mechanism(model, F.cross_entropy, PLAN, Ledger(PLAN), Streams("bench"), engine)
    updater = Updater(model, SGD(model.parameters(), lr=1e-3))
    support = _random_support(model, ratio)
    taken = 0

    def step() -> None:
        nonlocal taken
        private = mechanism.private_gradient([drawn()], support, 0, taken)
        updater.apply(private.values, support)
        taken += 1

    return step


def _random_support(model: nn.Module, ratio: float) -> Support:
    scores = {name: torch.rand_like(p) for name, p in trainable(model).items()}
    return top_k(scores, int(ratio * sum(s.numel() for s in scores.values())))


def _opacus(model: nn.Module, drawn: Callable[[], tuple[Tensor, Tensor]], batch: int) -> Iterator[tuple[str, Step]]:
    try:
        import opacus
    except ModuleNotFoundError as error:
        raise Refusal(
            "measuring the peers needs Opacus: pip install opacus, or leave them out with --no-peers"
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = opacus.GradSampleModule(copy.deepcopy(model))
        optimizer = opacus.optimizers.DPOptimizer(
            SGD(wrapped.parameters(), lr=1e-3), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=batch
        )

    def step() -> None:
        x, y = drawn()
        F.cross_entropy(wrapped(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    yield "Opacus hooks", step


def explain(name: str, device: str) -> list[dict[str, Any]]:
    """Which way the engine takes for each matrix of a network, dense and at ρ = 0.1."""
    if name not in SUBJECTS:
        raise Refusal(f"unknown benchmark model {name!r}{nearest(name, SUBJECTS)}")
    subject, place = SUBJECTS[name], torch.device(device)
    model = subject.build().to(place).train()
    x, y = subject.inputs(4).to(place), torch.zeros(4, dtype=torch.long, device=place)
    with Capture(model, 4) as capture:
        total = F.cross_entropy(model(x), y, reduction="sum")
    capture.differentiate(total)
    sparse, rows = _random_support(model, 0.1), []
    with torch.no_grad():
        for parameter, contribution in capture.contributions().items():
            ways = []
            for restricted in (False, True):
                if restricted:
                    contribution.restrict(sparse, parameter)
                ways.append(
                    contribution.way
                    if isinstance(contribution, Products)
                    else "touched rows"
                    if isinstance(contribution, Rows)
                    else "written out"
                )
            rows.append({"parameter": parameter, "dense": ways[0], "sparse": ways[1]})
    return rows


def as_rows(measured: list[Measured]) -> list[dict[str, Any]]:
    return [asdict(m) for m in measured]


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    name = (
        torch.cuda.get_device_name()
        if torch.device(device).type == "cuda"
        else platform.processor() or platform.machine()
    )
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
