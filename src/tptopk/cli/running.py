"""What train, compare, plan and advise do once their options are read."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import typer
from rich.console import Console
from torch.nn import functional as F

from tptopk.cli.options import image_progress
from tptopk.experiments.planted import audit_planted, audit_values, plant
from tptopk.gradients.probe import refuse_unsuitable
from tptopk.privacy.account import read_account
from tptopk.privacy.ledger_record import read_ledger
from tptopk.privacy.methods import method_named
from tptopk.privacy.plan import Plan, active_of
from tptopk.privacy.randomness import Streams
from tptopk.privacy.refusal import Refusal, check_count
from tptopk.report.plots import check_figure, comparison_figure
from tptopk.report.terminal import (
    TrainingProgress,
    comparison,
    plan_values,
    print_comparison,
    print_plan,
    print_run,
)
from tptopk.report.verdicts import print_audits
from tptopk.settings import Settings, seed_everything
from tptopk.supports.support import Support
from tptopk.supports.warmup import FILE as WARMUP
from tptopk.supports.warmup import WarmUp
from tptopk.training.begun import config_of, how_to_resume, refuse_finished, run_folder
from tptopk.training.checkpoint import write_durably
from tptopk.training.distributed import Team, launched
from tptopk.training.run import Run, describe_anew, refuse_taken
from tptopk.training.trainer import fit

PATIENCE = 3.0  # seconds of calibration until it is said why nothing happens


def train_and_show(settings: Settings, seed: int | None, out: str | None, resume: str | None, json_: bool) -> None:
    plan = None
    if resume is not None:
        settings, plan = _settings_of(resume, settings)
        if settings.audit_canaries:
            raise Refusal("a run with canaries cannot be resumed: which of them took part was never written down")
    with launched(settings.device) as device:
        first = Team().is_first
        folder = resume or (out or free_folder(settings.method) if first else None)
        try:
            run = train(replace(settings, device=device), seed, folder, settings.method, plan)
        except KeyboardInterrupt:
            print(interrupted(folder), file=sys.stderr)
            raise typer.Exit(130) from None
        if first and json_:
            print(json.dumps({**run.summary(), "folder": str(run.folder)}))
        elif first:
            print_run(run, Console())


def interrupted(folder: str | None) -> str:
    if folder is None or not (Path(folder) / "ledger.jsonl").exists():
        return "interrupted; nothing was charged"
    return f"interrupted; what was charged and the model so far are in {folder}; go on with: tptopk train --resume {shlex.quote(folder)}"


def compare(settings: Settings, methods: Sequence[str], seeds: int, plot: str | None, json_: bool) -> None:
    if settings.load_data()[1] is None:
        raise Refusal(
            'a comparison needs a test set: x_test and y_test in an archive, test = "FILE" in a table\'s schema, or folders train and test'
        )
    if settings.published_size is None:
        print(
            "warning: every row is a separate run with fixed seeds on this data: together they cost far more than the ε of one, and none "
            "may be released",
            file=sys.stderr,
            flush=True,
        )
    if plot:
        check_figure(plot)
    runs: dict[str, list[Run]] = {}
    for name in methods:
        spec = method_named(name)
        chosen = replace(
            settings,
            method=name,
            score=settings.score if spec.ranking == "score" else "paper",
            ratio_schedule=settings.ratio_schedule if spec.sparse else "constant",
        )
        plan = calibrated(chosen)
        for seed in range(seeds):
            label = f"{name}, seed {seed} ({seed}/{seeds})"
            runs.setdefault(name, []).append(train(chosen, seed, None, label, by=plan))
    rows = comparison(runs)
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


def show_plan(settings: Settings, coordinates: int | None, json_: bool) -> None:
    network = settings.network() if coordinates is None else None
    if coordinates is None:
        coordinates = Support.full(settings.build_model()).total
    check_count("coordinates", coordinates)
    values = plan_values(calibrated(settings, coordinates), coordinates)
    if json_:
        print(json.dumps({**values, "model": network}))
        return
    print_plan(values, Console())
    if network is not None:
        print(f"d is counted in {network}; for another network give --model, or --coordinates")


def _settings_of(path: str, given: Settings) -> tuple[Settings, Plan]:
    """A run's own settings and plan; only what changes neither its numbers nor its network may be given anew."""
    folder = run_folder(path)
    describe_anew(folder)
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


def calibrated(settings: Settings, coordinates: int | None = None) -> Plan:
    """The settings' plan; if it takes long, that is said, and what would be faster. A ratio that leaves nothing is refused before."""
    if coordinates is not None and method_named(settings.method).sparse:
        active_of(settings.active_ratio, coordinates)
    with _said_if_slow(settings.accountant):
        return settings.plan()


@contextmanager
def _said_if_slow(accountant: str) -> Iterator[None]:
    faster = "" if accountant != "pld" else "; --accountant rdp is much faster and costs about 8% more noise"
    words = f"calibrating the noise …{faster}"
    timer = threading.Timer(PATIENCE, lambda: print(words, file=sys.stderr, flush=True))
    timer.daemon = True
    if Team().is_first:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def train(
    settings: Settings,
    seed: int | None,
    out: str | None,
    label: str,
    resumed: Plan | None = None,
    *,
    by: Plan | None = None,
    warmup: WarmUp | None = None,
) -> Run:
    """Train by the settings. What can be refused at once is, before the data is read; the plan, which may take long, comes last."""
    with Team().together():
        check_first(settings, None if resumed else out, resumed or by)
        network, table = settings.network(), settings.table()
        with image_progress() as on_image:
            training, test = settings.load_data(on_image)
        seed_everything(seed)
        model = settings.build_model()
        refuse_unsuitable(model)
        canaries = None
        if settings.audit_canaries is not None:
            training, canaries = plant(training, settings.audit_canaries, model)
        optimizer = settings.build_optimizer(model)
        unit = settings.load_unit()
        plan = resumed or by or calibrated(settings, Support.full(model).total)
        if resumed and out is not None and not plan.spec.warmup and (Path(out) / WARMUP).exists():
            # of `tptopk advise`; it is filled from the checkpoint
            warmup = WarmUp(WarmUp.load(Path(out) / WARMUP).plan)
    with TrainingProgress(plan, label) as progress:
        run = fit(
            model,
            training,
            plan,
            optimizer,
            loss=F.cross_entropy,
            test_set=test,
            unit=unit,
            most_rows=None if table is None else table.most_rows,
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
            warmup=warmup,
            config={**settings.to_dict(), "data": settings.data or "digits", "model": network},
            schema=None if table is None else table.as_values(),
        )
    if canaries is not None:
        found = audit_planted(run, canaries)
        print_audits([found], Console(stderr=True))
        if run.folder is not None:
            write_durably(run.folder / "audit.json", json.dumps(audit_values(found)).encode() + b"\n")
    return run


def check_first(settings: Settings, out: str | None, plan: Plan | None = None) -> None:
    """Refuse a folder that is taken, and numbers, packages and files that are wrong whatever the data is."""
    if out is not None:
        refuse_taken(out)
    if plan is None:
        settings.check_numbers()
    if settings.audit_canaries is not None:
        check_count("audit_canaries", settings.audit_canaries)
        if Team().size > 1:
            raise Refusal("--audit-canaries plants records in one process; leave it out, or train without torchrun")
    if settings.account is not None:
        read_account(settings.account)
    Streams("", secure=settings.secure_noise)  # refuses where its package is missing


def free_folder(method: str) -> str:
    number = 1
    while (Path("runs") / f"{method}-{number}").exists():
        number += 1
    return str(Path("runs") / f"{method}-{number}")
