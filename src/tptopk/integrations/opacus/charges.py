"""What a training was charged, kept apart by who charged it, so that processes can load each other's checkpoints."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tptopk.privacy.ledger import Ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal


class Charges:
    """The ledger, and who made its charges: a process, from one checkpoint that it loaded to the next."""

    def __init__(self, plan: Plan) -> None:
        self.ledger = Ledger(plan)
        self._id = secrets.token_hex(16)  # of what is charged between this and the next checkpoint loaded
        self._before, self._elsewhere = 0, dict[str, Counter[int]]()

    @property
    def here(self) -> int:
        """How many steps this process charged, whatever checkpoints it loaded in between."""
        return self._before + self._by_process()[self._id].total()

    def _by_process(self) -> dict[str, Counter[int]]:
        """Who charged → phase index → steps."""
        elsewhere = sum(self._elsewhere.values(), Counter[int]())
        return {**self._elsewhere, self._id: self.ledger.charged - elsewhere}

    def counts(self) -> dict[str, Any]:
        charges = {who: dict(steps) for who, steps in self._by_process().items()}
        return {"taken": dict(self.ledger.steps), "charges": charges}

    def stand_at(self, taken: Mapping[int, int], charges: Mapping[str, Mapping[int, int]]) -> None:
        """Go on from a checkpoint's counts. What has been charged besides stays charged, as lost steps.

        Formal guarantees: a step that this process or the checkpoint knows of is counted, and counted once, in whatever
        order processes load each other's checkpoints. Of one who charged the larger count is right, for it only grows.
        """
        known = self._by_process()
        for who, steps in charges.items():
            known[who] = known.get(who, Counter[int]()) | Counter(steps)
        total = sum(known.values(), Counter[int]())
        plan = self.ledger.plan
        lost = {phase: total[phase] - taken.get(phase, 0) for phase in range(len(plan.phases))}
        if any(count < 0 for count in lost.values()):
            raise Refusal("the checkpoint holds more steps than were charged")
        self._before = self.here
        self.ledger = Ledger.carried_on(plan, taken, lost)
        self._elsewhere, self._id = known, secrets.token_hex(16)
