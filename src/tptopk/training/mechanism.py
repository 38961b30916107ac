"""Clip, sum, noise, divide: the only place where noise is drawn, and the only maker of a `PrivateGradient`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from tptopk.gradients.clipping import ClippedSum, clipped_sum, split, zero_sum
from tptopk.gradients.examples import Batch, batch_length, take
from tptopk.gradients.graphs import FixedShapes
from tptopk.gradients.traces import unchanged
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.randomness import Streams
from tptopk.supports.support import Support
from tptopk.training.distributed import Team

PATIENCE = 24  # steps on a support before it is worth recording: recording takes as long as a dozen steps


class Mechanism:
    """The Gaussian mechanism on a support, at the numbers of a plan.

    Formal guarantees: a step of phase p releases (Σ_i clip(m ⊙ g_i, C_p) + m ⊙ z) / B_p with z ~ N(0, σ_p² C_p² I),
    where B_p is the plan's public expected batch size. The sum's l2 sensitivity is C_p whatever the support m, so a
    step on a Poisson sample costs what the plan's accountant says. The ledger holds the charge before z exists.

    ====================  ================================================================================
    edge case             what happens
    ====================  ================================================================================
    no record was drawn   charged and released all the same: noise over B
    a bad record          contributes zero (see `clipped_sum`)
    inactive coordinate   exactly zero: neither signal nor noise
    dropout, random crop  drawn from the run's secret, whatever seed torch has (`Streams.dice`)
    a step out of order   refused by the ledger; nothing is drawn
    out of memory         the same records again in halves, before any noise is drawn; charged once
    ====================  ================================================================================

    `replay` records the sums of a support as CUDA graphs, `compiled` as compiled programs (`gradients/graphs.py`).
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        plan: Plan,
        ledger: Ledger,
        streams: Streams,
        engine: str = "capture",
        *,
        precision: str = "fp32",
        replay: bool = False,
        compiled: bool = False,
        clipping: str = "flat",
        patience: int = PATIENCE,
        team: Team | None = None,
    ) -> None:
        self._team = team or Team()
        self._clipping = clipping
        self._model, self._loss, self._engine = model, loss, engine
        self._plan, self._ledger, self._streams = plan, ledger, streams
        self._precision = precision
        self._fixed = None
        if engine == "capture" and (replay or compiled):
            self._fixed = FixedShapes(
                model, loss, precision=precision, compiled=compiled, clipping=clipping, patience=patience
            )
        self._most_examples: int | None = None  # that fitted into memory, once more did not

    def private_gradient(self, batches: Iterable[Batch], support: Support, phase: int, step: int) -> PrivateGradient:
        """One charged release for the step's records, given in physical batches of any sizes."""
        numbers = self._plan.phases[phase]
        self._ledger.charge(phase, step, support.size)
        total = None
        with self._streams.dice(next(self._model.parameters()).device, "dice", phase, step):
            for batch in batches:
                part = self._sum(batch, support, numbers.clip_norm)
                total = part if total is None else total + part
        return self._release(total or zero_sum(self._model, numbers.clip_norm), support, phase, step)

    def release(self, total: ClippedSum | None, support: Support, phase: int, step: int) -> PrivateGradient:
        """One charged release of a sum over the step's records that was clipped elsewhere; None: no record was drawn."""
        numbers = self._plan.phases[phase]
        if total is not None and total.sensitivity() != numbers.clip_norm:
            raise ValueError(f"the sum is clipped to {total.sensitivity()}, and the phase to {numbers.clip_norm}")
        self._ledger.charge(phase, step, support.size)
        return self._release(total or zero_sum(self._model, numbers.clip_norm), support, phase, step)

    def _sum(self, batch: Batch, support: Support, clip_norm: float) -> ClippedSum:
        """The clipped sum of these very records, in halves where they do not fit into memory."""
        examples = batch_length(batch)
        if self._most_examples is None or examples <= self._most_examples:
            try:
                return self._whole_sum(batch, support, clip_norm)
            except torch.OutOfMemoryError as error:
                if examples == 1:
                    raise RuntimeError(
                        "one example does not fit into the device's memory; nothing was released"
                    ) from error
            self._most_examples = examples // 2
            if self._fixed is not None:
                self._fixed.forget()
            torch.cuda.empty_cache()
        middle = examples // 2
        return self._sum(take(batch, slice(0, middle)), support, clip_norm) + self._sum(
            take(batch, slice(middle, examples)), support, clip_norm
        )

    def _whole_sum(self, batch: Batch, support: Support, clip_norm: float) -> ClippedSum:
        found = self._fixed.clipped_sum(batch, support, clip_norm) if self._fixed is not None else None
        if found is not None:
            return found
        with unchanged(self._model, "gradients were computed"):
            return clipped_sum(
                self._model,
                self._loss,
                batch,
                support,
                clip_norm,
                engine=self._engine,
                precision=self._precision,
                clipping=self._clipping,
            )

    def query_clip_norm(self, index: int) -> float:
        return self._plan.queries[index].clip_norm

    @torch.no_grad()
    def answer(self, index: int, total: Tensor, step: int = 0) -> Tensor:
        """(total + N(0, σ²C² I)) / (q N) for the plan's query of that number, which must have been charged.

        Each record may have moved `total` by at most the query's clip norm, in l2 norm, and a query at a sample rate below 1
        is asked of a fresh Poisson sample. It is answered as often as the plan has steps of it.
        """
        self._ledger.answer_query(index, step)
        numbers = self._plan.queries[index]
        noise = self._streams.normal(total.numel(), total.device, "query", index, step)
        noisy = total + noise.view_as(total) * (numbers.noise_multiplier * numbers.clip_norm)
        return (noisy / self._plan.expected_batch_size(numbers)).float()  # no digit beyond those of the noise

    @torch.no_grad()
    def _release(self, total: ClippedSum, support: Support, phase: int, step: int) -> PrivateGradient:
        numbers = self._plan.phases[phase]
        values = total.flat if support.is_full else total.flat.index_select(0, support.flat_indices)
        values = self._team.sum_at_first(values)
        if self._team.is_first:  # noise is drawn once
            noise = self._streams.normal(support.size, values.device, "noise", phase, step)
            noise.mul_(numbers.noise_multiplier * total.sensitivity())
            values = (values + noise).div_(self._plan.expected_batch_size(numbers)).float()
        values = self._team.from_first(values.float())
        flat = values
        if not support.is_full:
            flat = values.new_zeros(support.total).index_copy_(0, support.flat_indices, values)
        return PrivateGradient(split(flat, total.shapes), self._plan.noise_std(numbers), phase, step)
