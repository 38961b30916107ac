"""Clip, sum, noise, divide: the only place where noise is drawn, and the only maker of a `PrivateGradient`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from tptopk.gradients.clipping import ClippedSum, clipped_sum, zero_sum
from tptopk.gradients.examples import Batch
from tptopk.gradients.probe import lasting_tensors
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.randomness import Streams
from tptopk.supports.support import Support


class Mechanism:
    """The Gaussian mechanism on a support, at the numbers of a plan.

    Formal guarantees: a step of phase p releases (Σ_i clip(m ⊙ g_i, C_p) + m ⊙ z) / B_p with z ~ N(0, σ_p² C_p² I),
    where B_p is the plan's public expected batch size. The sum's l2 sensitivity is C_p whatever the support m, so a
    step on a Poisson sample costs what the plan's accountant says. The ledger holds the charge before z exists.

    ====================  ==============================================================
    edge case             what happens
    ====================  ==============================================================
    no record was drawn   charged and released all the same: noise over B
    a bad record          contributes zero (see `clipped_sum`)
    inactive coordinate   exactly zero: neither signal nor noise
    a step out of order   refused by the ledger; nothing is drawn
    ====================  ==============================================================
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        plan: Plan,
        ledger: Ledger,
        streams: Streams,
        engine: str = "capture",
    ) -> None:
        self._model, self._loss, self._engine = model, loss, engine
        self._plan, self._ledger, self._streams = plan, ledger, streams

    def private_gradient(self, batches: Iterable[Batch], support: Support, phase: int, step: int) -> PrivateGradient:
        """One charged release for the step's records, given in physical batches of any sizes."""
        numbers = self._plan.phases[phase]
        self._ledger.charge(phase, step, support.size)
        total = None
        untouched = _versions(self._model)
        for batch in batches:
            part = clipped_sum(self._model, self._loss, batch, support, numbers.clip_norm, engine=self._engine)
            total = part if total is None else total + part
        if _versions(self._model) != untouched:
            raise RuntimeError(
                "a tensor of the model was changed while gradients were computed, which would carry data past the mechanism; nothing was released"
            )
        return self._release(total or zero_sum(self._model, numbers.clip_norm), support, phase, step)

    @torch.no_grad()
    def _release(self, total: ClippedSum, support: Support, phase: int, step: int) -> PrivateGradient:
        numbers = self._plan.phases[phase]
        noise_std = numbers.noise_multiplier * total.sensitivity()
        divisor = self._plan.expected_batch_size(numbers)
        values = {}
        for name, value in total.values.items():
            active = support.sizes[name]
            if not active:
                values[name] = torch.zeros_like(value)
                continue
            noise = self._streams.normal(active, value.device, "noise", phase, step, name).mul_(noise_std)
            if support.covers(name):
                values[name] = noise.view(value.shape).add_(value).div_(divisor)
            else:
                places = support.indices(name)
                noise.add_(value.reshape(-1).index_select(0, places)).div_(divisor)
                values[name] = torch.zeros_like(value).view(-1).index_copy_(0, places, noise).view(value.shape)
        return PrivateGradient(values, self._plan.noise_std(numbers), phase, step)


def _versions(model: nn.Module) -> list[tuple[str, int, int]]:
    """Changes whenever a parameter, buffer or kept tensor is written to, replaced, added or dropped."""
    return [(name, id(tensor), tensor._version) for name, tensor in lasting_tensors(model).items()]
