"""The command line: the same words as the library. Each file here holds commands; importing it adds them to `app`."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer

from tptopk import __version__
from tptopk.cli.options import app
from tptopk.privacy.plan import PrivacyWarning
from tptopk.privacy.refusal import Refusal

# The order of the commands in --help.
# isort: off
from tptopk.cli import training as training
from tptopk.cli import advising as advising
from tptopk.cli import measuring as measuring
from tptopk.cli import data as data
from tptopk.cli import checking as checking
from tptopk.cli import reproducing as reproducing
from tptopk.cli import reporting as reporting
# isort: on


def _show_version(value: bool) -> None:
    if value:
        print(f"tptopk {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    return None


def main() -> None:
    """Run the command line; what a person did wrong is one line, not a traceback."""
    warnings.simplefilter("always", PrivacyWarning)
    warnings.showwarning = lambda message, *rest, **more: print(f"warning: {message}", file=sys.stderr)
    try:
        app()
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)
