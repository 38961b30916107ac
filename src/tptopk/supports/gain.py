"""What restricting the next phase to a support is worth: its progress over that of training every coordinate.

Over a phase of T₂ steps at its best learning rate, both the paper's stationarity bound and the quadratic model of the loss
make progress in proportion to E²/(E + noise/n), where n counts the steps over which noise averages out. On a loss of
curvature β that is 1/(ηβ): the paper's schedule η = 1/(β√T₂) makes it √T₂, and in the bound itself, which counts every
step's noise in full, it is 1. Restriction multiplies progress by

    gain_n(ρ) = α² (E + (dν₂² + τ²)/n) / (αE + (kν₂² + τ²)/n),        τ² ≤ (1 − q₂) C₂²/B,

so a random support (α = ρ) never gains, and none does where noise is small. That takes the loss to bend equally in all
coordinates. Where it is flat noise costs nothing, and leaving it out gains nothing. What can be seen of that are the
scores: where the loss bends, records disagree, and steps that have moved the parameters move their gradients; both put
energy into the scores beside the signal's, which lasts. The estimate takes a support's share h of that energy, as steps see
it that did not choose the support, for its share of the noise's harm: h dν₂² in place of kν₂². A gain to rely on counts as
saved only what the records' disagreement, of (1 − q)C²/B at most, must have put outside, a share b: dν₂²(1 − b). At best it
is kν₂² after all. E is of the gradient as it moved under the warm-up's own learning rate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tptopk.privacy.plan import Plan
from tptopk.supports.energy import sampling_energy
from tptopk.supports.warmup import WarmUp


class Following(NamedTuple):
    """The numbers of the phase that is to follow."""

    steps: int
    variance: float  # ν₂²
    sampling: float  # the most that τ²/B can be
    total: int
    shrink: float  # how much another clip norm may change the signal's energy, down and up
    grow: float

    @classmethod
    def of(cls, plan: Plan, warmup: WarmUp, total: int) -> Following:
        numbers = plan.phases[1]
        change = (numbers.clip_norm / warmup.plan.phases[0].clip_norm) ** 2
        return cls(
            sum(phase.steps for phase in plan.phases[1:]),
            plan.noise_std(numbers) ** 2,
            sampling_energy(plan, 1),
            total,
            min(1.0, change),
            max(1.0, change),
        )

    def gain(self, kept: float, signal: float, k: float, n: float, *, sampled: bool = True) -> float:
        """Progress on k coordinates over progress on all, noise averaging out over n steps."""
        if kept <= 0:
            return 0.0
        signal = max(signal, 0.0) * (self.grow if sampled else self.shrink)
        sampling = self.sampling if sampled else 0.0
        dense = signal + (self.total * self.variance + sampling) / n
        return kept**2 * dense / (kept * signal + (k * self.variance + sampling) / n)

    def sure_gain(
        self, kept: float, lost: float, spared: float, k: int, errors: tuple[float, float, float], sure: float
    ) -> float:
        """A lower end of the gain at n = √T₂ for E inside and outside and the share of noise spared, three independent estimates.

        The logarithm of the gain falls by so much for an error of one in each; errors add up by their squares.
        """
        if k == self.total or kept <= sure * errors[0]:
            return float(k == self.total)

        def log_gain(kept: float, lost: float, spared: float) -> float:
            lost, spared = max(lost, 0.0), min(max(spared, 0.0), 1 - k / self.total)
            share = kept / (kept + lost)
            return math.log(self.gain(share, kept + lost, (1 - spared) * self.total, math.sqrt(self.steps)))

        here = log_gain(kept, lost, spared)
        worse = (
            log_gain(kept - errors[0], lost, spared),
            log_gain(kept, max(lost, 0.0) + errors[1], spared),
            log_gain(kept, lost, spared - errors[2]),
        )
        return math.exp(here - sure * math.sqrt(sum(max(0.0, here - w) ** 2 for w in worse)))

    def learning_rate(self, kept: float, signal: float, k: int) -> tuple[float, float]:
        """The best rate on k coordinates over the best on all, at n = √T₂ and at n = 1."""
        rates = [self.gain(kept, signal, k, n) / kept for n in (math.sqrt(self.steps), 1)]
        return min(rates), max(rates)
