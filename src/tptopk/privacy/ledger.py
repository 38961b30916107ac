"""What was charged, in order, written down before the noise it pays for is drawn."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from tptopk.privacy import accounting
from tptopk.privacy.accounting import Segment
from tptopk.privacy.plan import Plan


class Ledger:
    """The charges of one run against its plan; with a path, each is on disk before `charge` returns.

    A charge can only be one of the plan's own steps, in order, once: there is no way to charge other noise,
    another rate or fewer coordinates than the plan says, and none to take a charge back.
    """

    def __init__(self, plan: Plan, path: Path | None = None, attempt: int = 1) -> None:
        self.plan, self.path, self.attempt = plan, path, attempt
        self.steps = Counter[int]()  # phase index → steps charged
        self._charged_queries = False
        self._append({"kind": "plan", "plan": plan.to_dict()}, create=True)

    def charge_queries(self) -> None:
        """Charge the plan's queries outside training; first, and whether or not they are asked in the end."""
        for index, query in enumerate(self.plan.queries):
            self._append(
                {
                    "kind": "query",
                    "query": index,
                    "name": query.name,
                    "steps": query.steps,
                    "noise_multiplier": query.noise_multiplier,
                    "sample_rate": query.sample_rate,
                }
            )
        self._charged_queries = True

    def charge(self, phase: int, step: int, support_size: int) -> None:
        """Write down one step. Whoever draws its noise calls this first."""
        earlier = [self.steps[i] == p.steps for i, p in enumerate(self.plan.phases[: max(phase, 0)])]
        in_order = 0 <= phase < len(self.plan.phases) and all(earlier)
        if not in_order or step != self.steps[phase] or step >= self.plan.phases[phase].steps:
            raise RuntimeError(f"step {step} of phase {phase} is not the next step of the plan: nothing was charged")
        p = self.plan.phases[phase]
        self._append(
            {
                "kind": "step",
                "attempt": self.attempt,
                "phase": phase,
                "step": step,
                "noise_multiplier": p.noise_multiplier,
                "sample_rate": p.sample_rate,
                "clip_norm": p.clip_norm if self.plan.spec.private else None,
                "divisor": self.plan.expected_batch_size(p),
                "support_size": support_size,
                "adjacency": self.plan.adjacency,
            }
        )
        self.steps[phase] += 1

    def segments(self) -> list[Segment]:
        spent = [self.plan.phases[i].segment._replace(steps=n) for i, n in sorted(self.steps.items())]
        return [q.segment for q in self.plan.queries if self._charged_queries] + spent

    def epsilon(self, *, delta: float | None = None, accountant: str | None = None) -> float:
        """ε of what has been charged so far. Reading it changes nothing."""
        if not self.plan.spec.private:
            return float("inf")
        return accounting.epsilon(
            self.segments(), self.plan.delta if delta is None else delta, accountant or self.plan.accountant
        )

    def _append(self, line: dict[str, Any], create: bool = False) -> None:
        if self.path is None:
            return
        with open(self.path, "x" if create else "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
