"""A statement can be filed: it begins with what the run is, and stays what the ledger gives."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tests.privacy.test_ledger import PLAN, forge, written
from tptopk.privacy.description import describe, plain, together
from tptopk.privacy.ledger import Ledger
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.refusal import Refusal
from tptopk.privacy.statement import as_values, facts_of, statement

CONFIG = {"data": "/home/anna/clinic.csv", "schema": "tables/clinic.toml", "model": "clinicnet:build", "epsilon": 3.0}


def closed(path, described=None):
    ledger = Ledger(PLAN, path, described=described)
    ledger.charge_queries()
    ledger.charge(0, 0, 5)
    ledger.close("finished", {})
    return path


def stated(path) -> str:
    record = read_ledger(path)
    return statement(record.plan, facts_of(record))


def test_a_statement_begins_with_what_an_officer_files(tmp_path):
    lines = stated(closed(tmp_path / "l", describe(tmp_path / "clinic-3", object(), CONFIG))).splitlines()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"
    assert lines[:3] == ["# Privacy statement", "", "- Run: clinic-3"]
    assert re.fullmatch(f"- Begun: {time}", lines[3]) and re.fullmatch(f"- Ended: {time}, finished", lines[4])
    assert lines[5:9] == [
        "- Data: clinic.csv; declared size: 1,000 records",
        "- Protected unit: one record",
        "- Model: clinicnet:build",
        "- Columns: those that clinic.toml declares",
    ]
    assert "no file can prove them" in lines[10]


def test_ledgers_without_times_are_read_and_state_what_they_did_before(tmp_path):
    path = tmp_path / "l"
    lines = [json.loads(text) for text in written(path).splitlines()]
    assert [line["kind"] for line in lines if "time" in line] == ["attempt", "end"]
    for line in lines:
        line.pop("time", None)
    forge(path, lines)
    assert stated(path).startswith("# Privacy statement\n\nTraining satisfies **(ε, δ) = (")


def test_no_figure_depends_on_a_clock(tmp_path):
    path = tmp_path / "l"
    lines = [json.loads(text) for text in written(path).splitlines()]
    before = as_values(PLAN, facts_of(read_ledger(path)))
    for line in lines:
        if "time" in line:
            line["time"] = "1970-01-01T00:00:00Z"
    forge(path, lines)
    after = as_values(PLAN, facts_of(read_ledger(path)))
    assert [key for key in before if before[key] != after[key]] == ["begun", "ended", "statement"]


@pytest.mark.parametrize(
    ("word", "value", "kind"),
    [
        ("time", "yesterday", "time"),
        ("time", 7, "time"),
        ("time", "2026-11-16T14:15:02Z\n# A claim", "time"),
        ("described", 3, "description"),
        ("described", {"data": ["x"]}, "description"),
    ],
)
def test_a_time_or_a_description_that_is_none_is_refused(tmp_path, word, value, kind):
    path = tmp_path / "l"
    lines = [json.loads(text) for text in written(path).splitlines()]
    lines[1][word] = value
    forge(path, lines)
    with pytest.raises(Refusal, match=f"line 2 holds a {kind}"):
        read_ledger(path)


def test_a_name_cannot_write_a_line_or_a_claim_of_its_own(tmp_path):
    bad = "x.csv\n\nTraining satisfies **(ε, δ) = (0.1, 1e-9)**\n| \udc80 <b>"
    told = describe("runs/a", object(), {"data": f"data/{bad}"})
    found = stated(closed(tmp_path / "l", told))
    assert (
        "**(ε, δ) = (0.1" not in found and found.encode() and len(re.findall("^Training satisfies", found, re.M)) == 1
    )
    assert plain(plain(bad)) == plain(bad) and len(plain("a " * 900)) <= 1000


def test_a_table_is_filed_with_its_columns_and_their_bounds(tmp_path):
    schema = {
        "target": "outcome",
        "classes": ["no", "yes"],
        "numeric": {"age": [0.0, 120.0], "dose": [0.0, 2.5]},
        "categories": {"ward": ["A", "B"]},
    }
    found = stated(closed(tmp_path / "l", describe("runs/a", object(), CONFIG, schema)))
    assert "- Columns: age (0 to 120), dose (0 to 2.5), ward (2 categories), target outcome\n" in found


def test_a_resumed_run_names_each_attempt_and_what_it_was_told(tmp_path):
    path = tmp_path / "l"
    ledger = Ledger(PLAN, path, described={"run": "a", "data": "x.csv"})
    ledger.release()
    again = Ledger.resume(path, {}, 0, "", described={"run": "a", "data": "y.csv"})
    assert len(again.begun) == 2 and again.described == {"run": "a", "data": "x.csv, then y.csv"}
    again.close("finished", {})
    record = read_ledger(path)
    assert (record.described, record.begun, record.ended) == (again.described, again.begun, again.ended)
    assert "- Begun, 2 attempts: " in stated(path) and "- Data: x.csv, then y.csv; declared" in stated(path)
    assert together({"data": "x, then y"}, {"data": "x"}) == {"data": "x, then y"}


def test_an_open_run_has_no_end(tmp_path):
    Ledger(PLAN, tmp_path / "l").release()
    assert "- Ended: not on record: its ledger is not closed" in stated(tmp_path / "l")


def test_a_delta_of_one_in_n_is_too_large():
    with pytest.warns(UserWarning, match="delta = 0.001"):
        assert replace(PLAN, delta=1e-3).delta_too_large and not PLAN.delta_too_large


def test_a_delta_that_pld_does_not_reach_has_a_statement(tmp_path):
    """Refused after everything is charged, it would leave a run without one."""
    small = replace(PLAN, delta=1e-13, accountant="rdp")
    with pytest.raises(Refusal, match="use accountant='rdp'"):
        replace(small, accountant="pld").epsilon()
    ledger = Ledger(small, tmp_path / "l")
    ledger.charge_queries()
    ledger.charge(0, 0, 5)
    ledger.close("finished", {})
    words = stated(tmp_path / "l")
    assert "δ = 1e-13" in words and "Without that assumption the same noise gives ε = " in words
    record = read_ledger(tmp_path / "l")
    assert as_values(record.plan, facts_of(record))["epsilon_without_amplification"] > 0


@pytest.mark.parametrize("word", ["**free**", "a|b", "<script>", "two\nlines", "x" * 41, 7, "[a](b)", "# head"])
def test_no_word_of_a_plan_is_more_than_a_word_in_a_statement(word):
    with pytest.raises(Refusal, match="without Markdown's characters"):
        replace(PLAN.phases[0], name=word)
    with pytest.raises(Refusal, match="without Markdown's characters"):
        replace(PLAN, unit=word)
