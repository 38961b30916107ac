"""The command line: the same words as the library."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer
from rich.console import Console
from torch.nn import functional as F

from tptopk import __version__
from tptopk.data.digits import digits
from tptopk.data.files import findings, read_inputs
from tptopk.experiments import bench as measurements
from tptopk.experiments import growth as growth_curves
from tptopk.experiments.audit import audit_mechanism, audit_run, run_plan
from tptopk.experiments.planted import audit_planted, audit_values, one_step_plan, plant
from tptopk.privacy.account import open_account, read_account
from tptopk.privacy.ledger import read_ledger
from tptopk.privacy.methods import METHODS, method_named
from tptopk.privacy.plan import Plan, PrivacyWarning
from tptopk.privacy.refusal import Refusal, check_count
from tptopk.privacy.statement import as_values as statement_values
from tptopk.privacy.statement import statement as statement_text
from tptopk.report.plots import audit_figure, bench_figure, comparison_figure, growth_figure
from tptopk.report.terminal import (
    TrainingProgress,
    comparison,
    plan_values,
    print_audits,
    print_bench,
    print_comparison,
    print_growth,
    print_plan,
    print_run,
    print_verdict,
    print_ways,
)
from tptopk.settings import Settings, build, seed_everything
from tptopk.supports.support import Support
from tptopk.training.checkpoint import write_durably
from tptopk.training.run import Run, load
from tptopk.training.trainer import fit
from tptopk.training.verify import UNCHECKED, facts_in
from tptopk.training.verify import verify as verify_run

app = typer.Typer(
    help="Train PyTorch models on sensitive data under differential privacy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(
    help="Look at data before training. Outside the guarantee: keep what these print to yourself.", no_args_is_help=True
)
app.add_typer(data_app, name="data")
account_app = typer.Typer(no_args_is_help=True, help="One budget for several runs on the same data.")
app.add_typer(account_app, name="account")

Config = Annotated[str | None, typer.Option(help="a TOML file with these same words", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
Seed = Annotated[
    int | None,
    typer.Option(help="repeatable noise, for experiments: such a run must not be released", show_default=False),
]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of `Settings`; it receives them gathered, as its first argument."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    kinds = get_type_hints(Settings)
    options = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kinds[f.name] | None,
                typer.Option(help=f.metadata["help"], show_default=False if f.default is None else str(f.default)),
            ],
        )
        for f in fields(Settings)
    ]

    def run(config: str | None = None, **given: Any) -> None:
        mine = {p.name: given.pop(p.name) for p in own}
        command(Settings.gather(config, given), **mine)

    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    configuration = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Config)
    run.__signature__ = inspect.Signature([*kept, configuration, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*kept, configuration, *options]}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


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
    folder = resume or out or _free_folder(settings.method)
    try:
        run = _train(settings, seed, folder, settings.method, plan)
    except KeyboardInterrupt:
        print(
            f"interrupted; what was charged and the model so far are in {folder}; go on with: tptopk train --resume {folder}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if json_:
        print(json.dumps({**run.summary(), "folder": str(run.folder)}))
    else:
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
        raise Refusal("a comparison needs a test set: x_test and y_test in the data file")
    runs: dict[str, list[Run]] = {}
    for name in names:
        for seed in range(seeds):
            label = f"{name}, seed {seed} ({len(runs.get(name, []))}/{seeds})"
            runs.setdefault(name, []).append(_train(replace(settings, method=name), seed, None, label))
    rows = comparison(runs)
    if settings.data is not None:
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
        typer.Option(help="a .npz file with x or x_test; the embedded test digits if not given", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="package.module:factory; needed unless the run used the built-in model", show_default=False),
    ] = None,
) -> None:
    """Print a line a record: its number, its most likely class, and that class's probability."""
    trained = load(run, None if model is None else build(model))
    inputs = digits()[1][0] if data is None else read_inputs(data)
    print("record,class,probability")
    with torch.no_grad():
        for start in range(0, len(inputs), 1000):
            probability, predicted = trained.model(inputs[start : start + 1000]).softmax(1).max(1)
            for row, (c, p) in enumerate(zip(predicted.tolist(), probability.tolist(), strict=True), start):
                print(f"{row},{c},{p:.4f}")


@app.command()
def bench(
    models: Annotated[str, typer.Option(help="mlp, cnn, wrn, vit, text, scatter; separated by commas")] = "mlp,cnn",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    rounds: Annotated[int, typer.Option(help="steps of each way, taking turns")] = 10,
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16, for all ways")] = "tf32",
    peers: Annotated[bool, typer.Option(help="measure vmap and Opacus too")] = True,
    compile: Annotated[bool, typer.Option(help="measure compiled steps too, ordinary ones among them")] = False,
    growth: Annotated[bool, typer.Option(help="measure how a private step grows instead")] = False,
    explain: Annotated[bool, typer.Option(help="print how each parameter is clipped, and measure nothing")] = False,
    plot: Annotated[str | None, typer.Option(help="write a figure to this file")] = None,
    json_: AsJson = False,
) -> None:
    """Time a private step beside an ordinary one and the peers', in one process, taking turns."""
    check_count("rounds", rounds)
    names = [name.strip() for name in models.split(",")]
    if explain:
        rows = {name: measurements.explain(name, device) for name in names}
        print(json.dumps(rows)) if json_ else print_ways(rows, Console())
        return
    values: dict[str, Any] = {"machine": measurements.machine(device), "precision": precision, "rounds": rounds}
    title = f"{values['machine']['device']}, torch {values['machine']['torch']}, {precision}"
    if growth:
        values["curves"] = growth_curves.as_rows(growth_curves.curves(device, rounds, precision))
        print(json.dumps(values)) if json_ else print_growth(values, Console())
        if plot:
            growth_figure(values["curves"], plot, f"How a private step grows: {title}")
        return
    measured = [
        row
        for name in names
        for row in measurements.measure(name, device, rounds, peers, compiled=compile, precision=precision)
    ]
    values["rows"] = measurements.as_rows(measured)
    print(json.dumps(values)) if json_ else print_bench(values, Console())
    if plot:
        bench_figure(values["rows"], plot, f"A step beside ordinary training: {title}")


