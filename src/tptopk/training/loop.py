"""The steps of a run: sample, private gradient, update, from where the ledger stands to the end of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tptopk.gradients.examples import Batch, PerExampleLoss
from tptopk.gradients.precision import computing_in, forward_in
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.plan import Plan
from tptopk.supports.policies import SupportPolicy
from tptopk.supports.support import Support, trainable
from tptopk.training.annealing import Annealer
from tptopk.training.checks import check_length
from tptopk.training.distributed import Team
from tptopk.training.mechanism import Mechanism
from tptopk.training.metrics import StepRecord
from tptopk.training.sampling import PoissonSampler, Records, micro_batches
from tptopk.training.updates import Updater, WeightAverage


@dataclass
class Loop:
    """All that takes part in a step. `fit` puts it together; nothing here is charged or drawn until `run`."""

    model: nn.Module
    plan: Plan
    ledger: Ledger
    records: Records
    losses: PerExampleLoss
    optimizer: Optimizer
    scheduler: LRScheduler | None
    learning_rates: Sequence[float] | None  # one for each phase
    precision: str
    micro_batch_size: int
    device: torch.device
    team: Team
    mechanism: Mechanism
    sampler: PoissonSampler
    policy: SupportPolicy
    average: WeightAverage | None
    annealer: Annealer | None
    shown: list[Callable[[PrivateGradient], object]]  # whoever is given each private gradient before the model moves
    after_step: Callable[[StepRecord], None]

    def run(self) -> None:
        """Every step that the plan still has and the budget still pays."""
        updater = Updater(self.model, self.optimizer)
        for phase, numbers in enumerate(self.plan.phases):
            if self.learning_rates is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.learning_rates[phase]
            for step in range(self.ledger.steps[phase], numbers.steps):
                if self.ledger.steps_allowed < 1:
                    break
                self.after_step(self._step(updater, phase, step))

    def _step(self, updater: Updater, phase: int, step: int) -> StepRecord:
        check_length(self.records, self.plan)
        support = self.policy.support(phase, step)
        rate, team = self.plan.phases[phase].sample_rate, self.team
        drawn = team.share(self.sampler.sample(phase, step, rate) if team.is_first else None)
        batches = micro_batches(self.records, drawn, self.micro_batch_size, self.device)
        norm = None
        if self.plan.spec.private:
            private = self.mechanism.private_gradient(batches, support, phase, step)
            self.policy.observe(private)
            for show in self.shown:
                show(private)
            norm = float(nn.utils.get_total_norm(private.values.values()))
            updater.apply(private.values, support)
            if self.annealer is not None:
                self.annealer.judge()
        else:
            updater.apply(self._ordinary_gradient(batches, support, phase, step), support)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        if self.scheduler is not None:
            self.scheduler.step()
        if self.average is not None:
            self.average.update()
        return StepRecord(sum(self.ledger.steps.values()), phase, support.size, learning_rate, norm)

    def _ordinary_gradient(
        self, batches: Iterable[Batch], support: Support, phase: int, step: int
    ) -> dict[str, Tensor]:
        """Σ_i g_i / B without clipping or noise, for the non-private method alone."""
        self.ledger.charge(phase, step, support.size)
        divisor = self.plan.expected_batch_size(self.plan.phases[phase])
        losses, parameters = forward_in(self.losses, self.precision), trainable(self.model)
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        with computing_in(self.precision, self.device):
            for batch in batches:
                gradients = torch.autograd.grad(
                    losses(self.model, batch).sum(), list(parameters.values()), allow_unused=True
                )
                for name, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        total[name] += gradient / divisor
        return {name: self.team.from_first(self.team.sum_at_first(value)) for name, value in total.items()}
