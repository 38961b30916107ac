"""What the terminal says of checks and advice: the verdict first, then what it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tptopk.privacy.account import Account
from tptopk.privacy.accounting import round_up
from tptopk.privacy.plan import Plan
from tptopk.supports.advice import Advice
from tptopk.training.verify import Verdict


def print_verdict(verdict: Verdict, unchecked: Sequence[str], console: Console) -> None:
    table = Table()
    for column in ("check", "", "found"):
        table.add_column(column)
    marks = {True: "[green]holds[/]", False: "[red]FAILS[/]", None: "[yellow]open[/]"}
    for what, ok, words in verdict.checks:
        table.add_row(what, marks[ok], escape(words))
    console.print(table)
    if verdict.holds and any(ok is None for _, ok, _ in verdict.checks):
        console.print(
            f"This run is not closed. Its ledger supports a claim of (ε, δ) = ({round_up(verdict.epsilon)}, {verdict.delta:g}) for "
            "what it has released so far; what is open was not checked."
        )
    elif verdict.holds:
        console.print(f"This folder supports a claim of (ε, δ) = ({round_up(verdict.epsilon)}, {verdict.delta:g}).")
    else:
        console.print("[red]This folder supports no claim.[/]")
    console.print("Not checked, because no file can show it:")
    for item in unchecked:
        console.print(f"- {item}")


def account_values(account: Account) -> dict[str, Any]:
    """What an account has paid for, in plain values."""
    runs = [
        {"name": run["name"], "cost": run["cost"], "epsilon_alone": plan.epsilon(), "delta": plan.delta}
        for run, plan in ((run, Plan.from_dict(run["plan"])) for run in account.runs)
    ]
    return {
        "epsilon": account.epsilon,
        "delta": account.delta,
        "order": account.order,
        "epsilon_spent": account.epsilon_spent,
        "room": account.room,
        "runs": runs,
    }


def print_account(values: Mapping[str, Any], console: Console) -> None:
    """The runs, what they cost together, and why that is not the sum of their own ε."""
    table = Table()
    for column in ("run", "ε of its own", "at δ", "Rényi cost"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run in values["runs"]:
        name = escape(run["name"] or "(no folder)")
        table.add_row(name, round_up(run["epsilon_alone"]), f"{run['delta']:g}", round_up(run["cost"]))
    console.print(table)
    spent, count = values["epsilon_spent"], len(values["runs"])
    console.print(
        f"{count} run{'' if count == 1 else 's'}: together ε = {round_up(spent)} of {values['epsilon']:g} at δ = {values['delta']:g}. "
        f"Another run fits if its Rényi cost is at most {max(0.0, values['room']):.4f}."
    )
    if count:
        once = spent - sum(run["cost"] for run in values["runs"])
        console.print(
            f"What adds up are Rényi costs, at order {values['order']:g}; turning their sum into (ε, δ) adds {once:.4f}, once. So the total is not "
            "the sum of the runs' own ε, and it is the total that may be claimed for all of them."
        )


def print_audits(found: Sequence[Any], console: Console) -> None:
    """The verdict and the bound it rests on, then the rest. `found` are the audits of `tptopk.experiments.audit`."""
    for result in found:
        method, bound = max(result.sure.items(), key=lambda item: item[1])
        verdict = "consistent" if result.verdict == "consistent" else "BROKEN"
        console.print(
            f"[bold]{verdict}: {escape(result.name)}[/]: by attack ε is at least {bound:.3f} ({method}; wrong {result.verdict_rate:g} of the "
            f"time at most), and {result.claimed:.3f} is claimed"
        )
        counted = f"{result.observations:,} observations counted"
        if result.verdict_rate != result.error_rate:
            bounds = ", ".join(f"{value:.3f} by {name}" for name, value in result.bounds.items())
            above = any(value > result.claimed for value in result.bounds.values())
            chance = (
                "; now and then one of these is above the claim by chance, and they decide nothing" if above else ""
            )
            console.print(f"  wrong {result.error_rate:g} of the time at most: at least {bounds}{chance}")
            counted += ", with and without the record; others, before them, chose what to look at"
        console.print(f"  {counted}")


def print_advice(advice: Advice, console: Console) -> None:
    """The verdict and what to do; why; then signal kept and noise saved from ρ = 1 down, and how reliable the rankings are."""
    console.print(f"[bold]Verdict: {advice.verdict}.[/] {_action(advice)}")
    for reason in advice.reasons:
        console.print(f"- {reason}")
    scores = list(advice.misranking)
    table = Table(
        title=f"d = {advice.coordinates:,} coordinates; warm-up of {advice.warmup_steps} steps; {advice.steps} steps to follow; "
        f"ranges at {advice.level:.0%}",
        caption="In %: noise saved by training a share ρ of the coordinates, and signal kept if they are ranked by each score or drawn at "
        "random. They are ranked by half of the warm-up, which the other half judges; the upper ends are extrapolated to a ranking by all of "
        "it, which training uses. Progress: times that of training all of them, estimated (worst to best).",
        title_justify="left",
        caption_justify="left",
    )
    for column in ("ρ", "k", "noise saved", *(f"kept, {score}" for score in scores), "kept, random", "progress"):
        table.add_column(column, justify="right")
    for rows in zip(*([c for c in advice.candidates if c.score == score] for score in scores), strict=True):
        best = max(rows, key=lambda c: c.gain.estimate)
        dense = best.active == advice.coordinates
        table.add_row(
            f"{best.active_ratio:.2g}",
            f"{best.active:,}",
            _percent(1 - best.active_ratio),
            *("100" if dense else f"{_percent(c.kept[0])} ({_percent(c.kept[1])}–{_percent(c.kept[2])})" for c in rows),
            _percent(best.active_ratio),
            "1" if dense else "{:.2f} ({:.2g}–{:.2g})".format(*best.gain),
        )
    console.print(table)
    for score, wrong in advice.misranking.items():
        console.print(
            f"misranking, {score}: a coordinate drawn by its signal is ranked below one drawn at random with probability "
            f"{wrong.estimate:.2f} ({wrong.low:.2f} to {wrong.high:.2f}; 0.5 is a coin)"
        )
    low, high = advice.step_energy
    console.print(
        f"energy of a step's gradient: {_between(low, high)}, after subtracting up to {advice.sampling_energy:.2g} for sampling; "
        f"of their mean: {max(0.0, advice.signal.estimate):.2g}"
    )


def _action(advice: Advice) -> str:
    """What to type."""
    if advice.active_ratio is not None and advice.learning_rate is not None:
        low, high = advice.learning_rate
        return (
            f"Use --method tp-topk --active-ratio {advice.active_ratio:.3g} --score {advice.score}, and a --learning-rate {low:.2g} to "
            f"{high:.2g} times that of dense training."
        )
    if advice.verdict == "stay dense":
        return "Use --method dp-sgd."
    return (
        "Use --method dp-sgd unless what is sent between machines matters. To learn more, give the warm-up more steps (--warmup) or more of "
        "the budget (--warmup-budget) in another run, which is paid for too."
    )


def _between(low: float, high: float) -> str:
    """Estimates of an energy may come out below 0, which no energy is."""
    return f"between {max(0.0, low):.2g} and {high:.2g}" if high > 0 else "none could be told from noise"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.0995 or share == 0 else f"{100 * share:.1f}"
