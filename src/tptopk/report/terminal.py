"""Tables and progress for the terminal. Progress goes to standard error, and only when somebody is watching."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tptopk.privacy import accounting
from tptopk.privacy.accounting import ACCOUNTANTS, round_up
from tptopk.privacy.plan import Plan
from tptopk.supports.advice import Advice
from tptopk.training.run import Run, StepRecord
from tptopk.training.verify import Verdict


class TrainingProgress:
    """A bar with ε spent so far and the time left; silent when standard error is not a terminal.

    ε so far is worked out from the plan's numbers alone, at most as often as costs a twentieth of the time.
    """

    def __init__(self, plan: Plan, label: str) -> None:
        self._plan, self._console = plan, Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TextColumn("{task.fields[spent]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=plan.steps, spent="")
        self._next_look = 0.0
        self._charged = [0] * len(plan.phases)

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, record: StepRecord) -> None:
        self._charged[record.phase] += 1
        if not self._console.is_terminal:
            return
        spent: dict[str, Any] = {}
        if self._plan.spec.private and time.monotonic() >= self._next_look:
            started = time.monotonic()
            segments = [q.segment for q in self._plan.queries]
            segments += [p.segment._replace(steps=n) for p, n in zip(self._plan.phases, self._charged, strict=True)]
            spent = {"spent": "ε " + round_up(accounting.epsilon(segments, self._plan.delta, self._plan.accountant), 2)}
            self._next_look = time.monotonic() + max(0.5, 20 * (time.monotonic() - started))
        self._bar.update(self._task, advance=1, **spent)


def print_run(run: Run, console: Console) -> None:
    """The end of a training run, on one screen."""
    table = Table(show_header=False, box=None)
    if "accuracy" in run.test:
        table.add_row("test accuracy", f"{100 * run.test['accuracy']:.2f}%")
    if "loss" in run.test:
        table.add_row("test loss", f"{run.test['loss']:.4f}")
    if run.plan.spec.private:
        table.add_row("ε", f"{round_up(run.epsilon)} ({run.plan.accountant})")
        table.add_row("δ", f"{run.plan.delta:g}")
        for number, phase in enumerate(run.plan.phases, 1):
            sign = "σ" if len(run.plan.phases) == 1 else "σ" + "₀₁₂₃₄₅₆₇₈₉"[number % 10]
            table.add_row(sign, f"{phase.noise_multiplier:.4f} ({phase.steps} steps, {phase.name})")
    else:
        table.add_row("privacy", "[bold red]NONE: this model is not private[/]")
    table.add_row("k/d", f"{run.support.size}/{run.support.total} = {run.support.ratio:.3f}")
    table.add_row("time", f"{run.seconds:.1f} s")
    if run.facts.seeded:
        table.add_row("release", "no: trained with a fixed seed, so the noise can be subtracted")
    if run.folder:
        table.add_row("folder", str(run.folder))
    console.print(f"[bold]{run.plan.method}[/]: {run.plan.spec.summary}")
    console.print(table)


def plan_values(plan: Plan, coordinates: int) -> dict[str, Any]:
    """What a budget buys, in plain values."""
    phases = []
    for index, phase in enumerate(plan.phases):
        dense = not plan.spec.sparse or (plan.spec.warmup and index == 0)
        active = coordinates if dense else plan.active_coordinates(coordinates)
        variance = plan.noise_std(phase) ** 2
        phases.append(
            {
                "name": phase.name,
                "steps": phase.steps,
                "sample_rate": phase.sample_rate,
                "noise_multiplier": phase.noise_multiplier,
                "clip_norm": phase.clip_norm if plan.spec.private else None,
                "active": active,
                "noise_energy": active * variance,
                "noise_energy_if_dense": coordinates * variance,
                "epsilon_alone": {a: accounting.epsilon([phase.segment], plan.delta, a) for a in ACCOUNTANTS}
                if plan.spec.private
                else None,
            }
        )
    whole = {a: plan.epsilon(accountant=a) for a in ACCOUNTANTS} if plan.spec.private else None
    return {
        "method": plan.method,
        "coordinates": coordinates,
        "delta": plan.delta,
        "dataset_size": plan.dataset_size,
        "accountant": plan.accountant,
        "epsilon": whole,
        "phases": phases,
    }


def print_plan(values: Mapping[str, Any], console: Console) -> None:
    console.print(
        f"{values['method']}: d = {values['coordinates']:,} coordinates, N = {values['dataset_size']:,} records, δ = {values['delta']:g}"
    )
    table = Table()
    table.add_column("")
    for phase in values["phases"]:
        table.add_column(phase["name"], justify="right")
    table.add_column("whole run", justify="right")

    def row(label: str, cell: Callable[[Mapping[str, Any]], str], whole: str = "") -> None:
        table.add_row(label, *(cell(phase) for phase in values["phases"]), whole)

    row("steps", lambda p: str(p["steps"]), str(sum(p["steps"] for p in values["phases"])))
    row("sample rate q", lambda p: f"{p['sample_rate']:.4f}")
    row("noise multiplier σ", lambda p: f"{p['noise_multiplier']:.4f}")
    row("clip norm C", lambda p: "–" if p["clip_norm"] is None else f"{p['clip_norm']:g}")
    row("active coordinates k", lambda p: f"{p['active']:,}")
    row("noise energy of a step, kν²", lambda p: f"{p['noise_energy']:.3g}")
    row("the same if dense, dν²", lambda p: f"{p['noise_energy_if_dense']:.3g}")
    for accountant in ACCOUNTANTS:
        whole = "∞" if values["epsilon"] is None else round_up(values["epsilon"][accountant])
        row(
            f"ε by {accountant}{' (calibrated)' if accountant == values['accountant'] else ''}",
            functools.partial(_alone, accountant),
            whole,
        )
    console.print(table)


def _alone(accountant: str, phase: Mapping[str, Any]) -> str:
    return "∞" if phase["epsilon_alone"] is None else round_up(phase["epsilon_alone"][accountant])


def comparison(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """One row a method: mean ± std over seeds of the last model's test accuracy, in percent."""
    rows = []
    for method, of_method in runs.items():
        accuracies = [100 * run.test["accuracy"] for run in of_method]
        private = of_method[0].plan.spec.private
        rows.append(
            {
                "method": method,
                "accuracy": round(mean(accuracies), 2),
                "std": round(stdev(accuracies), 2) if len(accuracies) > 1 else None,
                "accuracies": [round(a, 2) for a in accuracies],
                "epsilon": of_method[0].epsilon if private else None,
                "noise_multipliers": [round(p.noise_multiplier, 4) for p in of_method[0].plan.phases]
                if private
                else None,
                "active": of_method[0].support.size,
                "coordinates": of_method[0].support.total,
                "noise_energy": of_method[0].support.size
                * of_method[0].plan.noise_std(of_method[0].plan.phases[-1]) ** 2,
                "seconds": round(mean(run.seconds for run in of_method), 1),
            }
        )
    return rows


