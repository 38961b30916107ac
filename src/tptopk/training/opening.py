"""Opens a run: its folder, its ledger, and where an earlier attempt stood."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from tptopk.privacy.account import charge_account, read_account
from tptopk.privacy.description import describe
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.plan import Plan
from tptopk.privacy.randomness import Streams
from tptopk.training.run import RunFolder, refuse_another_schema
from tptopk.training.standing import Standing, resumed


def opened(
    model: nn.Module,
    plan: Plan,
    standing: Standing,
    *,
    out: str | Path | None,
    resume: bool,
    from_start: bool,
    account: str | Path | None,
    seed: int | None,
    secure: bool,
    config: Mapping[str, Any],
    schema: Mapping[str, Any] | None,
) -> tuple[Ledger, RunFolder | None, Streams]:
    """The ledger and the folder of a new run, paid for by its account, or of one that goes on; and fresh randomness.

    `from_start`: whether a run without a checkpoint may begin again.
    """
    described, seeded = describe(out, model, config, schema), seed is not None
    streams = Streams(run=secrets.token_hex(8), seed=seed, secure=secure)
    if resume and out is not None:
        refuse_another_schema(out, schema)
        ledger = resumed(
            Path(out), plan, standing, account=account, seeded=seeded, from_start=from_start, described=described,
            generator=streams.name,
        )  # fmt: skip
        streams = Streams(run=secrets.token_hex(8), attempt=ledger.attempt, seed=seed, secure=secure)
        try:
            return ledger, RunFolder(out, model, plan, config, resume=True, schema=schema), streams
        except BaseException:
            ledger.release()
            raise
    payment = None if account is None else secrets.token_hex(8)
    pay = None if account is None else partial(charge_account, account, plan, payment=payment)
    folder = None
    if out is not None:
        folder = RunFolder(out, model, plan, config, pay=pay, schema=schema)
    elif pay is not None:
        pay("")
    ledger = Ledger(
        plan, folder.ledger if folder else None, seeded=seeded, payment=payment, described=described, generator=streams.name,
        account_order=None if account is None else read_account(account).order,
    )  # fmt: skip
    return ledger, folder, streams
