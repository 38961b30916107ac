"""Promise 5, first half: charged before noise, only by the plan, never twice."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tptopk.privacy import accounting
from tptopk.privacy.chain import head_of
from tptopk.privacy.ledger import BudgetSpent, Ledger
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.plan import Phase, Plan
from tptopk.privacy.refusal import Refusal
from tptopk.privacy.statement import facts_of

PLAN = Plan(
    phases=(
        Phase(steps=2, sample_rate=0.1, noise_multiplier=2.0, clip_norm=1.0),
        Phase(steps=3, sample_rate=0.1, noise_multiplier=1.0, clip_norm=0.5),
    ),
    delta=1e-5,
    dataset_size=1000,
    method="tp-rand",
    active_ratio=0.5,
    accountant="rdp",
    queries=(Phase(steps=1, sample_rate=1.0, noise_multiplier=30.0, clip_norm=1.0, name="q"),),
)


def test_a_full_ledger_costs_what_the_plan_costs():
    ledger = Ledger(PLAN)
    ledger.charge_queries()
    spent = [ledger.epsilon()]
    for phase, numbers in enumerate(PLAN.phases):
        for step in range(numbers.steps):
            ledger.charge(phase, step, 10)
            spent.append(ledger.epsilon())
    assert spent == sorted(spent)
    assert spent[-1] == PLAN.epsilon()


@pytest.mark.parametrize(("phase", "step"), [(0, 1), (0, -1), (1, 1), (2, 0)])
def test_a_step_out_of_order_is_not_charged(phase, step):
    ledger = Ledger(PLAN)
    with pytest.raises(RuntimeError, match="not the next step"):
        ledger.charge(phase, step, 1)
    assert ledger.epsilon() == 0.0


def test_a_step_is_charged_once_and_no_phase_is_longer_than_planned():
    ledger = Ledger(PLAN)
    for step in range(2):
        ledger.charge(0, step, 1)
        with pytest.raises(RuntimeError):
            ledger.charge(0, step, 1)
    with pytest.raises(RuntimeError):
        ledger.charge(0, 2, 1)


def test_a_charge_is_on_disk_when_it_returns(tmp_path):
    ledger = Ledger(PLAN, tmp_path / "ledger.jsonl")
    ledger.charge_queries()
    ledger.charge(0, 0, 7)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["plan", "attempt", "query", "steps"]
    assert Plan.from_dict(lines[0]["plan"]) == PLAN
    assert {key: value for key, value in lines[3].items() if key not in ("line", "before", "hash")} == {
        "kind": "steps",
        "attempt": 1,
        "phase": 0,
        "first": 0,
        "count": 1,
        "noise_multiplier": 2.0,
        "sample_rate": 0.1,
        "clip_norm": 1.0,
        "divisor": 100.0,
        "support_size": 7,
        "adjacency": "zero-out",
    }
    with pytest.raises(Refusal, match="File exists"):
        Ledger(PLAN, tmp_path / "ledger.jsonl")


def written(path, steps=4):
    """A closed ledger with that many steps charged."""
    ledger = Ledger(PLAN, path)
    ledger.charge_queries()
    for phase, step in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)][:steps]:
        ledger.charge(phase, step, 5)
    ledger.close("finished", {"model.safetensors": "0" * 64})
    return path.read_bytes()


def test_a_ledger_reads_back_as_it_was_written(tmp_path):
    written(tmp_path / "l", 4)
    record = read_ledger(tmp_path / "l")
    assert record.plan == PLAN and record.charged == {0: 2, 1: 2} and record.queries and not record.problems
    assert record.end is not None and record.end["status"] == "finished" and record.attempts == 1 and not record.torn


def test_any_byte_changed_is_noticed(tmp_path):
    """Every byte of the file, each flipped in its lowest bit: a broken chain, or a torn tail without its closing line."""
    path = tmp_path / "l"
    content = written(path)
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(bytes(changed))
        try:
            record = read_ledger(path)
        except Refusal:
            continue
        assert place == len(content) - 1 and record.end is None, f"byte {place}"


def test_lines_removed_swapped_or_added_are_noticed(tmp_path):
    path = tmp_path / "l"
    lines = written(path).splitlines(keepends=True)
    for n in range(len(lines) - 1):
        path.write_bytes(b"".join(lines[:n] + lines[n + 1 :]))
        with pytest.raises(Refusal):
            read_ledger(path)
        path.write_bytes(b"".join([*lines[:n], lines[n + 1], lines[n], *lines[n + 2 :]]))
        with pytest.raises(Refusal):
            read_ledger(path)
    path.write_bytes(b"".join([*lines, lines[-1]]))
    with pytest.raises(Refusal):
        read_ledger(path)


def test_a_cut_tail_is_a_crash_and_costs_the_whole_plan(tmp_path):
    path = tmp_path / "l"
    content = written(path, 2)
    for cut in range(1, len(content) - content.index(b"\n") - 2, 37):
        path.write_bytes(content[:-cut])
        facts = facts_of(read_ledger(path))
        assert facts.status == "crashed" and facts.epsilon == PLAN.epsilon()


def test_a_block_is_charged_ahead_and_forfeited_by_a_crash(tmp_path):
    ledger = Ledger(PLAN, tmp_path / "l", block=2)
    ledger.charge(0, 0, 1)
    assert ledger.charged[0] == 2 and read_ledger(tmp_path / "l").charged[0] == 2
    ledger.charge(0, 1, 1)
    ledger.charge(1, 0, 1)
    assert [line["count"] for line in read_ledger(tmp_path / "l").lines if line["kind"] == "steps"] == [2, 2]
    ledger.release()
    again = Ledger.resume(tmp_path / "l", {0: 2}, 0, "")
    assert again.lost[1] == 2 and again.charged[1] == 2


def test_resuming_keeps_what_was_lost_and_drops_what_it_makes_unaffordable(tmp_path):
    plan = replace(PLAN, phases=(replace(PLAN.phases[0], steps=20), replace(PLAN.phases[1], steps=30)))
    ledger = Ledger(plan, tmp_path / "l")
    ledger.charge_queries()
    for step in range(12):
        ledger.charge(0, step, 1)
    ledger.release()
    with pytest.raises(Refusal, match="not of this ledger"):
        Ledger.resume(tmp_path / "l", {0: 5}, 8, "f" * 64)
    again = Ledger.resume(tmp_path / "l", {0: 5}, 0, "")
    assert again.attempt == 2 and again.lost == {0: 7} and again.steps == {0: 5}
    taken = 0
    for phase, numbers in enumerate(plan.phases):
        for step in range(again.steps[phase], numbers.steps):
            if again.steps_allowed < 1:
                with pytest.raises(BudgetSpent):
                    again.charge(phase, step, 1)
                break
            again.charge(phase, step, 1)
            taken += 1
    assert taken < 45 and again.epsilon() <= plan.epsilon()
    one_more = [*again.segments(), plan.phases[1].segment._replace(steps=1)]
    assert accounting.epsilon(one_more, plan.delta, "rdp") > plan.epsilon(), "no step was dropped that could be paid"
    record = read_ledger(tmp_path / "l")
    assert record.charged == again.charged and record.attempts == 2


@pytest.mark.parametrize(
    ("attempts", "generator", "shown"),
    [
        ([("chacha20", False)], "chacha20", False),
        ([("chacha20", False), ("chacha20", True), ("chacha20", False)], "chacha20", True),
        ([("philox", True), ("chacha20", False)], "philox", True),
        ([("chacha20", False), ("philox", False)], "philox", False),
        ([(None, False), ("chacha20", False)], "philox", False),  # begun when ledgers did not say
        ([(None, False), (None, False)], None, False),
    ],
)
def test_a_caveat_of_one_attempt_is_one_of_the_run(attempts, generator, shown, tmp_path):
    for n, (name, loss) in enumerate(attempts):
        said = {"generator": name, "training_loss": loss}
        ledger = Ledger.resume(tmp_path / "l", {}, 0, "", **said) if n else Ledger(PLAN, tmp_path / "l", **said)
        ledger.release()  # killed: there is no closing line
    record = read_ledger(tmp_path / "l")
    assert (record.generator, record.training_loss) == (generator, shown) == (ledger.generator, ledger.training_loss)
    for told in ("philox", "chacha20"):  # run.json's word counts where the ledger has none
        facts = facts_of(record, generator=told)
        assert (facts.generator, facts.training_loss) == (generator or told, shown)
    assert facts_of(record, training_loss=True).training_loss


def test_ledgers_without_these_words_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(Ledger, "_said", lambda self, described, generator: {})
    Ledger(PLAN, tmp_path / "l").release()
    assert "training_loss" not in (tmp_path / "l").read_text()
    facts = facts_of(read_ledger(tmp_path / "l"), generator="chacha20", training_loss=True)
    assert facts.generator == "chacha20" and facts.training_loss


def test_two_writers_and_a_link_are_kept_out(tmp_path):
    ledger = Ledger(PLAN, tmp_path / "l")
    with pytest.raises(Refusal, match="another process is writing"):
        Ledger.resume(tmp_path / "l", {}, 0, "")
    ledger.release()
    (tmp_path / "link").symlink_to(tmp_path / "l")
    with pytest.raises(Refusal, match="cannot open"):
        Ledger.resume(tmp_path / "link", {}, 0, "")


def test_a_full_disk_charges_nothing_and_leaves_the_chain_whole(tmp_path, monkeypatch):
    ledger = Ledger(PLAN, tmp_path / "l")
    ledger.charge(0, 0, 1)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:20]))
    with pytest.raises(RuntimeError, match="nothing was drawn"):
        ledger.charge(0, 1, 1)
    monkeypatch.undo()
    assert ledger.steps[0] == 1 and read_ledger(tmp_path / "l").charged[0] == 1
    with pytest.raises(RuntimeError, match="nothing more is charged"):
        ledger.charge(0, 1, 1)


def test_an_interrupt_in_the_middle_of_a_line_leaves_the_chain_whole(tmp_path, monkeypatch):
    ledger = Ledger(PLAN, tmp_path / "l")
    ledger.charge(0, 0, 1)

    def interrupt(file):
        raise KeyboardInterrupt

    for spoil in (
        {"fsync": interrupt},
        {"write": lambda file, text, write=os.write: write(file, text[:30]) and interrupt(file)},
    ):
        for name, function in spoil.items():
            monkeypatch.setattr(os, name, function)
        with pytest.raises(KeyboardInterrupt):
            ledger.charge(0, 1, 1)
        monkeypatch.undo()
    ledger.close("interrupted", {})
    record = read_ledger(tmp_path / "l")
    assert record.end is not None and record.charged[0] == 2, (
        "the line that was written whole counts, the torn one does not"
    )


def test_a_ledger_from_a_newer_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tptopk.privacy.ledger.FORMAT", 2)
    written(tmp_path / "l")
    monkeypatch.undo()
    with pytest.raises(Refusal, match="another version"):
        read_ledger(tmp_path / "l")


def forge(path: Path, lines: list[dict]) -> None:
    """The lines as somebody writes them who knows how they are chained."""
    head, forged = "0" * 64, []
    for number, line in enumerate(lines):
        line["line"], line["before"] = number, head
        head = line["hash"] = head_of(line)
        forged.append(json.dumps(line, separators=(",", ":")))
    path.write_text("\n".join(forged) + "\n")


@pytest.mark.parametrize(("line", "right"), [(2, 30.0), (3, 2.0)])
def test_a_charge_that_is_not_the_plans_is_found(tmp_path, line, right):
    path = tmp_path / "l"
    lines = [json.loads(text) for text in written(path).splitlines()]
    lines[line]["noise_multiplier"] = 99.0
    forge(path, lines)
    found = read_ledger(path).problems
    assert found == [f"line {line + 1}: noise_multiplier is 99.0, and the plan says {right}"]


def test_a_query_that_the_plan_does_not_have_is_refused(tmp_path):
    path = tmp_path / "l"
    lines = [json.loads(text) for text in written(path).splitlines()]
    forge(path, [*lines[:3], dict(lines[2]), *lines[3:]])
    with pytest.raises(Refusal, match="line 4 .* charges a query that the plan does not have"):
        read_ledger(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_spoilt_ledger_is_refused_or_costs_no_less(tmp_path, data):
    """Bytes cut out, written over or put in at random: a clear refusal, or an ε that is not below what was charged."""
    path = tmp_path / "fuzz"
    path.unlink(missing_ok=True)
    content = bytearray(written(path, 3))
    spent = facts_of(read_ledger(path)).epsilon
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        stop = min(len(content), start + data.draw(st.integers(0, 300)))
        content[start:stop] = data.draw(st.binary(max_size=20))
    path.write_bytes(bytes(content))
    try:
        found = facts_of(read_ledger(path))
    except Refusal:
        return
    assert found.epsilon >= spent
