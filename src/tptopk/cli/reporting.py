"""The command that makes a page for a meeting: report."""

from __future__ import annotations

import json
import math
import sys
import warnings
from typing import Annotated

import typer
from rich.console import Console

from tptopk.cli.options import AsJson, app
from tptopk.privacy.refusal import PrivacyWarning


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="run folders, finished or not")],
    output: Annotated[str, typer.Option("--output", "-o", help="the page to write")] = "report.html",
    title: Annotated[str | None, typer.Option(help="the page's heading", show_default=False)] = None,
    json_: AsJson = False,
) -> None:
    """Write one page about runs.

    It is self-contained: claims and checks, curves, supports, advice, audit and statement.
    """
    from tptopk.report.claim import standing
    from tptopk.report.page import write_page

    with Console(stderr=True).status("checking the runs") as status, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "delta = ", PrivacyWarning)  # said below, once for each run
        sheets, size = write_page(runs, output, title=title, on_run=status.update)
    if json_:
        found = [
            {
                "run": run,
                "holds": sheet.verdict.holds,
                "epsilon": sheet.verdict.epsilon if math.isfinite(sheet.verdict.epsilon) else None,
                "words": standing(sheet)[1],
            }
            for run, sheet in zip(runs, sheets, strict=True)
        ]
        print(json.dumps({"page": output, "bytes": size, "runs": found}))
        return
    for run, sheet in zip(runs, sheets, strict=True):
        colour, words = standing(sheet)
        if colour != "good":
            print(f"warning: {run}: {words}", file=sys.stderr)
    print(f"{output}: {len(sheets)} run{'s' if len(sheets) > 1 else ''}, {size / 1000:.0f} kB; open it in any browser")
