"""Commands that train, or say what training would cost: train, compare, plan, predict."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch.nn import functional as F

from tptopk.cli.options import (
    AsJson,
    DataDir,
    ImageMode,
    ImageSize,
    Seed,
    TableSchema,
    app,
    image_progress,
    with_settings,
)
from tptopk.data.sources import read_source_inputs
from tptopk.experiments.planted import audit_planted, audit_values, plant
from tptopk.privacy.gradient import PrivateGradient
from tptopk.privacy.ledger import read_ledger
from tptopk.privacy.methods import METHODS, method_named
from tptopk.privacy.plan import Plan
from tptopk.privacy.refusal import Refusal, check_count
from tptopk.report.plots import comparison_figure
from tptopk.report.terminal import (
    TrainingProgress,
    comparison,
    plan_values,
    print_audits,
    print_comparison,
    print_plan,
    print_run,
)
from tptopk.settings import Settings, build, seed_everything
from tptopk.supports.support import Support
from tptopk.training.begun import config_of, how_to_resume, refuse_finished, run_folder
from tptopk.training.checkpoint import write_durably
from tptopk.training.distributed import Team, launched
from tptopk.training.run import Run, load
from tptopk.training.trainer import fit


@app.command()
@with_settings
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
    """Train a model privately and write a run folder."""
    if resume is not None and out is not None:
        raise Refusal("give either --out for a new run or --resume for one that was begun")
    plan = None
    if resume is not None:
        settings, plan = _settings_of(resume, settings)
        if settings.audit_canaries:
            raise Refusal("a run with canaries cannot be resumed: which of them took part was never written down")
    with launched(settings.device) as device:
        _train_and_show(replace(settings, device=device), plan, resume, out, seed, json_)


def _train_and_show(
    settings: Settings, plan: Plan | None, resume: str | None, out: str | None, seed: int | None, json_: bool
) -> None:
    first = Team().is_first
    folder = resume or (out or _free_folder(settings.method) if first else None)
    try:
        run = _train(settings, seed, folder, settings.method, plan)
    except KeyboardInterrupt:
        print(
            f"interrupted; what was charged and the model so far are in {folder}; go on with: tptopk train --resume {folder}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if first and json_:
        print(json.dumps({**run.summary(), "folder": str(run.folder)}))
    elif first:
        print_run(run, Console())


@app.command()
@with_settings
def compare(
    settings: Settings,
    methods: Annotated[str, typer.Option(help="methods to compare, separated by commas")] = ",".join(METHODS),
    seeds: Annotated[int, typer.Option(help="how many seeds, from 0")] = 3,
    plot: Annotated[
        str | None, typer.Option(help="also draw the comparison into this .png, .svg or .pdf", show_default=False)
    ] = None,
    json_: AsJson = False,
) -> None:
    """Train with several methods and seeds, side by side."""
    names = [method_named(name.strip()).name for name in methods.split(",")]
    check_count("seeds", seeds)
    if settings.load_data()[1] is None:
        raise Refusal(
            'a comparison needs a test set: x_test and y_test in an archive, test = "FILE" in a table\'s schema, or folders train and test'
        )
    runs: dict[str, list[Run]] = {}
    for name in names:
        for seed in range(seeds):
            label = f"{name}, seed {seed} ({len(runs.get(name, []))}/{seeds})"
            runs.setdefault(name, []).append(_train(replace(settings, method=name), seed, None, label))
    rows = comparison(runs)
    if settings.published_size is None:
        print(
            "warning: every row is a separate run with fixed seeds on this data: together they cost far more than the ε of one, and none "
            "may be released",
            file=sys.stderr,
        )
    if plot:
        comparison_figure(
            rows,
            plot,
            f"ε = {settings.epsilon:g}, δ = {settings.delta:g}, {seeds} seeds (dots), mean and standard deviation",
        )
    if json_:
        print(json.dumps({"settings": settings.to_dict(), "rows": rows}))
    else:
        print_comparison(rows, Console())


@app.command()
@with_settings
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
    """Show what a privacy budget buys, before any data is touched."""
    if coordinates is None:
        coordinates = Support.full(settings.build_model()).total
    check_count("coordinates", coordinates)
    values = plan_values(settings.plan(), coordinates)
    if json_:
        print(json.dumps(values))
    else:
        print_plan(values, Console())


@app.command()
def predict(
    run: Annotated[str, typer.Argument(help="a run folder")],
    data: Annotated[
        str | None,
        typer.Option(
            help="a .npz file with x or x_test, a table, a folder of images or a benchmark (its test set); the embedded test "
            "digits if not given",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    schema: TableSchema = None,
    image_size: ImageSize = None,
    image_mode: ImageMode = "RGB",
    model: Annotated[
        str | None,
        typer.Option(help="package.module:factory; needed unless the run used the built-in model", show_default=False),
    ] = None,
) -> None:
    """Print a line a record: its number, its most likely class, and that class's probability."""
    trained = load(run, None if model is None else build(model))
    with image_progress() as on_image:
        inputs = read_source_inputs(
            data or "digits",
            data_dir=data_dir,
            schema=schema,
            image_size=image_size,
            image_mode=image_mode,
            on_image=on_image,
        )
    print("record,class,probability")
    with torch.no_grad():
        for start in range(0, len(inputs), 1000):
            probability, predicted = trained.model(inputs[start : start + 1000]).softmax(1).max(1)
            for row, (c, p) in enumerate(zip(predicted.tolist(), probability.tolist(), strict=True), start):
                print(f"{row},{c},{p:.4f}")


