"""The application that commands are added to, and the options they share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from tptopk.settings import Settings

app = typer.Typer(
    help="Train PyTorch models on sensitive data under differential privacy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[str | None, typer.Option(help="a TOML file with these same words", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
Seed = Annotated[
    int | None,
    typer.Option(help="repeatable noise, for experiments: such a run must not be released", show_default=False),
]


def _setting(name: str) -> Any:
    """The option of one setting, for commands that take only some."""
    (found,) = (f for f in fields(Settings) if f.name == name)
    return typer.Option(help=found.metadata["help"], show_default=False)


DataDir = Annotated[str | None, _setting("data_dir")]
TableSchema = Annotated[str | None, _setting("schema")]
ImageSize = Annotated[int | None, _setting("image_size")]
ImageMode = Annotated[str, _setting("image_mode")]


@contextmanager
def image_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar for images that are being read, on a terminal only; nothing is drawn when none are."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: list[TaskID] = []

        def show(done: int, total: int) -> None:
            if done == 1:
                tasks.append(progress.add_task("reading images", total=total))
            progress.update(tasks[-1], completed=done)

        yield show


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
