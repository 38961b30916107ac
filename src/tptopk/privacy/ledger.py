"""What was charged, in order, written down before the noise it pays for is drawn.

A ledger is a file of JSON lines. Each line holds its number, the hash of the line before, and its own hash; the first
holds the plan, each attempt at the run opens with a line of its own, and the last closes the run with the hashes of the
files it left. These two also say when they were written, for whoever files the run; no figure and no decision depends on it.
An attempt also says what its noise was made by and whether the training loss is shown: a caveat of one is one of the run.
Nothing is ever rewritten: a line that a crash left half-written never paid for anything, and is cut off when the run is resumed.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from tptopk.privacy import accounting
from tptopk.privacy.accounting import Segment
from tptopk.privacy.chain import START, append_durably, chained, open_locked, read_chain
from tptopk.privacy.description import now, together
from tptopk.privacy.ledger_record import FORMAT, charge_line, query_line, read_ledger, weaker
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal


class Counts(Protocol):
    def number(self, value: int) -> int:
        """The number that the first process has."""


class BudgetSpent(Exception):
    """The next step would cost more than the plan does. Nothing was charged, and nothing drawn."""


def versions() -> dict[str, str]:
    """Of the software that a run is made with."""
    found = {name: version(name) for name in ("tptopk", "torch", "numpy", "dp-accounting")}
    return {**found, "python": platform.python_version()}


class Ledger:
    """The charges of one run against its plan; with a path, each is on disk before `charge` returns.

    A charge can only be one of the plan's own steps, in order, once an attempt: there is no way to charge other noise,
    another rate or fewer coordinates than the plan says, and none to take a charge back. What earlier attempts charged
    and lost stays charged, and no step is charged that would cost more than the plan does.

    `block` steps are charged by one line, ahead of time; a crash forfeits what is left of a block.
    """

    _broken = False  # whether a line could not be written; then no other is
    ended: str | None = None  # when the closing line was written

    def __init__(
        self,
        plan: Plan,
        path: Path | None = None,
        *,
        block: int = 1,
        seeded: bool = False,
        account_order: float | None = None,
        payment: str | None = None,
        described: Mapping[str, str] | None = None,
        generator: str | None = None,
        training_loss: bool = False,
    ) -> None:
        """`account_order`: the Rényi order of an account that paid for the plan; attempts together never cost more at it.
        `payment`: which payment of that account it was.

        `described`: names of the run, its data and its model, as `description.describe` gives them. `generator`: what noise is made by, as
        `Streams` names it. `training_loss`: whether somebody is shown it.
        """
        self.plan, self.path, self.attempt = plan, path, 1
        self.seeded, self.generator, self.training_loss = seeded, generator, training_loss
        self.described, self.begun = dict(described or {}), list[str | None]([now()])
        self.steps = Counter[int]()  # phase index → steps taken, those of earlier attempts that were kept among them
        self.lost = Counter[int]()  # phase index → steps charged whose outcome was lost
        self._reserved = Counter[int]()  # phase index → steps charged in advance
        self._block, self._charged_queries, self._unanswered = block, False, set[tuple[int, int]]()
        self._allowed: int | None = None  # steps that may still be charged; None: as many as planned
        self._file: int | None = None
        self.length, self.head, self._size = 0, START, 0
        if path is not None:
            self._file = open_locked(path, os.O_CREAT | os.O_EXCL)
        self._allowed = _affordable(plan, self.lost, self.steps)
        self._append({"kind": "plan", "format": FORMAT, "plan": plan.to_dict()})
        paid = {} if account_order is None else {"account_order": account_order, "payment": payment}
        self._append(
            {
                "kind": "attempt",
                "attempt": 1,
                "seeded": seeded,
                "versions": versions(),
                **paid,
                **self._said(self.described, generator),
            }
        )

    @classmethod
    def resume(
        cls,
        path: Path,
        taken: Mapping[int, int],
        length: int,
        head: str,
        *,
        block: int = 1,
        seeded: bool = False,
        paid: Mapping[str, float | str] | None = None,
        described: Mapping[str, str] | None = None,
        generator: str | None = None,
        training_loss: bool = False,
    ) -> Ledger:
        """Go on with a ledger from a checkpoint that stood at `taken` steps of each phase and that length and head.

        Every charge after the checkpoint stays charged and is lost. `paid`: the `account_order` and `payment` of an account that
        pays from now on.
        """
        self = cls.__new__(cls)
        self._file = open_locked(path, 0)
        try:
            found = read_ledger(path)
            if length > len(found.lines) or (length and found.lines[length - 1]["hash"] != head):
                raise Refusal(f"the checkpoint is not of this ledger: {path} does not hold the line that it names")
            self.plan, self.path, self._block = found.plan, path, block
            self.attempt = found.attempts + 1
            told = dict(described or {})
            self.seeded, self.generator = found.seeded or seeded, weaker(found.generator, generator)
            self.training_loss = found.training_loss or training_loss
            self.described, self.begun = together(found.described, told), [*found.begun, now()]
            self.steps = Counter({phase: count for phase, count in taken.items() if count})
            self.lost = Counter(found.charged)
            self.lost.subtract(self.steps)
            if any(count < 0 for count in self.lost.values()):
                raise Refusal(f"the checkpoint holds more steps than {path} ever charged; it is of another run")
            self._reserved = Counter(self.steps)
            self._charged_queries, self._unanswered = found.queries, set[tuple[int, int]]()
            self.length, self.head, self._size = len(found.lines), found.head, found.size
            if found.torn:
                os.ftruncate(self._file, found.size)
            self._allowed = _affordable(self.plan, self.lost, self.steps, found.account_order)
            self._append(
                {
                    "kind": "attempt",
                    "attempt": self.attempt,
                    "seeded": seeded,
                    "versions": versions(),
                    "from": length,
                    "torn": found.torn,
                    **(paid or {}),
                    **self._said(told, generator),
                }
            )
        except BaseException:
            os.close(self._file)
            raise
        return self

    @classmethod
    def carried_on(cls, plan: Plan, taken: Mapping[int, int], lost: Mapping[int, int]) -> Ledger:
        """A ledger in memory that goes on from kept counts: steps taken, and steps charged whose outcome was lost.

        A plan with a target ε never costs more than that, lost steps among it; one without ends with its steps.
        It is a second attempt at least; `follows` says what is known of those before.
        """
        self = cls(plan)
        self.steps, self.lost = Counter(taken), Counter(lost)
        self._reserved = Counter(self.steps)
        if plan.target_epsilon is not None:
            self._allowed = _affordable(plan, self.lost, self.steps)
        self.follows([None], None)
        return self

    def follows(self, begun: Sequence[str | None], generator: str | None) -> None:
        """The attempts before this one, by when they began, and the generator that may be claimed for all."""
        self.begun, self.generator = [*begun, self.begun[-1]], generator
        self.attempt = len(self.begun)

    def _said(self, described: Mapping[str, str], generator: str | None) -> dict[str, Any]:
        return {
            "time": self.begun[-1],
            **({"described": dict(described)} if described else {}),
            **({"generator": generator} if generator else {}),
            "training_loss": self.training_loss,
        }

    @property
    def charged(self) -> Counter[int]:
        """Phase index → steps charged in all attempts, whole blocks counted."""
        return Counter({i: max(self._reserved[i], self.steps[i]) + self.lost[i] for i in range(len(self.plan.phases))})

    @property
    def next_step(self) -> tuple[int, int] | None:
        """The phase and step of the plan that come next; None when all are taken."""
        for phase, numbers in enumerate(self.plan.phases):
            if self.steps[phase] < numbers.steps:
                return phase, self.steps[phase]
        return None

    @property
    def steps_allowed(self) -> int:
        """How many more steps may be charged without costing more than the plan."""
        left = self.plan.steps - sum(self.steps.values())
        return left if self._allowed is None else min(left, self._allowed)

    def count_along(self, first: Counts) -> None:
        """Of several processes, those that keep no ledger on the disk count as the first one does."""
        for phase in range(len(self.plan.phases)):
            self.steps[phase] = first.number(self.steps[phase])
        allowed = first.number(-1 if self._allowed is None else self._allowed)
        self._allowed = None if allowed < 0 else allowed
        self._charged_queries = bool(first.number(int(self._charged_queries)))

    def charge_queries(self) -> None:
        """Charge the plan's queries outside training; first, and whether or not they are asked in the end."""
        if self._charged_queries:
            return
        for index, query in enumerate(self.plan.queries):
            self._append(query_line(self.plan, index))
            self._unanswered |= {(index, step) for step in range(query.steps)}
        self._charged_queries = True

    def answer_query(self, index: int, step: int = 0) -> None:
        """Whoever draws a query's noise calls this first: the query was charged, in this attempt, and not yet answered."""
        if (index, step) not in self._unanswered:
            raise RuntimeError(f"query {index} was not charged, or was answered before: nothing was drawn")
        self._unanswered.remove((index, step))

    def charge(self, phase: int, step: int, support_size: int) -> None:
        """Write down one step. Whoever draws its noise calls this first."""
        earlier = [self.steps[i] == p.steps for i, p in enumerate(self.plan.phases[: max(phase, 0)])]
        in_order = 0 <= phase < len(self.plan.phases) and all(earlier)
        if not in_order or step != self.steps[phase] or step >= self.plan.phases[phase].steps:
            raise RuntimeError(f"step {step} of phase {phase} is not the next step of the plan: nothing was charged")
        if self.steps_allowed < 1:
            raise BudgetSpent("one more step would cost more than the plan: nothing was charged")
        if step >= self._reserved[phase]:
            count = min(self._block, self.plan.phases[phase].steps - step, self.steps_allowed)
            self._append(charge_line(self.plan, self.attempt, phase, step, count, support_size))
            self._reserved[phase] = step + count
        self.steps[phase] += 1
        if self._allowed is not None:
            self._allowed -= 1

    def close(self, status: str, files: Mapping[str, str], *, averaged: bool = False) -> None:
        """The last line: how the run ended, how many steps of each phase are in its model, and the hashes of the files it left. Then the file is let go."""
        if self._file is not None:
            taken = [self.steps[i] for i in range(len(self.plan.phases))]
            ended = now()
            self._append(
                {
                    "kind": "end",
                    "attempt": self.attempt,
                    "status": status,
                    "taken": taken,
                    "files": dict(files),
                    "time": ended,
                    **({"training_loss": True} if self.training_loss else {}),
                    **({"averaged": True} if averaged else {}),
                }
            )
            self.ended = ended
            self.release()

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def segments(self) -> list[Segment]:
        return self.plan.segments(self.charged, queries=self._charged_queries)

    def epsilon(self, *, delta: float | None = None, accountant: str | None = None) -> float:
        """ε of what has been charged so far. Reading it changes nothing."""
        if not self.plan.spec.private:
            return float("inf")
        return accounting.epsilon(
            self.segments(), self.plan.delta if delta is None else delta, accountant or self.plan.accountant
        )

    def _append(self, content: dict[str, Any]) -> None:
        if self._broken:
            raise RuntimeError(f"{self.path} could not be written before: nothing more is charged")
        if self._file is not None and os.fstat(self._file).st_size != self._size:
            self._read_back()
        line, text = chained(self.length, self.head, content)
        if self._file is not None:
            self._write(text)
        self.length, self.head, self._size = self.length + 1, line["hash"], self._size + len(text)

    def _read_back(self) -> None:
        """An interrupt came between a line and its being counted here: go by the file."""
        assert self._file is not None and self.path is not None
        lines, _, self._size = read_chain(self.path)
        os.ftruncate(self._file, self._size)
        self.length, self.head = len(lines), lines[-1]["hash"] if lines else START

    def recount(self) -> None:
        """After an interrupt: what the file holds is charged, and what was not counted here when it came is lost."""
        if self._file is None or self.path is None or self._broken:
            return
        self._read_back()
        found = read_ledger(self.path)
        self._charged_queries |= found.queries
        self.lost += found.charged - self.charged

    def _write(self, text: bytes) -> None:
        assert self._file is not None
        try:
            append_durably(self._file, text)
        except OSError as error:
            self.release()
            self._broken = True
            raise RuntimeError(f"{self.path} could not be written ({error}): nothing was drawn") from error


