"""The command that answers the question of the paper's title: advise."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tptopk.cli.options import AsJson, Seed, app, with_settings
from tptopk.privacy.refusal import Refusal
from tptopk.settings import Settings
from tptopk.training.begun import run_folder

if TYPE_CHECKING:
    from tptopk.supports.warmup import WarmUp


@app.command(name="advise")
@with_settings(without=("score", "ratio_schedule", "ema", "audit_canaries"))
def advise_(
    settings: Settings,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="folder of a run with a warm-up; without it, a warm-up of these settings is run and charged",
            show_default=False,
        ),
    ] = None,
    ratios: Annotated[
        str | None, typer.Option(help="active ratios to look at, separated by commas", show_default=False)
    ] = None,
    level: Annotated[float, typer.Option(help="how often an interval holds the truth")] = 0.95,
    seed: Seed = None,
    out: Annotated[
        str | None,
        typer.Option(help="folder for the warm-up; the next free runs/advise-N if not given", show_default=False),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="also draw the advice into this .png, .svg or .pdf", show_default=False)
    ] = None,
    json_: AsJson = False,
) -> None:
    """Would training fewer coordinates help?

    Say from a private warm-up whether training fewer coordinates would help: restrict, stay dense, or cannot tell.
    """
    chosen = _numbers(ratios)
    cost: dict[str, Any] = {}
    if run is not None:
        if settings != Settings() or out is not None or seed is not None:
            raise Refusal("advice on a run is about its own plan: leave out the settings, --out and --seed")
        folder = str(run_folder(run))
    from tptopk.cli.running import free_folder
    from tptopk.privacy.accounting import round_up
    from tptopk.report.plots import advice_figure, check_figure
    from tptopk.report.verdicts import print_advice
    from tptopk.supports.advice import advise, check_level
    from tptopk.training.verify import warmup_in

    check_level(level)
    if run is None:
        folder = out or free_folder("advise")
    if plot:
        check_figure(plot, made=folder)
    if run is not None:
        warmup = warmup_in(run)
    else:
        warmup, cost = _charged_warmup(settings, seed, folder, chosen)
    with _paid_for(folder) if cost else nullcontext():
        found = advise(warmup, ratios=chosen, level=level)
        if json_:
            print(json.dumps({**found.as_values(), "folder": folder, **cost}))
        else:
            print_advice(found, Console())
        if plot:
            advice_figure(found, plot, f"When do fewer coordinates suffice? {folder}")
    if json_:
        return
    if plot:
        print(f"wrote {plot}")
    if cost:
        print(
            f"This warm-up is charged: ε = {round_up(cost['epsilon'])} at δ = {cost['delta']:g}, in {folder}. Training on the same data comes "
            "on top of it."
        )
    else:
        print("This advice reads released gradients alone and costs nothing.")


def _numbers(ratios: str | None) -> list[float] | None:
    try:
        return None if ratios is None else [float(ratio) for ratio in ratios.split(",")]
    except ValueError as error:
        raise Refusal(f"ratios is {ratios!r}; give numbers separated by commas, such as 0.4,0.1") from error


@contextmanager
def _paid_for(folder: str) -> Iterator[None]:
    """What is refused after the warm-up was charged says that it need not be charged again."""
    try:
        yield
    except Refusal as error:
        raise Refusal(
            f"{error}; the warm-up is charged and kept: tptopk advise {shlex.quote(folder)} reads it"
        ) from error


def _charged_warmup(
    settings: Settings, seed: int | None, folder: str, ratios: list[float] | None
) -> tuple[WarmUp, dict[str, Any]]:
    """The first phase of the settings' plan, as a dense run of its own that pays for itself."""
    from tptopk.cli.running import calibrated, check_first, interrupted, train
    from tptopk.privacy.plan import Plan
    from tptopk.supports.advice import FEWEST_STEPS, looked_at
    from tptopk.supports.support import Support
    from tptopk.supports.warmup import WarmUp

    check_first(settings, folder)
    coordinates = Support.full(settings.build_model()).total
    looked_at(ratios, coordinates)
    plan = calibrated(settings)
    if not plan.spec.warmup:
        raise Refusal(f"{plan.method} has no warm-up to advise from; use --method tp-topk")
    if plan.phases[0].steps < FEWEST_STEPS:
        raise Refusal(f"the warm-up has {plan.phases[0].steps} steps; advice needs at least {FEWEST_STEPS}")
    plan.active_coordinates(coordinates)
    alone = Plan(
        phases=plan.phases[:1],
        delta=plan.delta,
        dataset_size=plan.dataset_size,
        accountant=plan.accountant,
        queries=plan.queries,
        unit=plan.unit,
    )
    warmup = WarmUp(plan)
    try:
        run = train(replace(settings, method="dp-sgd"), seed, folder, "warm-up", by=alone, warmup=warmup)
    except KeyboardInterrupt:
        print(f"{interrupted(folder)}, then: tptopk advise {shlex.quote(folder)}", file=sys.stderr)
        raise typer.Exit(130) from None
    return warmup, {"epsilon": run.epsilon, "delta": plan.delta}
