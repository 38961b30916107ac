"""The application, and its commands, each imported when it is called: help, versions and typos need not wait for PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from tptopk.privacy.refusal import Refusal

# In the order of --help: each command, the file here that adds it to `app`, and what it does in a line.
COMMANDS = {
    "train": ("training", "Train a model privately."),
    "compare": ("training", "Train with several methods and seeds."),
    "plan": ("training", "Show what a privacy budget buys."),
    "predict": ("predicting", "Predict with a trained model."),
    "advise": ("advising", "Would training fewer coordinates help?"),
    "bench": ("measuring", "Time private steps beside ordinary ones."),
    "data": ("data", "Look at data, or fetch a benchmark."),
    "statement": ("checking", "Print what may be claimed for a run."),
    "verify": ("checking", "Recompute a run's ε and check its files."),
    "audit": ("checking", "Attack the mechanism; bound ε from below."),
    "account": ("checking", "One budget for several runs."),
    "reproduce": ("reproducing", "Run and write the paper's tables."),
    "report": ("reporting", "Write one page about runs."),
}


UNIT = 'is for the table\'s schema: unit = "patient_id" and most-rows = 3; in Python, tptopk.fit(unit=ids, most_rows=3)'
# words that are right, and stand elsewhere
ELSEWHERE = {"--unit": f"--unit {UNIT}", "--most-rows": f"--most-rows {UNIT}"}


class Commands(TyperGroup):
    """The commands of the table; one is imported when it is called, and stands there as a name and a line until then."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._imported = dict(self.commands)
        self.commands = {
            name: TyperCommand(name, help=line, add_help_option=False) for name, (_, line) in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else command_named(name), rest


class Grouped(TyperCommand):
    """A command whose options stand in groups in its help, by their `rich_help_panel`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer has no public name for an option that there is not
            if getattr(error, "option_name", None) in ELSEWHERE:
                raise Refusal(ELSEWHERE[error.option_name]) from error  # type: ignore[attr-defined]
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]  # RUN, not {RUN}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for title in sorted(groups, key=lambda title: title == "Options"):  # --help and the like come last
            with formatter.section(title):
                formatter.write_dl(groups[title])


class App(typer.Typer):
    """A `Typer` whose commands show their options in groups."""

    def command(self, name: str | None = None, **given: Any) -> Callable[..., Any]:
        return super().command(name, cls=Grouped, **given)


app = App(
    cls=Commands,
    help="Train PyTorch models on sensitive data under differential privacy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def command_named(name: str) -> Any:
    """A command itself, imported if need be."""
    import_module(f"tptopk.cli.{COMMANDS[name][0]}")
    group = get_group(app)
    assert isinstance(group, Commands)
    return group._imported[name]
