"""tptopk reproduce: the paper's tables and figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tptopk.cli.options import AsJson, app
from tptopk.experiments import recipes
from tptopk.privacy.refusal import Refusal, nearest

if TYPE_CHECKING:
    from tptopk.experiments import results

# What a person may ask for, and which results file it needs.
TARGETS = {
    **{f"table-{name}": name for name in recipes.TABLES},
    "figure-energy": "diagnostics",
    "figure-pipeline": "main",
}


@app.command("reproduce")
def reproduce_(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=f"{', '.join(TARGETS)}, or all")],
    quick: Annotated[bool, typer.Option(help="a reduced version for a CPU; its figures mean nothing")] = False,
    render: Annotated[bool, typer.Option(help="run nothing; write the document from the runs that are there")] = False,
    results_: Annotated[
        str, typer.Option("--results", help="folder of the finished runs; with --quick, its subfolder quick")
    ] = "results",
    out: Annotated[
        str | None,
        typer.Option(help="the document; docs/reproduction.md, or with --quick beside its runs", show_default=False),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="folder with the benchmarks; TPTOPK_DATA unless given")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    only: Annotated[str | None, typer.Option(help="datasets, separated by commas")] = None,
    processes: Annotated[int, typer.Option(min=1, help="runs at a time, each in a process of its own")] = 1,
    json_: AsJson = False,
) -> None:
    """Run and write the paper's tables.

    What a table or figure needs is run unless it was; then the document is written, ours beside the paper's.
    """
    if target != "all" and target not in TARGETS:
        raise Refusal(f"unknown table or figure {target!r}{nearest(target, [*TARGETS, 'all'])}")
    from torch import nn

    from tptopk.experiments import results
    from tptopk.report.reproduction import is_drawn, write
    from tptopk.training.checks import settle_device

    folder = Path(results_) / ("quick" if quick else "")
    path = Path(out) if out is not None else folder / "reproduction.md" if quick else Path("docs/reproduction.md")
    if render and not any(results.read_results(folder / f"{name}.jsonl") for name in recipes.TABLES):
        raise Refusal(f"there are no runs in {folder} to write about; give --results FOLDER, or leave out --render")
    if not render:
        settle_device(nn.Linear(1, 1), device)
        wanted = {
            name: recipes.table_named(name, quick, only, of_all=target == "all")
            for name in (recipes.TABLES if target == "all" else [TARGETS[target]])
        }
        if target == "figure-pipeline":
            wanted["main"] = [r for r in wanted["main"] if is_drawn(r.identity())]
            if not wanted["main"]:
                raise Refusal(f"figure-pipeline is of no run on {only}; leave --only out")
        jobs = [results.Job(folder / f"{name}.jsonl", r, _run_of(name)) for name in wanted for r in wanted[name]]
        try:
            results.run_all(jobs, data_dir, device, _progress(jobs), processes)
        except KeyboardInterrupt:
            print("interrupted; finished runs are kept: type the same again to go on", file=sys.stderr)
            raise typer.Exit(130) from None
    complaints = list(write(folder, path, quick=quick))
    for complaint in complaints:
        print(f"warning: {complaint}", file=sys.stderr)
    print(json.dumps({"document": str(path), "warnings": complaints}) if json_ else path)


def _run_of(name: str) -> results.Run:
    from tptopk.experiments import reproduce, support_quality

    return support_quality.run_quality if name == "diagnostics" else reproduce.run_one


def _progress(jobs: list[results.Job]) -> Callable[[results.Job, dict[str, Any]], None]:
    """A line on standard error for every run that ends."""
    from tptopk.experiments import results

    total, done = {}, {}
    for path in dict.fromkeys(job.path for job in jobs):
        wanted = [job.recipe for job in jobs if job.path == path]
        total[path], done[path] = len(wanted), len(wanted) - len(results.pending(wanted, path))
        print(f"{path.stem}: {done[path]} of {total[path]} runs are there already", file=sys.stderr, flush=True)

    def show(job: results.Job, result: dict[str, Any]) -> None:
        done[job.path] += 1
        r, name = job.recipe, job.path.stem
        accuracy = result.get("accuracy", result.get("held_out_accuracy"))
        print(
            f"{name} {done[job.path]}/{total[job.path]}: {r.dataset} {r.method} ε = {r.target_epsilon:g} {r.variant} seed {r.seed}: "
            f"accuracy {accuracy:.2f}, {result['seconds']:.1f} s",
            file=sys.stderr,
            flush=True,
        )

    return show