def print_comparison(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table()
    for column in ("method", "test accuracy, %", "ε", "σ", "k/d", "seconds"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        spread = "" if row["std"] is None else f" ± {row['std']:.2f}"
        sigmas = row["noise_multipliers"]
        table.add_row(
            row["method"],
            f"{row['accuracy']:.2f}{spread}",
            "[red]∞[/]" if row["epsilon"] is None else round_up(row["epsilon"], 3),
            "–" if sigmas is None else " / ".join(f"{s:.2f}" for s in sigmas),
            f"{row['active'] / row['coordinates']:.2f}",
            f"{row['seconds']:.1f}",
        )
    console.print(table)


def print_bench(values: Mapping[str, Any], console: Console) -> None:
    console.print(", ".join(f"{key} {value}" for key, value in values["machine"].items()))
    table = Table()
    for column in ("model", "step", "batch", "ms", "× ordinary", "peak MiB", "× ordinary"):
        table.add_column(column, justify="left" if column in ("model", "step") else "right")
    last = None
    for row in values["rows"]:
        if last not in (None, row["model"]):
            table.add_section()
        last = row["model"]
        memory = [f"{row['peak_bytes'] / 2**20:.0f}", f"{row['peak_ratio']:.2f}"]
        table.add_row(
            row["model"], row["way"], str(row["batch"]), f"{row['milliseconds']:.2f}", f"{row['ratio']:.2f}", *memory
        )
    console.print(table)


def print_ways(rows: Mapping[str, Sequence[Mapping[str, str]]], console: Console) -> None:
    for model, parameters in rows.items():
        table = Table(title=f"{model}: how each parameter's gradients are clipped", title_justify="left")
        for column in ("parameter", "dense", "at ρ = 0.1, random"):
            table.add_column(column)
        for row in parameters:
            table.add_row(row["parameter"], row["dense"], row["sparse"])
        console.print(table)


def print_growth(values: Mapping[str, Any], console: Console) -> None:
    console.print(", ".join(f"{key} {value}" for key, value in values["machine"].items()))
    for curve in values["curves"]:
        table = Table(title=f"{curve['size']} ({curve['held']})", title_justify="left")
        for column in (curve["size"], "ms", "peak MiB"):
            table.add_column(column, justify="right")
        for size, spent, peak in zip(curve["values"], curve["milliseconds"], curve["peak_bytes"], strict=True):
            table.add_row(f"{size:,}", f"{spent:.2f}", f"{peak / 2**20:.1f}")
        console.print(table)
        time, memory = curve["time_exponents"], curve["memory_exponents"]
        console.print(
            f"time grows with exponent {time[0]} (upper half {time[1]}), memory with {memory[0]} ({memory[1]})\n"
        )


def print_verdict(verdict: Verdict, unchecked: Sequence[str], console: Console) -> None:
    table = Table()
    for column in ("check", "", "found"):
        table.add_column(column)
    for what, ok, words in verdict.checks:
        table.add_row(what, "[green]holds[/]" if ok else "[red]FAILS[/]", escape(words))
    console.print(table)
    if verdict.holds:
        console.print(f"This folder supports a claim of (ε, δ) = ({round_up(verdict.epsilon)}, {verdict.delta:g}).")
    else:
        console.print("[red]This folder supports no claim.[/]")
    console.print("Not checked, because no file can show it:")
    for item in unchecked:
        console.print(f"- {item}")


def print_audits(found: Sequence[Any], console: Console) -> None:
    """`found` are the audits of `tptopk.experiments.audit`."""
    for result in found:
        bounds = ", ".join(f"{bound:.3f} by {method}" for method, bound in result.bounds.items())
        console.print(
            f"[bold]{escape(result.name)}[/]: ε = {result.claimed:.3f} is claimed; by attack it is at least {bounds}"
        )
        console.print(
            f"  {result.observations:,} observations; each bound is wrong {result.error_rate:g} of the time at most\n"
            f"  verdict (wrong {result.verdict_rate:g} of the time at most): {escape(result.verdict)}"
        )


def print_advice(advice: Advice, console: Console) -> None:
    """Signal kept and noise saved from ρ = 1 down, how reliable the rankings are, and the recommendation."""
    console.print(
        f"d = {advice.coordinates:,} coordinates; warm-up of {advice.warmup_steps} steps; {advice.steps} steps to follow; "
        f"intervals hold at {advice.level:.0%}"
    )
    scores = list(advice.misranking)
    table = Table(
        caption="noise saved, and signal kept by each ranking, in %; progress × dense training, worst to best"
    )
    for column in ("ρ", "k", "noise saved", *scores, "random", "progress"):
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
            "1" if dense else f"{best.gain.low:.2f}–{best.gain.high:.2f}",
        )
    console.print(table)
    for score, wrong in advice.misranking.items():
        console.print(
            f"misranking, {score}: a coordinate drawn by its signal is ranked below one drawn at random with probability "
            f"{wrong.estimate:.2f} ({wrong.low:.2f} to {wrong.high:.2f}; 0.5 is a coin)"
        )
    console.print(
        f"energy of a step's gradient: between {advice.step_energy[0]:.2g} and {advice.step_energy[1]:.2g}, with the at most "
        f"{advice.sampling_energy:.2g} that sampling adds taken off; of their mean: {advice.signal.estimate:.2g}\n"
    )
    verdict = advice.verdict
    if advice.active_ratio is not None and advice.learning_rate is not None:
        low, high = advice.learning_rate
        verdict += f" to ρ = {advice.active_ratio:.3g} by the {advice.score} score, with the learning rate times {low:.2g} to {high:.2g}"
    console.print(f"[bold]{verdict}[/]")
    for reason in advice.reasons:
        console.print(f"- {reason}")


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.0995 or share == 0 else f"{100 * share:.1f}"
