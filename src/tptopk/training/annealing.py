"""SA-DP-SGD: a step is taken back when it seems to have made the loss worse, by simulated annealing.

Whether the loss went up is asked of private records, so it is a query like any other: of a fresh Poisson sample, each example's
change in loss is clipped to [−L, L], the sum is noised and divided by the public batch size. All of a run's queries are
part of the plan and charged before the first step; a step that is taken back stays charged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tptopk.gradients.examples import Batch, PerExampleLoss, checked_losses
from tptopk.gradients.traces import unchanged
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal, check_number
from tptopk.supports.support import trainable
from tptopk.training.mechanism import Mechanism
from tptopk.training.sampling import PoissonSampler, Records, micro_batches

NAME = "change in loss"


@dataclass(frozen=True)
class Annealing:
    """Take a step that raises the mean loss by Δ > 0 only with probability exp(−Δ / temperature).

    `bound` is L, the most that one example's change in loss counts; the temperature falls linearly to zero.
    """

    bound: float = 0.5
    temperature: float = 0.05
    noise_multiplier: float = 4.0

    def __post_init__(self) -> None:
        for name in ("bound", "temperature", "noise_multiplier"):
            check_number(name, getattr(self, name), above=0)

    def queries(self, steps: int, sample_rate: float) -> tuple[Phase]:
        """What the plan must hold beside its steps: `Plan.calibrate(…, queries=annealing.queries(steps, rate))`."""
        return (
            Phase(
                steps=steps,
                sample_rate=sample_rate,
                noise_multiplier=self.noise_multiplier,
                clip_norm=self.bound,
                name=NAME,
            ),
        )


class Annealer:
    """Takes steps back for one run."""

    def __init__(
        self,
        settings: Annealing,
        model: nn.Module,
        loss: PerExampleLoss,
        records: Records,
        plan: Plan,
        mechanism: Mechanism,
        streams: Streams,
        batch: int,
        device: torch.device,
    ) -> None:
        self._settings, self._model, self._loss, self._records = settings, model, loss, records
        self._query = query_of(settings, plan)
        self._numbers, self._steps = plan.queries[self._query], plan.steps
        self._mechanism, self._streams, self._batch, self._device = mechanism, streams, batch, device
        self._sampler = PoissonSampler(plan.dataset_size, streams, "loss")
        self._taken = 0
        self._before = self._weights()

    def _weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in trainable(self._model).values()]

    @torch.no_grad()
    def judge(self) -> bool:
        """Ask whether the step just made raised the loss; put the weights back if it is not to stand."""
        after, step = self._weights(), self._taken
        # a long float32 sum is not within L of another
        total = torch.zeros((), device=self._device, dtype=torch.float64)
        chosen = self._sampler.sample(0, step, self._numbers.sample_rate)
        with self._streams.dice(self._device, "annealing's dice", step):
            for batch in micro_batches(self._records, chosen, self._batch, self._device):
                losses = self._losses(batch)
                self._put(self._before)
                changes = losses.double() - self._losses(batch).double()
                self._put(after)
                bound = self._settings.bound
                total += torch.where(torch.isfinite(changes), changes, 0.0).clamp(-bound, bound).sum()
        change = float(self._mechanism.answer(self._query, total.view(1), step))
        self._taken += 1
        temperature = self._settings.temperature * (1 - step / self._steps)
        stands = change <= 0 or bool(self._streams.numpy("annealing", step).random() < math.exp(-change / temperature))
        if stands:
            self._before = after
        else:
            self._put(self._before)
        return stands

    def _losses(self, batch: Batch) -> Tensor:
        """In the mode that was tried out before the run, and leaving no trace in the model, as there."""
        with unchanged(self._model, "losses were computed"):
            return checked_losses(self._loss, self._model, batch)

    def _put(self, weights: list[Tensor]) -> None:
        for parameter, value in zip(trainable(self._model).values(), weights, strict=True):
            parameter.copy_(value)


def check_annealing(annealing: Annealing | None, plan: Plan, processes: int, resume: bool) -> None:
    """Refuse annealing that the plan does not pay for, or that nothing would ask, or that cannot be done."""
    if annealing is not None:
        query_of(annealing, plan)
        if processes > 1:
            raise Refusal("annealing asks one process's records; train it in one process")
        if resume:
            raise Refusal("a run with annealing cannot be resumed: what its queries said is lost")
    elif any(query.name == NAME for query in plan.queries):
        raise Refusal(
            "the plan pays for each step's change in loss, and nothing would ask it: give fit annealing=Annealing(…), or "
            "Plan.calibrate no queries"
        )


def query_of(settings: Annealing, plan: Plan) -> int:
    """Which of the plan's queries is the annealing's; refused where it is not there as the settings say."""
    found = [n for n, query in enumerate(plan.queries) if query.name == NAME]
    if len(found) != 1 or plan.queries[found[0]] != settings.queries(plan.steps, plan.queries[found[0]].sample_rate)[0]:
        raise Refusal(
            "the plan does not hold one query for each step's change in loss: give Plan.calibrate "
            "queries=annealing.queries(steps, sample_rate)"
        )
    return found[0]
