"""Several runs against one budget, added up at one Rényi order that was fixed when the account was opened."""

from __future__ import annotations

import pytest

from tptopk.privacy import accounting
from tptopk.privacy.account import charge_account, open_account, read_account
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.refusal import Refusal


def plan(steps=50, noise=2.0):
    phase = Phase(steps=steps, sample_rate=0.05, noise_multiplier=noise, clip_norm=1.0)
    return Plan(phases=(phase,), delta=1e-5, dataset_size=1000, accountant="rdp")


def test_runs_add_up_and_the_one_too_many_is_refused(tmp_path):
    account = open_account(tmp_path / "a", 3.0, 1e-5)
    assert account.room > 0 and account.epsilon_spent == 0.0
    spent = []
    with pytest.raises(Refusal, match="would take it to"):
        for n in range(1000):
            spent.append(charge_account(tmp_path / "a", plan(), f"run {n}").epsilon_spent)
    assert len(spent) > 2 and spent == sorted(spent) and spent[-1] <= 3.0
    assert len(read_account(tmp_path / "a").runs) == len(spent), "a refused run takes nothing"
    together = accounting.epsilon([p.segment for _ in spent for p in plan().phases], 1e-5, "rdp")
    assert together <= spent[-1] <= 1.5 * together, "one fixed order costs more than the best one, and not much more"


def test_different_noise_is_added_at_the_same_order(tmp_path):
    account = open_account(tmp_path / "a", 5.0, 1e-6)
    after = charge_account(tmp_path / "a", plan(20, 3.0), "one")
    after = charge_account(tmp_path / "a", plan(30, 1.5), "two")
    segments = [plan(20, 3.0).phases[0].segment, plan(30, 1.5).phases[0].segment]
    assert after.spent == pytest.approx(accounting.renyi_cost(segments, account.order))
    assert after.epsilon_spent >= accounting.epsilon(segments, 1e-6, "rdp")


def test_bad_accounts_are_refused(tmp_path):
    with pytest.raises(Refusal):
        open_account(tmp_path / "a", -1.0, 1e-5)
    open_account(tmp_path / "a", 1.0, 1e-5)
    with pytest.raises(Refusal, match="File exists"):
        open_account(tmp_path / "a", 1.0, 1e-5)
    charge_account(tmp_path / "a", plan(1, 9.0), "one")
    content = (tmp_path / "a").read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1
        (tmp_path / "b").write_bytes(bytes(changed))
        with pytest.raises(Refusal):
            charge_account(tmp_path / "b", plan(1, 9.0), "two")
    (tmp_path / "b").write_bytes(content[:-5])
    with pytest.raises(Refusal, match="never finished"):
        charge_account(tmp_path / "b", plan(1, 9.0), "two")
    with pytest.raises(Refusal, match="cannot"):
        charge_account(tmp_path / "nowhere", plan(), "one")
    with pytest.raises(Refusal, match="not private"):
        charge_account(
            tmp_path / "a",
            Plan.calibrate("non-private", epsilon=1.0, delta=1e-5, batch_size=5, dataset_size=50, steps=2),
            "x",
        )
