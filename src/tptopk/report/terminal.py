"""Tables and progress for the terminal. Progress goes to standard error, and only when somebody is watching."""

from __future__ import annotations

import functools
import shlex
import time
from collections import Counter
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
from tptopk.training.run import Run, StepRecord


class TrainingProgress:
    """`fit`'s `on_step`: a bar with ε spent so far and the time left; silent when standard error is not a terminal.

    ε so far is worked out from the plan's numbers alone, at most as often as costs a twentieth of the time; the last one shown is
    the run's own.
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

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, record: StepRecord) -> None:
        if not self._console.is_terminal:
            return
        spent: dict[str, Any] = {}
        if self._plan.spec.private and time.monotonic() >= self._next_look:
            started = time.monotonic()
            value = accounting.epsilon(self._first(record.step), self._plan.delta, self._plan.accountant)
            spent = {"spent": f"ε {round_up(value, 2)} so far"}
            self._next_look = time.monotonic() + max(0.5, 20 * (time.monotonic() - started))
        self._bar.update(self._task, completed=record.step, **spent)

    def end(self, run: Run) -> None:
        if self._plan.spec.private:
            self._bar.update(self._task, spent=f"ε {round_up(run.epsilon)}")

    def _first(self, steps: int) -> list[accounting.Segment]:
        """The plan's queries and its first so many steps."""
        counts = Counter[int]()
        for index, phase in enumerate(self._plan.phases):
            counts[index] = min(phase.steps, steps)
            steps -= counts[index]
        return self._plan.segments(counts)


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
        taken = run.facts.taken_steps or [phase.steps for phase in run.plan.phases]
        for number, (phase, steps) in enumerate(zip(run.plan.phases, taken, strict=True), 1):
            sign = "σ" if len(run.plan.phases) == 1 else "σ" + "₀₁₂₃₄₅₆₇₈₉"[number % 10]
            count = f"{steps}" if steps == phase.steps else f"{steps} of {phase.steps}"
            table.add_row(sign, f"{phase.noise_multiplier:.4f} ({count} steps, {phase.name})")
    else:
        table.add_row("privacy", "[bold red]NONE: this model is not private[/]")
    table.add_row("k/d", f"{run.support.size}/{run.support.total} = {run.support.ratio:.3f}")
    table.add_row("training time", f"{run.seconds:.1f} s")
    if run.facts.seeded:
        table.add_row("release", "no: trained with a fixed seed, so the noise can be subtracted")
    if run.folder:
        table.add_row("folder", str(run.folder))
    console.print(f"[bold]{run.plan.method}[/]: {run.plan.spec.summary}")
    console.print(table)
    if run.folder:
        folder = escape(shlex.quote(str(run.folder)))
        console.print(f"next: tptopk statement {folder}; tptopk report {folder}", soft_wrap=True)


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
        "unit": plan.unit,
        "accountant": plan.accountant,
        "epsilon": whole,
        "phases": phases,
    }


def print_plan(values: Mapping[str, Any], console: Console) -> None:
    console.print(
        f"{values['method']}: d = {values['coordinates']:,} coordinates, N = {values['dataset_size']:,} {values['unit']}s, δ = {values['delta']:g}"
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
