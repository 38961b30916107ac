"""How each method moves its support over a run.

A policy is asked for the support before every step and shown every private gradient after it. It never sees
data: its inputs are the plan, private gradients and a data-independent random stream.

What the paper leaves open, as read here: ON-TopK ranks the coordinates that have been active so far by their mean
score over the steps in which they were active; at every epoch it takes the top 90% of k from that ranking and
draws the other 10% uniformly from all the rest, so that every coordinate is tried sooner or later; its first
epoch is uniform. A fixed score ranking under an active-ratio schedule keeps its order, so that its supports are
nested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.oracle import refuse_oracles
from tptopk.privacy.plan import Plan, active_of
from tptopk.privacy.refusal import Refusal, check_number, nearest
from tptopk.supports.scores import CoordinateScores, score_named
from tptopk.supports.selection import random_ranking, top_k
from tptopk.supports.support import Support

EXPLORATION = 0.1  # share of k that ON-TopK draws uniformly

RatioSchedule = Callable[[float], float]  # progress through the sparse steps in [0, 1] → active ratio in (0, 1]


def ratio_schedule(schedule: str | RatioSchedule, final: float) -> RatioSchedule:
    """`constant` stays at the final ratio; `linear` and `cosine` come down to it from 1; a callable is used as it is."""
    named: dict[str, RatioSchedule] = {
        "constant": lambda progress: final,
        "linear": lambda progress: 1 + (final - 1) * progress,
        "cosine": lambda progress: final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2,
    }
    if not isinstance(schedule, str):
        return schedule
    if schedule not in named:
        raise Refusal(f"unknown ratio_schedule {schedule!r}{nearest(schedule, named)}")
    return named[schedule]


class SupportPolicy:
    """The support of every step of a run, for any of the methods."""

    def __init__(
        self,
        plan: Plan,
        everything: Support,
        stream: Callable[[int], np.random.Generator],
        score: str = "paper",
        schedule: str | RatioSchedule = "constant",
    ) -> None:
        """`stream(n)` is the n-th data-independent random stream; all sizes are checked here, before any charge."""
        refuse_oracles({"plan": plan, "everything": everything, "score": score, "schedule": schedule})
        self._method, self._everything, self._stream = plan.spec, everything, stream
        if score != "paper" and self._method.ranking != "score":
            score_named(score)
            raise Refusal(
                f"score={score!r} ranks nothing: {plan.method} does not choose coordinates by a score; leave it out"
            )
        if schedule != "constant" and not self._method.sparse:
            ratio_schedule(schedule, 1.0)
            raise Refusal(
                f"ratio_schedule={schedule!r} changes nothing: {plan.method} trains all coordinates; leave it out"
            )
        self._rank = score_named(score)
        self._scores = CoordinateScores()
        self._support = everything
        self._ranking: Mapping[str, Tensor] | None = None
        self._sizes = self._planned_sizes(plan, ratio_schedule(schedule, plan.active_ratio))

    def _planned_sizes(self, plan: Plan, schedule: RatioSchedule) -> dict[tuple[int, int], int]:
        """(phase, first step of an epoch) → k from there on, for every sparse epoch of the run."""
        if not self._method.sparse:
            return {}
        first = 1 if self._method.warmup else 0
        starts = [
            (index, step)
            for index, phase in enumerate(plan.phases)
            if index >= first
            for step in range(0, phase.steps, phase.steps_per_epoch)
        ]
        sizes = {}
        for epoch, start in enumerate(starts):
            ratio = schedule(epoch / (len(starts) - 1) if len(starts) > 1 else 1.0)
            check_number("the scheduled active ratio", ratio, above=0, most=1)
            sizes[start] = active_of(ratio, self._everything.total)
        return sizes

    @property
    def current(self) -> Support:
        return self._support

    def support(self, phase: int, step: int) -> Support:
        """The support for this step; a new object only where it changes."""
        k = self._sizes.get((phase, step))
        if k is None:
            return self._support
        if self._method.warmup:
            if self._ranking is not None and k == self._support.size:
                return self._support
            if self._ranking is None:  # fixed at the end of the warm-up
                self._ranking = self._random_ranking(0) if self._method.ranking == "random" else self._score_ranking()
            chosen = top_k(self._ranking, k)
        elif self._method.ranking == "random":
            chosen = top_k(self._random_ranking(self._epoch(phase, step)), k)
        else:
            chosen = self._explore(self._epoch(phase, step), k)
        if chosen != self._support:
            self._support = chosen
        return self._support

    def observe(self, gradient: PrivateGradient) -> None:
        """Take in the private gradient that was just released on the current support."""
        if self._method.ranking == "score" and self._ranking is None:
            self._scores.add(gradient, self._support)

    def state(self) -> dict[str, Tensor]:
        """All that later supports depend on, but for the random stream."""
        found = {f"support/{name}": mask for name, mask in self._support.masks.items()}
        found |= {f"ranking/{name}": value for name, value in (self._ranking or {}).items()}
        return found | {f"scores/{name}": value for name, value in self._scores.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from where `state` was taken."""

        names = self._everything.masks  # in the model's order, which a file need not keep
        device = next(iter(names.values())).device

        def part(kind: str) -> dict[str, Tensor]:
            return {name: state[f"{kind}/{name}"].to(device) for name in names if f"{kind}/{name}" in state}

        support = Support(part("support"))
        self._support = self._everything if support == self._everything else support
        self._ranking = part("ranking") or None
        self._scores.restore(part("scores/sums"), part("scores/seen"))

    def _epoch(self, phase: int, step: int) -> int:
        return list(self._sizes).index((phase, step))

    def _random_ranking(self, number: int) -> dict[str, Tensor]:
        return random_ranking(self._everything.masks, self._stream(number))

    def _score_ranking(self) -> dict[str, Tensor]:
        return self._rank(self._scores.values())

    def _explore(self, epoch: int, k: int) -> Support:
        """ON-TopK: the best of the coordinates seen so far, and a uniform tenth of the others."""
        uniform = self._random_ranking(epoch)
        if epoch == 0:
            return top_k(uniform, k)
        seen = Support(self._scores.seen())
        exploit = min(max(1, k - math.ceil(EXPLORATION * k)), seen.size)
        ranking = {
            name: torch.where(seen[name], score, torch.full_like(score, -torch.inf))
            for name, score in self._score_ranking().items()
        }
        best = top_k(ranking, exploit)
        rest = {name: torch.where(best[name], torch.full_like(key, -1), key) for name, key in uniform.items()}
        return best.union(top_k(rest, k - exploit))
