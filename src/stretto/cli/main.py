"""`stretto`: the entry point, and how errors reach the terminal."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import typer

from stretto.errors import StrettoError

TRACEBACK = "--traceback"
"""Shows where an error was raised; may stand anywhere on the command line."""
MISUSE = 2
"""Exit code where something must be written differently, as with unknown options."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of ours are one clear text, and end with code 2.

    Args:
        arguments: what follows the program's name; left out, those of this process.
    """
    from stretto.cli.app import app

    warnings.formatwarning = _one_line
    given = list(sys.argv[1:] if arguments is None else arguments)
    shows_traceback = TRACEBACK in given
    try:
        app([one for one in given if one != TRACEBACK], prog_name="stretto")
    except StrettoError as error:
        if shows_traceback:
            raise
        from stretto.config.source import as_key

        in_keys = error.recast(StrettoError, word=as_key)
        text = "\n".join([str(in_keys), *getattr(error, "__notes__", ())])
        typer.secho(f"Error: {text}", err=True, fg=typer.colors.RED)
        raise SystemExit(MISUSE) from None


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """What a warning is on a terminal: whoever reads it there did not write the code."""
    return f"Warning: {message}\n"
