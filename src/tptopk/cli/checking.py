"""Commands for whoever must check a claim: statement, verify, audit, account."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from tptopk.cli.options import AsJson, app
from tptopk.privacy.refusal import Refusal
from tptopk.training.begun import how_to_resume, run_folder

account_app = typer.Typer(no_args_is_help=True, help="One budget for several runs.\n\nAll of them on the same data.")
app.add_typer(account_app, name="account")


@app.command()
def statement(run: Annotated[str, typer.Argument(metavar="RUN", help="a run folder")], json_: AsJson = False) -> None:
    """Print what may be claimed for a run.

    And what may not, from its ledger.
    """
    folder = run_folder(run)
    from tptopk.privacy.ledger_record import read_ledger
    from tptopk.privacy.statement import as_values
    from tptopk.privacy.statement import statement as in_words
    from tptopk.training.facts import facts_in

    record = read_ledger(folder / "ledger.jsonl")
    facts = facts_in(folder, record)
    print(json.dumps(as_values(record.plan, facts)) if json_ else in_words(record.plan, facts))
    if record.end is None:
        print(f"if the run was killed, go on with: {how_to_resume(folder)}", file=sys.stderr)


@app.command()
def verify(run: Annotated[str, typer.Argument(metavar="RUN", help="a run folder")], json_: AsJson = False) -> None:
    """Recompute a run's ε and check its files.

    ε is computed from its ledger, twice, and everything in its folder is checked against it.
    """
    folder = run_folder(run)
    from tptopk.report.verdicts import print_verdict
    from tptopk.training.verify import UNCHECKED
    from tptopk.training.verify import verify as check

    found = check(folder)
    if json_:
        values = {"holds": found.holds, "epsilon": found.epsilon, "delta": found.delta, "epsilons": found.epsilons}
        checks = [{"check": what, "holds": ok, "words": words} for what, ok, words in found.checks]
        print(json.dumps({**values, "checks": checks, "not_checked": UNCHECKED}))
    else:
        print_verdict(found, UNCHECKED, Console())
    if not found.holds:
        raise typer.Exit(1)


@app.command()
def audit(
    epsilon: Annotated[str, typer.Option(help="ε of one step to attack, separated by commas")] = "1,3,8",
    delta: Annotated[float, typer.Option(help="δ")] = 1e-5,
    observations: Annotated[
        int, typer.Option(help="observations of a step with the record, and as many without")
    ] = 20_000,
    runs: Annotated[int, typer.Option(help="whole two-phase runs to attack; 0 for none")] = 400,
    error_rate: Annotated[float, typer.Option(help="how often a bound may be wrong")] = 0.05,
    plot: Annotated[str | None, typer.Option(help="write a figure to this file")] = None,
    json_: AsJson = False,
) -> None:
    """Attack the mechanism; bound ε from below.

    The shipped mechanism, at its worst case; what ε is at least is printed beside what is claimed.
    """
    try:
        budgets = [float(value) for value in epsilon.split(",")]
    except ValueError as error:
        raise Refusal(f"epsilon is {epsilon!r}; give numbers separated by commas, such as 1,3,8") from error
    from tptopk.experiments.audit import audit_mechanism, audit_run, run_plan
    from tptopk.experiments.planted import audit_values, one_step_plan
    from tptopk.report.plots import audit_figure
    from tptopk.report.verdicts import print_audits

    found = [
        result
        for budget in budgets
        for result in audit_mechanism(one_step_plan(budget, delta), observations=observations, error_rate=error_rate)
    ]
    if runs:
        found.append(audit_run(run_plan(delta=delta), runs=runs, error_rate=error_rate))
    print(json.dumps([audit_values(result) for result in found])) if json_ else print_audits(found, Console())
    if plot:
        audit_figure(found, plot, "Lower bounds on ε by attack, beside the claim")
        if not json_:
            print(f"wrote {plot}")
    if any(result.verdict != "consistent" for result in found):
        raise typer.Exit(1)


@account_app.command(name="open")
def open_(
    path: Annotated[str, typer.Argument(metavar="FILE", help="the new account's file")],
    epsilon: Annotated[float, typer.Option(help="budget ε of all runs together")],
    delta: Annotated[float, typer.Option(help="δ of the budget")] = 1e-5,
    json_: AsJson = False,
) -> None:
    """Open an account for a dataset.

    It is a budget that several runs share.
    """
    from tptopk.privacy.account import open_account
    from tptopk.report.verdicts import account_values

    account = open_account(path, epsilon, delta)
    if json_:
        print(json.dumps(account_values(account)))
        return
    print(
        f"{path}: ε = {account.epsilon:g} at δ = {account.delta:g} for all runs, added up at Rényi order {account.order:g}"
    )


@account_app.command()
def show(path: Annotated[str, typer.Argument(metavar="FILE", help="an account's file")], json_: AsJson = False) -> None:
    """Print what an account has paid for.

    And what is left.
    """
    from tptopk.privacy.account import read_account
    from tptopk.report.verdicts import account_values, print_account

    values = account_values(read_account(path))
    print(json.dumps(values)) if json_ else print_account(values, Console())
