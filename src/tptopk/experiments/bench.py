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
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD

from tptopk.gradients.capture import Capture
from tptopk.gradients.contributions import Rows
from tptopk.gradients.memory import peak_bytes
from tptopk.gradients.precision import check_precision, computing_in
from tptopk.gradients.products import Products
from tptopk.models import networks
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal, nearest
from tptopk.supports.selection import top_k
from tptopk.supports.support import Support, trainable
from tptopk.training.mechanism import Mechanism
from tptopk.training.updates import Updater

PLAN = Plan(
    phases=(Phase(steps=10**9, sample_rate=0.25, noise_multiplier=1.0, clip_norm=1.0),),
    delta=1e-5, dataset_size=4096, accountant="rdp",
)  # fmt: skip
WARM_UP = 3  # steps of each way before any is timed: an ordinary one, a recorded one, a replayed one

Step = Callable[[], None]
Draw = Callable[[], tuple[Tensor, Tensor]]


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
    "scatter": Subject(networks.scatter_cnn, lambda n: torch.rand(n, 243, 8, 8), {"cuda": 8192, "cpu": 128}),
}


@dataclass(frozen=True)
class Measured:
    """One way of taking a step of one network."""

    model: str
    way: str
    batch: int
    milliseconds: float  # on CUDA the median of wall times, on a CPU the minimum of process times
    ratio: float  # to ordinary training, the faster of eager and compiled
    peak_bytes: int  # the most memory that a step took beyond what it found
    peak_ratio: float


def measure(
    name: str, device: str, rounds: int, peers: bool, *, compiled: bool = False, precision: str = "tf32"
) -> list[Measured]:
    """All ways for one network, taking turns."""
    place, subject = device_called(device), _subject(name)
    check_precision(precision)
    torch.manual_seed(0)
    model = subject.build().to(place).train()
    batch = subject.batch[place.type]
    records = max(PLAN.dataset_size, batch)
    data = (subject.inputs(records).to(place), torch.randint(0, 10, (records,)).to(place))
    with computing_in(precision, place), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # Opacus's hooks, at every step
        steps = dict(_ways(model, data, batch, peers, compiled, precision))
        times: dict[str, list[float]] = {way: [] for way in steps}
        peaks: dict[str, int] = dict.fromkeys(steps, 0)
        for way, step in list(steps.items()):
            try:
                peaks[way] = max(peak_bytes(step, place) for _ in range(WARM_UP))  # recording included
            except Exception as error:
                if "Opacus" not in way and "vmap" not in way:
                    raise
                warnings.warn(
                    f"{way} failed on {name}: {(str(error).splitlines() or [type(error).__name__])[0]}", stacklevel=2
                )
                del steps[way]
        for _ in range(rounds):
            for way, step in steps.items():
                times[way].append(timed(step, place))
    best = {way: 1e3 * (median(times[way]) if place.type == "cuda" else min(times[way])) for way in steps}
    ordinary = min(best[way] for way in steps if way.startswith("ordinary"))
    return [
        Measured(
            name, way, batch, round(best[way], 3), round(best[way] / ordinary, 3), peaks[way],
            round(peaks[way] / peaks["ordinary"], 3),
        )
        for way in steps
    ]  # fmt: skip


def device_called(device: str) -> torch.device:
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise Refusal("there is no CUDA device on this machine; use --device cpu")
    return place


def _subject(name: str) -> Subject:
    if name not in SUBJECTS:
        raise Refusal(f"unknown benchmark model {name!r}{nearest(name, SUBJECTS)}")
    return SUBJECTS[name]


def timed(step: Step, place: torch.device) -> float:
    if place.type != "cuda":
        started = time.process_time()
        step()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _ways(
    model: nn.Module, data: tuple[Tensor, Tensor], batch: int, peers: bool, compiled: bool, precision: str
) -> Iterator[tuple[str, Step]]:
    device = data[0].device

    def drawn() -> tuple[Tensor, Tensor]:
        chosen = torch.randperm(len(data[0]), device=device)[:batch]
        return data[0][chosen], data[1][chosen]

    def ours(support: Support, parts: int = 1, compiled: bool = False) -> Step:
        return private_step(copy.deepcopy(model), drawn, support, precision=precision, compiled=compiled, parts=parts)

    full, sparse, blocks = Support.full(model), random_support(model, 0.1), _rows_and_columns(model, 0.1)
    yield "ordinary", ordinary_step(copy.deepcopy(model), drawn)
    yield "ours, dense", ours(full)
    yield "ours, dense, in two halves", ours(full, parts=2)
    yield "ours, ρ = 0.4", ours(random_support(model, 0.4))
    yield "ours, ρ = 0.1", ours(sparse)
    yield "ours, ρ = 0.01", ours(random_support(model, 0.01))
    yield "ours, ρ = 0.1, rows × columns", ours(blocks)
    if compiled:
        yield "ordinary, compiled", ordinary_step(copy.deepcopy(model), drawn, compiled=True)
        yield "ours, dense, compiled", ours(full, compiled=True)
        yield "ours, ρ = 0.1, compiled", ours(sparse, compiled=True)
        yield "ours, ρ = 0.1, rows × columns, compiled", ours(blocks, compiled=True)
    if peers:
        yield "vmap", _vmap_step(copy.deepcopy(model), drawn, batch, compiled=False)
        if compiled:
            yield "vmap, compiled", _vmap_step(copy.deepcopy(model), drawn, batch, compiled=True)
        yield from _opacus(model, drawn, batch)


