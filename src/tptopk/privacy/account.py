"""Several runs on the same data against one budget, tuning included.

Which run comes next, and with what noise, may depend on what earlier runs released. Adding up privacy loss
distributions is not proven for that; adding up Rényi costs at one order, fixed beforehand, is (a privacy filter:
Feldman & Zrnic 2021). So an account fixes an order α when it is opened, takes the whole cost of a run's plan before
the run begins, and never gives any of it back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tptopk.privacy import accounting
from tptopk.privacy.accounting import Segment
from tptopk.privacy.chain import START, append_durably, chained, open_locked, read_chain
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal, check_number

FORMAT = 1


@dataclass(frozen=True)
class Account:
    """The state of an account file."""

    path: Path
    epsilon: float
    delta: float
    order: float
    runs: list[dict[str, Any]]

    @property
    def spent(self) -> float:
        """Σ ε_α of all runs."""
        return float(sum(run["cost"] for run in self.runs))

    @property
    def room(self) -> float:
        """ε_α that the budget still has."""
        return accounting.renyi_room(self.epsilon, self.delta, self.order) - self.spent

    @property
    def epsilon_spent(self) -> float:
        """What the runs so far cost together at the account's δ: an upper bound, whatever depended on what."""
        return self.epsilon - self.room if self.runs else 0.0


def open_account(path: str | Path, epsilon: float, delta: float) -> Account:
    """Open an account with a budget. Its order is the one at which Gaussian noise gets most out of that budget."""
    check_number("epsilon", epsilon, above=0)
    check_number("delta", delta, above=0, below=1)
    order = max(accounting.ORDERS, key=lambda a: accounting.renyi_room(epsilon, delta, a) / a)
    if accounting.renyi_room(epsilon, delta, order) <= 0:
        raise Refusal(f"no order converts to ε = {epsilon:g} at δ = {delta:g}; the budget is too small for any run")
    file = open_locked(Path(path), os.O_CREAT | os.O_EXCL)
    try:
        _append(
            file, 0, START, {"kind": "account", "format": FORMAT, "epsilon": epsilon, "delta": delta, "order": order}
        )
    finally:
        os.close(file)
    return read_account(path)


def read_account(path: str | Path) -> Account:
    lines, torn, _ = read_chain(Path(path))
    try:
        first = lines[0]
        if first["kind"] != "account" or first["format"] != FORMAT:
            raise Refusal(f"{path} is not an account file that this version can read")
        if torn:
            raise Refusal(
                f"the last line of {path} was never finished; a run may have begun on it. Look before you cut it off"
            )
        runs = [line for line in lines[1:] if line["kind"] == "run"]
        for run in runs:
            check_number("cost", run["cost"], least=0)
        return Account(Path(path), float(first["epsilon"]), float(first["delta"]), float(first["order"]), runs)
    except (IndexError, KeyError, TypeError) as error:
        raise Refusal(f"{path} is not an account: {error!r}") from error


def charge_account(
    path: str | Path, plan: Plan, name: str, payment: str | None = None, besides: Sequence[Segment] = ()
) -> Account:
    """Take the whole of a plan from the account, or refuse; the line is on the disk when this returns.

    `payment` tells this payment from every other; the run's ledger holds it. `besides`: what a run that pays late has charged already.
    """
    if not plan.spec.private:
        raise Refusal("a run that is not private cannot be paid for by any account")
    file = open_locked(Path(path), 0)
    try:
        account = read_account(path)
        cost = accounting.renyi_cost([*besides, *plan.segments()], account.order)
        if cost > account.room:
            raise Refusal(
                f"{path} has a budget of ε = {account.epsilon:g} at δ = {account.delta:g}, of which {account.epsilon_spent:.4g} is spent; this "
                f"plan would take it to {account.epsilon - account.room + cost:.4g}"
            )
        lines, _, _ = read_chain(Path(path))
        line = {"kind": "run", "name": name, "cost": cost, "plan": plan.to_dict(), "payment": payment}
        _append(file, len(lines), lines[-1]["hash"], line)
    finally:
        os.close(file)
    return read_account(path)


def has_paid(path: str | Path, payment: str | None) -> bool:
    """Whether the account made this payment. A name and a plan would not tell: two runs may have the same."""
    return payment is not None and any(run.get("payment") == payment for run in read_account(path).runs)


def _append(file: int, number: int, before: str, content: dict[str, Any]) -> None:
    _, text = chained(number, before, content)
    try:
        append_durably(file, text)
    except OSError as error:
        raise Refusal(f"the account could not be written: {error}") from error