def _affordable(
    plan: Plan, lost: Mapping[int, int], taken: Mapping[int, int], account_order: float | None = None
) -> int | None:
    """How many of the remaining steps, in order, keep the whole within what the plan costs; None: all of them.

    An account paid for the plan at its own Rényi order: there the whole must not cost more either.
    """
    if not plan.spec.private or (not any(lost.values()) and plan.target_epsilon is None):
        return None
    budget = plan.epsilon() if plan.target_epsilon is None else plan.target_epsilon
    if not any(lost.values()) and plan.epsilon() <= budget:
        return None
    remaining = [i for i, p in enumerate(plan.phases) for _ in range(p.steps - taken.get(i, 0))]

    def cost(steps: int) -> float:
        total = Counter(lost) + Counter(taken) + Counter(remaining[:steps])
        return accounting.epsilon(plan.segments(total), plan.delta, plan.accountant)

    def paid(steps: int) -> bool:
        if account_order is None:
            return True
        total = plan.segments(Counter(lost) + Counter(taken) + Counter(remaining[:steps]))
        return accounting.renyi_cost(total, account_order) <= accounting.renyi_cost(plan.segments(), account_order)

    low, high = 0, len(remaining) + 1  # `low` steps are within the budget or low is 0; `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget and paid(middle) else (low, middle)
    return low
