"""The command line: the same words as the library. Each file here holds commands, and is imported when one of them is called."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer

from tptopk import __version__
from tptopk.cli.loading import app as app
from tptopk.privacy.refusal import PrivacyWarning, Refusal, SlowCalibration


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
    warnings.simplefilter("ignore", SlowCalibration)  # said while it happens, in the words of the command line
    warnings.showwarning = lambda message, *rest, **more: print(f"warning: {message}", file=sys.stderr)
    try:
        app()
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)
