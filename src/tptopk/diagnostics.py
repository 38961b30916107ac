"""How good a support is, measured after the fact. None of this is used by training.

Two kinds. What is made of private gradients (a support's composition, ρ̂_sig) costs nothing and may be shown. What is
made of true gradients on held-out records is an `Oracle`: outside every guarantee, and refused by training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tptopk.privacy.gradient import PrivateGradient, require_private
from tptopk.privacy.oracle import Oracle
from tptopk.privacy.refusal import Refusal, check_count, check_number
from tptopk.supports.scores import score_named
from tptopk.supports.selection import top_k
from tptopk.supports.support import Support, trainable
from tptopk.supports.warmup import WarmUp
from tptopk.theory import captured_energy, energy_capture

TrueGradient = Oracle[dict[str, Tensor]]
Loss = Callable[[nn.Module, Any], Tensor]  # of a model and a batch, one value a record or their mean


@dataclass(frozen=True)
class ProxySignal:
    """ρ̂_sig with what pure noise gives: a support maximises it, so by itself or beside k/d it says nothing."""

    value: float
    noise_only: float  # mean over simulations of a warm-up without any signal
    noise_only_std: float
    active_ratio: float

    def __str__(self) -> str:
        return f"ρ̂_sig = {self.value:.3f} (noise alone: {self.noise_only:.3f} ± {self.noise_only_std:.3f})"


def proxy_signal(warmup: WarmUp, active: int, *, score: str = "paper", simulations: int = 20) -> ProxySignal:
    """ρ̂_sig(A) = Σ_{p∈A} max(a_p, 0) / Σ_p max(a_p, 0) of the k best by a score, and the same without signal.

    Without signal a_p = ν²(χ²/T₁ − 1) with T₁ degrees of freedom, independently; ranked and summed in the same way.
    """
    check_count("active", active)
    check_count("simulations", simulations)
    if warmup.steps == 0:
        raise Refusal("the warm-up has no steps yet")
    if active > warmup.total:
        raise Refusal(f"active is {active} of d = {warmup.total} coordinates")
    rank = score_named(score)

    def share(scores: Mapping[str, Tensor]) -> float:
        support = top_k(rank(scores), active)
        positive = {name: value.double().clamp(min=0) for name, value in scores.items()}
        whole = sum(float(value.sum()) for value in positive.values())
        return sum(float(support.keep(n, v).sum()) for n, v in positive.items()) / whole if whole else 0.0

    generator = np.random.default_rng(0)  # a number to compare with, not a secret
    simulated = [
        share(
            {
                name: torch.from_numpy(generator.chisquare(warmup.steps, shape) / warmup.steps - 1).float()
                for name, shape in warmup.shapes.items()
            }
        )
        for _ in range(simulations)
    ]
    return ProxySignal(
        share(warmup.scores()), float(np.mean(simulated)), float(np.std(simulated)), active / warmup.total
    )


@dataclass(frozen=True)
class LayerShare:
    """How much of one parameter a support holds."""

    name: str
    active: int
    coordinates: int
    enrichment: float  # its active ratio over the whole support's; 1 is what a random support has


def composition(support: Support) -> list[LayerShare]:
    """A support by parameter, in the model's order."""
    return [
        LayerShare(name, support.sizes[name], mask.numel(), support.sizes[name] / mask.numel() / support.ratio)
        for name, mask in support.masks.items()
        if mask.numel() and support.size
    ]


# Oracles: of true gradients on held-out records


@dataclass(frozen=True)
class Captured:
    """The share of true gradient energy on a support, beside what a random one of its size holds on average."""

    share: float
    random: float  # k/d as realised


def true_gradient(model: nn.Module, held_out: Iterable[Any], loss: Loss) -> TrueGradient:
    """The mean gradient over held-out batches, neither clipped nor noised, with the model as in evaluation."""
    parameters = trainable(model)
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    records, training = 0, model.training
    model.eval()
    try:
        for batch in held_out:
            losses = loss(model, batch)
            count = losses.numel() if losses.dim() else _length(batch)
            found = torch.autograd.grad(
                losses.sum() if losses.dim() else losses * count, list(parameters.values()), allow_unused=True
            )
            for total, value in zip(sums.values(), found, strict=True):
                if value is not None:
                    total += value
            records += count
    finally:
        model.train(training)
    if records == 0:
        raise Refusal("there are no held-out records")
    return Oracle({name: total / records for name, total in sums.items()})


def oracle_capture(gradient: TrueGradient, support: Support) -> Oracle[Captured]:
    """α̂_oracle = ‖P_A Ĝ‖² / ‖Ĝ‖² beside k/d; 0 where the gradient is zero."""
    captured, whole = captured_energy(_true(gradient), support)
    return Oracle(Captured(captured / whole if whole else 0.0, support.ratio))


def energy_concentration(
    gradient: TrueGradient, ratios: Iterable[float] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
) -> Oracle[list[tuple[float, float]]]:
    """(ρ, share of the energy that the true top ρ of the coordinates hold): the most that any support can keep."""
    squares = torch.cat([value.double().square().reshape(-1).cpu() for value in _true(gradient).values()])
    running = squares.sort(descending=True).values.cumsum(0)
    whole = float(running[-1])
    ratios = list(ratios)
    for ratio in ratios:
        check_number("ratio", ratio, least=0, most=1)
    counts = [(ratio, int(ratio * len(squares) + 1e-9)) for ratio in ratios]
    return Oracle([(ratio, float(running[k - 1]) / whole if k and whole else 0.0) for ratio, k in counts])


@dataclass
class TrajectoryCapture:
    """α_T along a run: give it to `fit` as `on_private_gradient`, and read `result` afterwards.

    At every `every`-th step after the warm-up it takes the true gradient on held-out batches where the model stands,
    and how much of it lies on that step's support, which is where the private gradient is not zero.
    """

    model: nn.Module
    held_out: list[Any]
    loss: Loss
    every: int = 1
    warmup: bool = False  # whether the first phase counts too, as for methods without a warm-up
    _captured: list[float] = field(default_factory=list)
    _whole: list[float] = field(default_factory=list)
    _ratios: list[float] = field(default_factory=list)

    def __call__(self, gradient: PrivateGradient) -> None:
        gradient = require_private(gradient)
        if (gradient.phase == 0 and not self.warmup) or gradient.step % self.every:
            return
        support = Support({name: value != 0 for name, value in gradient.values.items()})
        captured, whole = captured_energy(true_gradient(self.model, self.held_out, self.loss).value, support)
        self._captured.append(captured)
        self._whole.append(whole)
        self._ratios.append(support.ratio)

    @property
    def result(self) -> Oracle[Captured]:
        """α_T = Σ_t ‖P_t G_t‖² / Σ_t ‖G_t‖² over the steps looked at, beside the mean of k_t/d."""
        if not self._whole:
            raise Refusal("no step was looked at yet")
        return Oracle(Captured(energy_capture(self._captured, self._whole), float(np.mean(self._ratios))))


def _true(gradient: TrueGradient) -> dict[str, Tensor]:
    if not isinstance(gradient, Oracle):
        raise TypeError(f"expected an Oracle from true_gradient, got {type(gradient).__name__}")
    return gradient.value


def _length(batch: Any) -> int:
    first = batch
    while not isinstance(first, Tensor):
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    return len(first)
