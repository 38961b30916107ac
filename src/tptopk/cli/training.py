"""Commands that train, or say what training would cost: train, compare, plan."""

from __future__ import annotations

from typing import Annotated

import typer

from tptopk.cli.options import FITTING, MACHINE, AsJson, Seed, app, with_settings
from tptopk.privacy.methods import METHODS, method_named
from tptopk.privacy.refusal import Refusal, check_count
from tptopk.settings import Settings


@app.command()
@with_settings()
def train(
    settings: Settings,
    seed: Seed = None,
    out: Annotated[
        str | None,
        typer.Option(help="folder for the run; the next free runs/METHOD-N if not given", show_default=False),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="go on with the run in this folder, with its own settings", show_default=False)
    ] = None,
    json_: AsJson = False,
) -> None:
    """Train a model privately.

    It writes a run folder: the model, what it cost, and what may be claimed for it.

    Example: tptopk train --data mine.npz --dataset-size 4708 --model mynet:build --epsilon 3 --out runs/mine
    """
    if resume is not None and out is not None:
        raise Refusal("give either --out for a new run or --resume for one that was begun")
    from tptopk.cli import running

    running.train_and_show(settings, seed, out, resume, json_)


@app.command()
@with_settings(without=("method", "account", "audit_canaries", "secure_noise"))
def compare(
    settings: Settings,
    methods: Annotated[str, typer.Option(help="methods to compare, separated by commas")] = ",".join(METHODS),
    seeds: Annotated[int, typer.Option(help="how many seeds, from 0")] = 3,
    plot: Annotated[
        str | None, typer.Option(help="also draw the comparison into this .png, .svg or .pdf", show_default=False)
    ] = None,
    json_: AsJson = False,
) -> None:
    """Train with several methods and seeds.

    Every row is several runs with fixed seeds, for comparing alone: none of them may be released.

    Example: tptopk compare --methods dp-sgd,tp-topk --seeds 5
    """
    names = [method_named(name.strip()).name for name in methods.split(",")]
    check_count("seeds", seeds)
    from tptopk.cli import running

    running.compare(settings, names, seeds, plot, json_)


@app.command()
@with_settings(without=(*FITTING, *MACHINE, "account"))
def plan(
    settings: Settings,
    coordinates: Annotated[
        int | None,
        typer.Option(
            help="d, the number of trainable coordinates; counted in the model if not given", show_default=False
        ),
    ] = None,
    json_: AsJson = False,
) -> None:
    """Show what a privacy budget buys.

    Before any data is touched: the noise of each phase, and ε by every accountant.

    Example: tptopk plan --epsilon 1 --dataset-size 5000 --coordinates 100000
    """
    from tptopk.cli import running

    running.show_plan(settings, coordinates, json_)
