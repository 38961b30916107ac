"""The command line: the same words as the library. Each file here holds commands, and is imported when one of them is called."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

import typer

from tptopk import __version__
from tptopk.cli.loading import app as app
from tptopk.privacy.refusal import PrivacyWarning, Refusal, SaidElsewhere, SlowCalibration


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
    said: set[str] = set()

    def show_once(message: Warning | str, *rest: object, **more: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show_once
    try:
        app()
    except SaidElsewhere:
        sys.exit(2)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        _tell_torchrun(refusal)
        sys.exit(2)


def _tell_torchrun(refusal: Refusal) -> None:
    """Under torchrun, put the refusal into the summary that it prints last, after a traceback of its own."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise Refusal(str(refusal)) from None  # its traceback is of no use to a person
        except Refusal as bare:
            get_error_handler().record_exception(bare)
