"""Commands that measure: bench."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from tptopk.cli.options import AsJson, app
from tptopk.privacy.refusal import check_count


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
    """Time private steps beside ordinary ones.

    Those of peers too, in one process, taking turns.
    """
    check_count("rounds", rounds)
    from tptopk.experiments import bench as measurements
    from tptopk.experiments import growth as growth_curves
    from tptopk.report.plots import bench_figure, growth_figure
    from tptopk.report.terminal import print_bench, print_growth, print_ways

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
