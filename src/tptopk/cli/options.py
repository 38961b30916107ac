"""The options that commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from tptopk.cli.loading import app as app
from tptopk.settings import Settings

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


# Which settings stand together in --help, and which a command may leave out as a whole.
BUDGET = (
    "method", "epsilon", "delta", "epochs", "steps", "batch_size", "active_ratio", "warmup", "warmup_budget", "clip_norm",
    "accountant", "dataset_size", "account", "audit_canaries", "secure_noise",
)  # fmt: skip
DATA = ("data", "data_dir", "schema", "image_size", "image_mode")
FITTING = ("score", "ratio_schedule", "optimizer", "learning_rate", "momentum", "weight_decay", "ema")
MACHINE = ("micro_batch_size", "memory_limit", "precision", "compile", "engine", "device")
GROUPS = {"Privacy budget": BUDGET, "Data": DATA, "Model and training": ("model", *FITTING), "Machine": MACHINE}
PANEL = {name: title for title, names in GROUPS.items() for name in names}


def with_settings(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `Settings`, but for those it does not read; it receives them gathered, as its first argument."""
    kinds = get_type_hints(Settings)
    options = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kinds[f.name] | None,
                typer.Option(help=_help(f), show_default=False, rich_help_panel=PANEL[f.name]),
            ],
        )
        for f in sorted(fields(Settings), key=lambda f: list(GROUPS).index(PANEL[f.name]))
        if f.name not in without
    ]
    configuration = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Config)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        def run(config: str | None = None, **given: Any) -> None:
            mine = {p.name: given.pop(p.name) for p in own}
            command(Settings.gather(config, given), **mine)

        all_of_them = [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), configuration, *options]
        run.__signature__ = inspect.Signature(all_of_them)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in all_of_them}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _help(f: Field[Any]) -> str:
    """What a setting means, and what it is unless given; a switch is off."""
    words: str = f.metadata["help"]
    return words if f.default is None or f.default is False else f"{words} [{f.default}]"