def ordinary_step(model: nn.Module, drawn: Draw, *, compiled: bool = False) -> Step:
    optimizer = SGD(model.parameters(), lr=1e-3)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        x, y = drawn()
        F.cross_entropy(run(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def private_step(
    model: nn.Module,
    drawn: Draw,
    support: Support,
    *,
    precision: str = "tf32",
    compiled: bool = False,
    parts: int = 1,
) -> Step:
    replay = next(model.parameters()).is_cuda
    mechanism = Mechanism(
        model, F.cross_entropy, PLAN, Ledger(PLAN), Streams("bench"), precision=precision, replay=replay, compiled=compiled,
        patience=1,
    )  # fmt: skip
    updater = Updater(model, SGD(model.parameters(), lr=1e-3))
    taken = 0

    def step() -> None:
        nonlocal taken
        x, y = drawn()
        batches = list(zip(x.chunk(parts), y.chunk(parts), strict=True))
        private = mechanism.private_gradient(batches, support, 0, taken)
        updater.apply(private.values, support)
        taken += 1

    return step


def random_support(model: nn.Module, ratio: float) -> Support:
    scores = {name: torch.rand_like(p) for name, p in trainable(model).items()}
    return top_k(scores, int(ratio * sum(s.numel() for s in scores.values())))


def _rows_and_columns(model: nn.Module, ratio: float) -> Support:
    """√ρ of the rows crossed with √ρ of the columns of every matrix, ρ of every vector."""

    def chosen(parameter: Tensor) -> Tensor:
        if parameter.dim() == 1:
            return torch.rand_like(parameter) < ratio
        matrix = parameter.reshape(len(parameter), -1)
        rows, columns = (torch.rand_like(matrix[:, 0]) < ratio**0.5), (torch.rand_like(matrix[0]) < ratio**0.5)
        return torch.outer(rows, columns).view_as(parameter)

    return Support({name: chosen(p.detach()) for name, p in trainable(model).items()})


def _vmap_step(model: nn.Module, drawn: Draw, batch: int, *, compiled: bool) -> Step:
    """DP-SGD as torch.func's own tutorial writes it: vmap over grad, then clip, sum and noise."""
    parameters = {name: p.detach() for name, p in trainable(model).items()}

    def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    def clipped(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        gradients = vmap(grad(one), in_dims=(None, 0, 0))(parameters, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        weights = (1.0 / norms).clamp(max=1.0)
        return {name: torch.einsum("b,b...->...", weights, g) for name, g in gradients.items()}

    run = torch.compile(clipped) if compiled else clipped
    device = next(iter(parameters.values())).device
    normal = torch.distributions.Normal(torch.zeros((), device=device), torch.ones((), device=device))

    @torch.no_grad()
    def step() -> None:
        x, y = drawn()
        with sdpa_kernel(SDPBackend.MATH):
            sums = run(parameters, x, y)
        for name, p in parameters.items():
            p.sub_(sums[name] + normal.sample(p.shape), alpha=1e-3 / batch)  # type: ignore[no-untyped-call]

    return step


def _opacus(model: nn.Module, drawn: Draw, batch: int) -> Iterator[tuple[str, Step]]:
    try:
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    except ModuleNotFoundError as error:
        raise Refusal(
            "measuring the peers needs Opacus: pip install opacus, or leave them out with --no-peers"
        ) from error
    numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": batch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hooks = GradSampleModule(copy.deepcopy(model))
        ghost = GradSampleModuleFastGradientClipping(copy.deepcopy(model), max_grad_norm=1.0, use_ghost_clipping=True)
        plain = DPOptimizer(SGD(hooks.parameters(), lr=1e-3), **numbers)
        double = DPOptimizerFastGradientClipping(SGD(ghost.parameters(), lr=1e-3), **numbers)
    criterion = DPLossFastGradientClipping(ghost, double, nn.CrossEntropyLoss(), loss_reduction="mean")

    def hooks_step() -> None:
        x, y = drawn()
        F.cross_entropy(hooks(x), y).backward()  # type: ignore[no-untyped-call]
        plain.step()
        plain.zero_grad()

    def ghost_step() -> None:
        x, y = drawn()
        criterion(ghost(x), y).backward()
        double.step()
        double.zero_grad()

    yield "Opacus hooks", hooks_step
    yield "Opacus ghost", ghost_step


def explain(name: str, device: str) -> list[dict[str, Any]]:
    """Which way the engine takes for each matrix of a network, dense and at ρ = 0.1."""
    subject, place = _subject(name), device_called(device)
    model = subject.build().to(place).train()
    x, y = subject.inputs(4).to(place), torch.zeros(4, dtype=torch.long, device=place)
    with Capture(model, 4) as capture:
        total = F.cross_entropy(model(x), y, reduction="sum")
    capture.differentiate(total)
    sparse, rows = random_support(model, 0.1), []
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
