"""What the terminal says: the verdict first, and the figures of the run itself."""

from __future__ import annotations

import io
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from torch import nn

from tests.report.runs import make_run
from tptopk.cli import main
from tptopk.privacy.account import charge_account, open_account
from tptopk.privacy.plan import Plan, PrivacyWarning
from tptopk.report.terminal import TrainingProgress, print_run
from tptopk.report.verdicts import account_values, print_account, print_advice, print_audits, print_verdict
from tptopk.supports.advice import Advice, Interval
from tptopk.training.loading import load
from tptopk.training.metrics import Metrics, StepRecord
from tptopk.training.verify import UNCHECKED, Verdict, verify

PLAN = Plan.calibrate(
    "tp-topk", epsilon=2.0, delta=1e-5, batch_size=50, dataset_size=1000, steps=40, warmup=0.5, accountant="rdp"
)


def said(show, *values) -> str:
    console = Console(width=400, record=True, file=io.StringIO())
    show(*values, console)
    return console.export_text()


def audit(**changes) -> SimpleNamespace:
    usual = {
        "name": "one step",
        "claimed": 1.0,
        "bounds": {"Gaussian DP": 1.043, "Clopper-Pearson": 0.6},
        "sure": {"Gaussian DP": 0.81, "Clopper-Pearson": 0.4},
        "observations": 8000,
        "error_rate": 0.05,
        "verdict_rate": 1e-4,
        "verdict": "consistent",
    }
    return SimpleNamespace(**{**usual, **changes})


def test_an_audit_begins_with_its_verdict_and_the_bound_that_it_rests_on():
    first, second, *_ = said(print_audits, [audit()]).splitlines()
    assert first.startswith("consistent: one step: by attack ε is at least 0.810 (Gaussian DP; wrong 0.0001 of")
    assert first.endswith("and 1.000 is claimed") and "1.043" in second and "decide nothing" in second
    broken = said(print_audits, [audit(sure={"Gaussian DP": 1.2}, verdict="BROKEN: …")])
    assert broken.startswith("BROKEN: one step: by attack ε is at least 1.200")
    assert "decide nothing" not in said(print_audits, [audit(bounds={"Gaussian DP": 0.9})])


def advice(**changes) -> Advice:
    wrong = Interval(0.4, 0.3, 0.5)
    found = Advice(
        verdict="cannot tell",
        reasons=("Because.",),
        active_ratio=None,
        score=None,
        learning_rate=None,
        candidates=(),
        misranking={"paper": wrong, "factored": wrong},
        signal=Interval(-0.1, -0.2, 0.1),
        step_energy=(-0.00047, 0.00096),
        sampling_energy=0.1,
        noise_energy=1.0,
        coordinates=100,
        warmup_steps=20,
        steps=40,
        level=0.95,
    )
    return replace(found, **changes)


def test_a_checked_run_ends_with_what_to_type_next_and_the_steps_taken(tmp_path):
    run = load(make_run(tmp_path / "run"), nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    words = said(print_run, run)
    assert "(24 steps, warm-up)" in words and "(36 steps, sparse)" in words
    assert words.strip().endswith(f"next: tptopk statement {run.folder}; tptopk report {run.folder}")
    run.facts = replace(run.facts, taken_steps=[24, 33])
    assert "(33 of 36 steps, sparse)" in said(print_run, run)


def test_an_open_run_is_not_said_to_hold(tmp_path):
    folder = make_run(tmp_path / "run")
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(lines[:20]))
    (folder / "run.json").write_text('{"format": 1, "status": "running"}')  # as it is until the ledger is closed
    for name in ("model.safetensors", "metrics.jsonl"):
        (folder / name).unlink()
    words = said(print_verdict, verify(folder), UNCHECKED)
    assert words.count("│ open ") == 2 and "resume=True" in words and "This run is not closed" in words
    assert "This folder supports a claim" not in words
    assert "supports no claim" in said(print_verdict, Verdict(), UNCHECKED), "nothing was checked"


def test_every_epsilon_of_a_check_is_rounded_up(tmp_path):
    verdict = verify(make_run(tmp_path / "run"))
    words = {what: text for what, _, text in verdict.checks}
    shown = said(print_verdict, verdict, UNCHECKED)
    claimed = shown.split("(ε, δ) = (")[1].split(",")[0]
    assert float(claimed) >= verdict.epsilon
    for what in ("accounting", "budget", "run.json"):
        assert f"ε = {claimed}" in words[what], words[what]
    assert "pld is the tighter" in words["accounting"]


def test_progress_ends_at_the_epsilon_of_the_run():
    bar = TrainingProgress(PLAN, "x")
    assert isinstance(bar, Metrics)
    bar._console = SimpleNamespace(is_terminal=True)
    bar.step(StepRecord(step=30, phase=1, support_size=3, learning_rate=0.1, gradient_norm=1.0))
    task = bar._bar.tasks[0]
    assert task.completed == 30 and task.fields["spent"].endswith("so far"), "a resumed run's first steps count"
    assert [segment.steps for segment in bar._first(30)] == [20, 10]
    bar.end(SimpleNamespace(epsilon=1.99841))
    assert bar._bar.tasks[0].fields["spent"] == "ε 1.9985"


def test_an_account_shows_lines_that_add_up(tmp_path):
    open_account(tmp_path / "a", 6.0, 1e-5)
    charge_account(tmp_path / "a", PLAN, "runs/a1")
    account = charge_account(tmp_path / "a", PLAN, "runs/a2")
    values = account_values(account)
    assert [run["epsilon_alone"] for run in values["runs"]] == pytest.approx([PLAN.epsilon()] * 2)
    words = said(print_account, values)
    once = float(words.split("(ε, δ) adds ")[1].split(",")[0])
    assert sum(run["cost"] for run in values["runs"]) + once == pytest.approx(account.epsilon_spent, abs=1e-4)
    assert "2 runs: together" in words and "not the sum of the runs' own ε" in words
    assert f"at most {account.room:.4f}" in words


def test_advice_begins_with_the_verdict_and_what_to_type():
    words = said(print_advice, advice())
    assert words.startswith("Verdict: cannot tell. Use --method dp-sgd unless")
    assert "--warmup-budget" in words.splitlines()[0] and "paid for too" in words.splitlines()[0]
    assert words.index("Because.") < words.index("100 coordinates") and "-0." not in words
    assert said(print_advice, advice(verdict="stay dense")).startswith("Verdict: stay dense. Use --method dp-sgd.")
    restrict = advice(verdict="restrict", active_ratio=0.1, score="factored", learning_rate=(1.5, 3.0))
    assert "Use --method tp-topk --active-ratio 0.1 --score factored" in said(print_advice, restrict).splitlines()[0]


def test_a_warning_is_said_once_a_command(tmp_path, monkeypatch, capsys):
    with pytest.warns(PrivacyWarning, match="delta = 0.01"):
        folder = make_run(tmp_path / "loose", delta=0.01)
    monkeypatch.setattr(sys, "argv", ["tptopk", "verify", str(folder)])
    monkeypatch.setattr("warnings.showwarning", lambda *rest, **more: None)  # `main` puts its own in place
    with warnings.catch_warnings(), pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.count("warning: delta = 0.01") == 1
