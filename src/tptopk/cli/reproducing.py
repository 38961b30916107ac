"""tptopk reproduce: the paper's tables and figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from tptopk.cli.options import app
from tptopk.experiments import recipes, reproduce
from tptopk.privacy.refusal import Refusal


@app.command("reproduce")
def reproduce_(
    table: Annotated[
        str, typer.Argument(help="table-main, table-ratio, table-split, table-medical, table-context, …, all")
    ],
    quick: Annotated[bool, typer.Option(help="a reduced version for a CPU; its figures mean nothing")] = False,
    results: Annotated[str, typer.Option(help="folder of the finished runs")] = "results",
    data_dir: Annotated[str | None, typer.Option(help="folder with the benchmarks; TPTOPK_DATA unless given")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    only: Annotated[str | None, typer.Option(help="datasets, separated by commas")] = None,
    part: Annotated[str, typer.Option(help="which share of the runs, as 2/6: the second of six processes")] = "1/1",
) -> None:
    """Run what a table needs and has not been run yet."""
    names = list(recipes.TABLES) if table == "all" else [table.removeprefix("table-")]
    share, _, shares = part.partition("/")
    if not (share.isdigit() and shares.isdigit() and 1 <= int(share) <= int(shares)):
        raise Refusal(f"part is {part!r}; it must be like 2/6")
    for name in names:
        wanted = recipes.table_named(name)
        wanted = recipes.quick(wanted) if quick else wanted
        if only is not None:
            wanted = [r for r in wanted if r.dataset in only.split(",")]
        wanted = reproduce.share_of(wanted, int(share), int(shares))
        path = Path(results) / ("quick" if quick else "") / f"{name}.jsonl"
        reproduce.run_all(
            wanted, path, data_dir, device,
            lambda result: print(
                json.dumps({k: result[k] for k in ("dataset", "method", "target_epsilon", "variant", "seed", "accuracy", "seconds")}, ensure_ascii=False),
                file=sys.stderr,
                flush=True,
            ),
        )  # fmt: skip
