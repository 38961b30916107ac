"""Commands that look at data: outside the guarantee."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from tptopk.cli.options import app
from tptopk.data.files import findings
from tptopk.settings import Settings

data_app = typer.Typer(
    help="Look at data before training. Outside the guarantee: keep what these print to yourself.", no_args_is_help=True
)
app.add_typer(data_app, name="data")


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
