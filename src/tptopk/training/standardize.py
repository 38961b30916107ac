"""Inputs brought to mean 0 and variance 1 channel by channel, by statistics that are released privately and charged.

Two Gaussian queries over all records, before training: the channels' means, then their second moments about those means.
Each example's vector of channels is divided by public constants and clipped jointly to a public norm, so that one
example moves a sum by at most that norm; the noisy sum is divided by the public size of the dataset.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.refusal import Refusal, check_number
from tptopk.training.mechanism import Mechanism
from tptopk.training.rows import RowRecords
from tptopk.training.sampling import Records

NAMES = ("channel means", "channel second moments")


class Standardize(nn.Module):
    """(x − mean) / deviation for each channel of x [B, C, …]; the identity until `fit` has asked its two queries.

    `scale`: [C] public constants, about as large as the channels' values usually are. `floor`: the least variance, as a
    multiple of scale².
    """

    mean: Tensor
    factor: Tensor
    scale: Tensor

    def __init__(self, scale: Tensor, floor: float = 1e-3) -> None:
        super().__init__()
        if scale.dim() != 1 or not bool((scale > 0).all()) or not bool(torch.isfinite(scale).all()):
            raise Refusal("scale must be one positive number for each channel")
        check_number("floor", floor, above=0)
        self.floor = floor
        self.register_buffer("scale", scale.float())
        self.register_buffer("mean", torch.zeros_like(self.scale))
        self.register_buffer("factor", torch.ones_like(self.scale))

    def forward(self, x: Tensor) -> Tensor:
        return (x - _along(self.mean, x)) * _along(self.factor, x)

    @property
    def asked(self) -> bool:
        """Whether it stands by the answers of its queries, of this run or of the one that its weights come from."""
        return bool(self.mean.any()) or bool((self.factor != 1).any())

    def queries(self, noise_multiplier: float = 32.0) -> tuple[Phase, Phase]:
        """What the plan must hold: `Plan.calibrate(…, queries=layer.queries())`."""
        clip = math.sqrt(len(self.scale))  # the norm of a vector whose channels are all as large as their scale
        means, moments = (
            Phase(steps=1, sample_rate=1.0, noise_multiplier=noise_multiplier, clip_norm=clip, name=name)
            for name in NAMES
        )
        return means, moments

    @torch.no_grad()
    def ask(self, records: Records, mechanism: Mechanism | None, size: int, device: torch.device) -> None:
        """Ask both queries, of all records in batches of `size`, and stand by their answers from now on.

        Without a mechanism the answers are exact: for training that is not private.
        """
        mean = self._query(0, records, mechanism, size, device, torch.zeros_like(self.mean)) * self.scale
        variance = self._query(1, records, mechanism, size, device, mean) * self.scale.square()
        self.mean.copy_(mean)
        self.factor.copy_(variance.clamp(min=self.floor * self.scale.square()).rsqrt())

    def _query(
        self, index: int, records: Records, mechanism: Mechanism | None, size: int, device: torch.device, mean: Tensor
    ) -> Tensor:
        """[C] the noisy mean over examples of E[(x − mean) / scale], or of its square for the second query."""
        total = torch.zeros_like(self.scale, dtype=torch.float64)  # a long float32 sum can lose, or add, many times C
        clip = mechanism.query_clip_norm(index) if mechanism else math.inf
        for start in range(0, len(records), size):
            vectors = self._vectors(
                records, torch.arange(start, min(start + size, len(records))), device, mean, index + 1
            )
            vectors = vectors.double()
            norms = torch.linalg.vector_norm(vectors, dim=1)
            factors = torch.where(torch.isfinite(norms), (clip / norms).clamp(max=1.0), 0.0)
            total += torch.where(torch.isfinite(norms)[:, None], vectors, 0.0).mul(factors[:, None]).sum(0)
        return (mechanism.answer(index, total) if mechanism else total / len(records)).float()

    def _vectors(self, records: Records, indices: Tensor, device: torch.device, mean: Tensor, power: int) -> Tensor:
        """[B, C] each example's average over rows and positions."""
        batch = records.batch(indices, device)
        rows, weights = batch if isinstance(records, RowRecords) else (batch, None)
        if not isinstance(rows, (tuple, list)) or len(rows) != 2 or not isinstance(rows[0], Tensor):
            raise Refusal("standardize needs records of (inputs, targets)")
        x = rows[0].float()
        channels_at = 1 if weights is None else 2
        if x.dim() <= channels_at or x.shape[channels_at] != len(self.scale):
            raise Refusal(f"inputs of shape {tuple(x.shape)} do not have {len(self.scale)} channels")
        each = x if weights is None else x.flatten(0, 1)  # [n, C, …]
        values = ((each - _along(mean, each)) / _along(self.scale, each)) ** power
        values = values.flatten(2).mean(2) if values.dim() > 2 else values
        if weights is not None:
            values = (values.view(len(indices), -1, len(self.scale)) * weights[:, :, None]).sum(1)
        # one vector a record, or a record would count more than once
        if values.shape != (len(indices), len(self.scale)):
            raise Refusal(
                f"records of shape {tuple(x.shape[1:])} do not give one number for each of {len(self.scale)} channels"
            )
        return values


def check_queries(
    layer: Standardize | None,
    plan: Plan,
    model: nn.Module,
    records: Records,
    device: torch.device,
    resume: bool = False,
) -> None:
    """Refuse, before anything is charged, a layer whose queries the plan does not hold or the records cannot answer.

    And queries that nobody would ask, and layers that nobody asked; a resumed run's were asked when it was begun.
    """
    if not resume:
        _refuse_unasked(layer, plan, model)
    if layer is None:
        return
    layer._vectors(records, torch.zeros(1, dtype=torch.long), device, layer.mean, 1)
    if layer not in model.modules():
        raise Refusal("standardize must be a layer of the model")
    if not plan.spec.private:
        return
    found = [query for query in plan.queries if query.name in NAMES]
    if [query.name for query in found] != list(NAMES) or any(q.sample_rate != 1 or q.steps != 1 for q in found):
        raise Refusal("the plan does not hold the queries of standardize: give Plan.calibrate queries=layer.queries()")
    if plan.queries[:2] != tuple(found):
        raise Refusal("the queries of standardize must be the plan's first two")


def holds_queries(plan: Plan) -> bool:
    return any(query.name in NAMES for query in plan.queries)


def _refuse_unasked(layer: Standardize | None, plan: Plan, model: nn.Module) -> None:
    if layer is None and holds_queries(plan):
        raise Refusal(
            "the plan pays for the queries of standardize, and nothing would ask them: give fit standardize=layer, or "
            "Plan.calibrate no queries"
        )
    for other in model.modules():
        if isinstance(other, Standardize) and other is not layer and not other.asked:
            raise Refusal(
                "the model holds a Standardize that was never asked: give fit standardize=layer and Plan.calibrate "
                "queries=layer.queries(), or take it out of the model (a model has one)"
            )


def _along(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))