def _settings_of(path: str, given: Settings) -> tuple[Settings, Plan]:
    """A run's own settings and plan; only what changes neither its numbers nor its network may be given anew."""
    folder = run_folder(path)
    record = read_ledger(folder / "ledger.jsonl")
    refuse_finished(folder, record.end)
    config = config_of(folder)
    if config is None:
        raise Refusal(f"{folder} was begun in Python; resume it there: {how_to_resume(folder)}")
    may_change = ("device", "micro_batch_size", "memory_limit", "compile")
    usual = Settings()
    changed = {
        f.name: getattr(given, f.name) for f in fields(Settings) if getattr(given, f.name) != getattr(usual, f.name)
    }
    for name in changed:
        if name not in may_change:
            raise Refusal(
                f"a run is resumed with its own settings: leave out --{name.replace('_', '-')} (only "
                + ", ".join("--" + n.replace("_", "-") for n in may_change)
                + " may be given)"
            )
    try:
        own = Settings(**config)
    except TypeError as error:
        raise Refusal(f"{folder} was begun by another version of tptopk: {error}") from error
    return replace(own, **changed), record.plan


def _train(
    settings: Settings,
    seed: int | None,
    out: str | None,
    label: str,
    resumed: Plan | None = None,
    *,
    by: Plan | None = None,
    watch: Callable[[PrivateGradient], None] | None = None,
) -> Run:
    plan = resumed or by or settings.plan()
    with image_progress() as on_image:
        training, test = settings.load_data(on_image)
    canaries = None
    if settings.audit_canaries is not None:
        check_count("audit_canaries", settings.audit_canaries)
        training, canaries = plant(training, settings.audit_canaries)
    seed_everything(seed)
    model = settings.build_model()
    with TrainingProgress(plan, label) as progress:
        run = fit(
            model,
            training,
            plan,
            settings.build_optimizer(model),
            loss=F.cross_entropy,
            test_set=test,
            score=settings.score,
            ratio_schedule=settings.ratio_schedule,
            ema=settings.ema,
            precision=settings.precision,
            micro_batch_size=settings.micro_batch_size,
            memory_limit=settings.memory_limit,
            compile=settings.compile,
            account=settings.account,
            secure_noise=settings.secure_noise,
            engine=settings.engine,
            device=settings.device,
            out=out,
            resume=resumed is not None,
            seed=seed,
            on_step=progress,
            on_private_gradient=watch,
            config={**settings.to_dict(), "data": settings.data or "digits"},
        )
    if canaries is not None:
        found = audit_planted(run, canaries)
        print_audits([found], Console(stderr=True))
        if run.folder is not None:
            write_durably(run.folder / "audit.json", json.dumps(audit_values(found)).encode() + b"\n")
    return run


def _free_folder(method: str) -> str:
    number = 1
    while (Path("runs") / f"{method}-{number}").exists():
        number += 1
    return str(Path("runs") / f"{method}-{number}")