@app.command()
def statement(run: Annotated[str, typer.Argument(help="a run folder")], json_: AsJson = False) -> None:
    """Print what may be claimed for a run, and what may not, from its ledger."""
    record = read_ledger(Path(run) / "ledger.jsonl")
    facts = facts_in(Path(run), record)
    print(json.dumps(statement_values(record.plan, facts)) if json_ else statement_text(record.plan, facts))


@app.command()
def verify(run: Annotated[str, typer.Argument(help="a run folder")], json_: AsJson = False) -> None:
    """Recompute a run's ε from its ledger, twice, and check everything in its folder against it."""
    found = verify_run(run)
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
    """Attack the shipped mechanism at its worst case, and print what ε is at least beside what is claimed."""
    try:
        budgets = [float(value) for value in epsilon.split(",")]
    except ValueError as error:
        raise Refusal(f"epsilon is {epsilon!r}; give numbers separated by commas, such as 1,3,8") from error
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
    if any(result.verdict != "consistent" for result in found):
        raise typer.Exit(1)


@account_app.command(name="open")
def open_(
    path: Annotated[str, typer.Argument(help="the new account's file")],
    epsilon: Annotated[float, typer.Option(help="budget ε of all runs together")],
    delta: Annotated[float, typer.Option(help="δ of the budget")] = 1e-5,
) -> None:
    """Open an account for a dataset: a budget that several runs share."""
    account = open_account(path, epsilon, delta)
    print(
        f"{path}: ε = {account.epsilon:g} at δ = {account.delta:g} for all runs, added up at Rényi order {account.order:g}"
    )


@account_app.command()
def show(path: Annotated[str, typer.Argument(help="an account's file")], json_: AsJson = False) -> None:
    """Print what an account has paid for, and what is left."""
    account = read_account(path)
    if json_:
        runs = [{"name": run["name"], "cost": run["cost"]} for run in account.runs]
        values = {"epsilon": account.epsilon, "delta": account.delta, "order": account.order}
        print(json.dumps({**values, "epsilon_spent": account.epsilon_spent, "runs": runs}))
        return
    for run in account.runs:
        print(f"{run['name'] or '(no folder)'}  ε_α = {run['cost']:.4f}")
    print(
        f"{len(account.runs)} runs, ε = {account.epsilon_spent:.4f} of {account.epsilon:g} at δ = {account.delta:g} (Rényi order {account.order:g})"
    )


@data_app.command()
def check(
    path: Annotated[
        str | None, typer.Argument(help="a .npz file; the embedded digits if not given", show_default=False)
    ] = None,
    classes: Annotated[int | None, typer.Option(help="number of classes of the model", show_default=False)] = None,
) -> None:
    """Look for records that would spoil training: labels out of range, inputs that are not finite."""
    training, test = replace(Settings(), data=path).load_data()
    for name, pair in (("training", training), ("test", test)):
        if pair is None:
            continue
        labels = "" if pair[1].is_floating_point() else f", labels {int(pair[1].min())} to {int(pair[1].max())}"
        print(
            f"{name}: {len(pair[1])} records, inputs {tuple(pair[0].shape[1:])} {pair[0].dtype}, targets {pair[1].dtype}{labels}"
        )
        for line in findings(pair, classes) or ["nothing to report"]:
            print(f"  {line}")
    print("This looked at the data itself and is not covered by any guarantee.")


def _settings_of(folder: str, given: Settings) -> tuple[Settings, Plan]:
    """A run's own settings and plan; only what changes neither its numbers nor its network may be given anew."""
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
        own = Settings(**json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{folder} is not a run of the command line: {error}") from error
    return replace(own, **changed), read_ledger(Path(folder) / "ledger.jsonl").plan


def _train(settings: Settings, seed: int | None, out: str | None, label: str, resumed: Plan | None = None) -> Run:
    plan = resumed or settings.plan()
    training, test = settings.load_data()
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
            config=settings.to_dict(),
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


def _show_version(value: bool) -> None:
    if value:
        print(f"tptopk {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    return None


def main() -> None:
    """Run the command line; what a person did wrong is one line, not a traceback."""
    warnings.simplefilter("always", PrivacyWarning)
    warnings.showwarning = lambda message, *rest, **more: print(f"warning: {message}", file=sys.stderr)
    try:
        app()
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)
