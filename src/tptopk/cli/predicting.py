"""The command that uses a trained model: predict."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tptopk.cli.options import DataDir, ImageMode, ImageSize, TableSchema, app, image_progress
from tptopk.privacy.refusal import Refusal
from tptopk.settings import build
from tptopk.training.begun import config_of, run_folder

if TYPE_CHECKING:
    from torch import nn

    from tptopk.data.tables import Schema


@app.command()
def predict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run folder")],
    data: Annotated[
        str | None,
        typer.Option(
            help="a .npz file with x or x_test, a table, a folder of images or a benchmark (its test set); the embedded test "
            "digits if the run was trained on those",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    schema: TableSchema = None,
    image_size: ImageSize = None,
    image_mode: ImageMode = "RGB",
    model: Annotated[
        str | None,
        typer.Option(
            help="package.module:factory; needed unless the run names one of the library's networks or a file of this folder",
            show_default=False,
        ),
    ] = None,
    id_: Annotated[
        str | None,
        typer.Option("--id", metavar="COLUMN", help="a column of the table, to name records by instead of numbers"),
    ] = None,
) -> None:
    """Predict with a trained model.

    Print a line a record: its number (or what the table's column of --id says), its most likely class, and that class's probability.

    Example: tptopk predict runs/mine --data new.npz --model mynet:build
    """
    run_folder(run)
    import torch

    from tptopk.data.sources import is_table, read_source_inputs
    from tptopk.training.loading import load

    trained = load(run, _network(run, model))
    if data is None and trained.config.get("data") not in (None, "digits"):
        raise Refusal(f"give --data, the records to predict for: {run} was trained on {trained.config['data']}")
    known = _schema_of(run, schema)
    source = data or "digits"
    records = None if id_ is None else _column(source, id_)
    with image_progress() as on_image:
        inputs = read_source_inputs(
            source,
            data_dir=data_dir,
            schema=known if known is not None and is_table(source) else schema,
            image_size=image_size,
            image_mode=image_mode,
            on_image=on_image,
        )
    names = dict(enumerate(() if known is None else known.classes))
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow([id_ or "record", "class", "probability"])
    with torch.no_grad():
        for start in range(0, len(inputs), 1000):
            probability, predicted = trained.model(inputs[start : start + 1000]).softmax(1).max(1)
            for row, (c, p) in enumerate(zip(predicted.tolist(), probability.tolist(), strict=True), start):
                lines.writerow([row if records is None else records[row], names.get(c, c), f"{p:.4f}"])


def _column(source: str, name: str) -> list[str]:
    from tptopk.data.sources import is_table
    from tptopk.data.tables import text_columns

    if not is_table(source):
        raise Refusal(f"--id names a column of a table, and {source} is none")
    return text_columns(source, [name])[name]


def _network(run: str, given: str | None) -> nn.Module | None:
    """The network given, or one in a file of the current folder that the run names; None leaves it to `load`, which builds the library's own.

    No other code is run because a file says so, nor a file that came with the run.
    """
    if given is not None:
        return build(given)
    named = str((config_of(run) or {}).get("model"))
    module = named.partition(":")[0]
    in_the_run = Path.cwd().resolve().is_relative_to(Path(run).resolve())
    own = module.isidentifier() and Path(f"{module}.py").is_file() and not in_the_run
    return build(named) if own else None


def _schema_of(run: str, given: str | None) -> Schema | None:
    """The schema that the run was trained with, or the one given for a run that kept none; another is refused."""
    from tptopk.data.tables import read_schema, schema_from
    from tptopk.training.run import SCHEMA, schema_in

    kept, other = schema_in(run), None if given is None else read_schema(given)
    if kept is None:
        return other
    known = schema_from(kept, Path(run) / SCHEMA)
    if other is not None and not other.same_as(known):
        raise Refusal(
            f"{given} is not the schema that the model was trained with, which is in {Path(run) / SCHEMA}: leave out --schema"
        )
    return known
