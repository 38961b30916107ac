"""Commands about data: look at it, which is outside the guarantee, and fetch public benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tptopk.cli.options import DataDir, ImageMode, ImageSize, TableSchema, app, image_progress

if TYPE_CHECKING:
    from tptopk.data.tables import Schema

data_app = typer.Typer(
    help="Look at data, or fetch a benchmark.\n\nA look at data is outside the guarantee: keep what it prints to yourself.",
    no_args_is_help=True,
)
app.add_typer(data_app, name="data")
OUTSIDE = "This looked at the data itself and is not covered by any guarantee."


@data_app.command()
def check(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="a file, a folder of images or a benchmark; the embedded digits if not given",
            show_default=False,
        ),
    ] = None,
    classes: Annotated[int | None, typer.Option(help="number of classes of the model", show_default=False)] = None,
    data_dir: DataDir = None,
    schema: TableSchema = None,
    image_size: ImageSize = None,
    image_mode: ImageMode = "RGB",
) -> None:
    """Look for records that would spoil training.

    Labels out of range, inputs that are not finite, constant columns.
    """
    from tptopk.data.files import findings
    from tptopk.data.sources import read_schema_for, read_source, source_findings
    from tptopk.data.table_checks import faults

    source = path or "digits"
    columns = read_schema_for(source, schema)
    if columns is not None and (lines := faults(source, columns)):
        print(
            f"{source} is refused by training until these are repaired (records are counted from 1, without the header):"
        )
        for line in lines:
            print(f"  {line}")
        print(OUTSIDE)
        raise typer.Exit(1)
    with image_progress() as on_image:
        training, test = read_source(
            source,
            data_dir=data_dir,
            schema=schema,
            image_size=image_size,
            image_mode=image_mode,
            on_image=on_image,
        )
    if columns is not None:
        _show_columns(source, columns)
    found = False
    for name, pair in (("training", training), ("test", test)):
        if pair is None:
            continue
        labelled = len(pair[1]) and not pair[1].is_floating_point()
        labels = f", labels {int(pair[1].min())} to {int(pair[1].max())}" if labelled else ""
        print(
            f"{name}: {len(pair[1])} records, inputs {tuple(pair[0].shape[1:])} {pair[0].dtype}, targets {pair[1].dtype}{labels}"
        )
        lines = (source_findings(source, columns) if name == "training" else []) + findings(pair, classes, columns)
        found |= bool(lines)
        for line in lines or ["nothing to report"]:
            print(f"  {line}")
    print(OUTSIDE)
    if found:
        raise typer.Exit(1)


def _show_columns(path: str, schema: Schema) -> None:
    """How many inputs come from where, and which columns are left out."""
    from tptopk.data.table_checks import unit_findings
    from tptopk.data.tables import header_of, read_unit

    print(schema.inputs_in_words())
    left_out = [name for name in header_of(path) if name not in (*schema.used, schema.target, schema.unit)]
    if left_out:
        print(f"not used: {', '.join(left_out)}")
    if schema.unit is not None:
        print(unit_findings(read_unit(path, schema), schema))


@data_app.command()
def fetch(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="mnist, fmnist, cifar10, or a 2-D set of MedMNIST such as pneumoniamnist"),
    ],
    data_dir: DataDir = None,
    mirror: Annotated[
        str | None,
        typer.Option(
            help="another address with files of the same names; their checksums are checked all the same",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Download a public benchmark.

    It is checked against the published checksums and put into its usual folder.
    """
    from tptopk.data.download import fetch as fetch_benchmark

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def show(file: str, received: int, expected: int | None) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file)
            progress.update(tasks[file], completed=received, total=expected)

        folder = fetch_benchmark(name, data_dir, mirror=mirror, on_progress=show)
    print(f"{name} is in {folder}")
