"""tptopk reproduce: the paper's tables and figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tptopk.cli.options import AsJson, app
from tptopk.experiments import recipes
from tptopk.privacy.refusal import Refusal, nearest

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
    results: Annotated[str, typer.Option(help="folder of the finished runs; with --quick, its subfolder quick")] = (
        "results"
    ),
    out: Annotated[
        str | None,
        typer.Option(help="the document; docs/reproduction.md, or with --quick beside its runs", show_default=False),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="folder with the benchmarks; TPTOPK_DATA unless given")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    only: Annotated[str | None, typer.Option(help="datasets, separated by commas")] = None,
    part: Annotated[
        str, typer.Option(help="only the second of six shares of the runs, as 2/6; nothing is written but runs")
    ] = "1/1",
    json_: AsJson = False,
) -> None:
    """Run and write the paper's tables.

    What a table or figure needs is run unless it was; then the document is written, ours beside the paper's.
    """
    if target != "all" and target not in TARGETS:
        raise Refusal(f"unknown table or figure {target!r}{nearest(target, [*TARGETS, 'all'])}")
    share, shares = _part(part)
    from torch import nn

    from tptopk.experiments import reproduce
    from tptopk.report.reproduction import is_drawn, write
    from tptopk.training.checks import settle_device

    folder = Path(results) / ("quick" if quick else "")
    path = Path(out) if out is not None else folder / "reproduction.md" if quick else Path("docs/reproduction.md")
    if not render:
        settle_device(nn.Linear(1, 1), device)
        for name in recipes.TABLES if target == "all" else [TARGETS[target]]:
            wanted = recipes.table_named(name, quick, only, of_all=target == "all")
            if target == "figure-pipeline":
                wanted = [r for r in wanted if is_drawn(r.identity())]
                if not wanted:
                    raise Refusal(f"figure-pipeline is of no run on {only}; leave --only out")
            wanted = reproduce.share_of(wanted, share, shares)
            file = folder / f"{name}.jsonl"
            run = _judged_supports if name == "diagnostics" else None
            reproduce.run_all(wanted, file, data_dir, device, _progress(name, len(wanted), _left(wanted, file)), run)
    if shares > 1 and not render:
        if json_:
            print(json.dumps({"document": None, "warnings": []}))
        return
    complaints = list(write(folder, path, quick=quick))
    for complaint in complaints:
        print(f"warning: {complaint}", file=sys.stderr)
    print(json.dumps({"document": str(path), "warnings": complaints}) if json_ else path)


def _judged_supports(r: recipes.Recipe, data_dir: str | None, device: str) -> list[dict[str, Any]]:
    """A line for each score, told apart by their recipes."""
    from tptopk.experiments import support_quality

    rows = support_quality.run_quality(r, data_dir, device)
    return [{**row, "recipe": {**row["recipe"], "score": row["score"]}} for row in rows]


def _part(words: str) -> tuple[int, int]:
    share, _, shares = words.partition("/")
    if not (share.isdigit() and shares.isdigit() and 1 <= int(share) <= int(shares)):
        raise Refusal(f"part is {words!r}; it must be like 2/6")
    return int(share), int(shares)


def _left(wanted: list[recipes.Recipe], file: Path) -> int:
    from tptopk.experiments import reproduce

    return len(reproduce.pending(wanted, file))


def _progress(name: str, total: int, left: int) -> Callable[[dict[str, Any]], None]:
    """A line on standard error for every run that ends."""
    done = total - left
    print(f"{name}: {done} of {total} runs are there already", file=sys.stderr, flush=True)

    def show(result: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        r = result["recipe"]
        accuracy = result.get("accuracy", result.get("held_out_accuracy"))
        print(
            f"{name} {done}/{total}: {r['dataset']} {r['method']} ε = {r['target_epsilon']:g} {r['variant']} seed {r['seed']}: "
            f"accuracy {accuracy:.2f}, {result['seconds']:.1f} s",
            file=sys.stderr,
            flush=True,
        )

    return show
