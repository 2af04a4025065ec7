"""How a function becomes a verb, and what a terminal shows beside the answer."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Annotated, Any, TextIO, TypeVar, final, get_type_hints

import typer

from stretto._location import local_path
from stretto.errors import ConfigError, StrettoError, first_line, shown

_ARGUMENT = re.compile(r"^ {4}(\w+)(?: \((.+?)\))?: (.+(?:\n {8}.+)*)", re.MULTILINE)
"""A line of a docstring: the name of an argument, how it is written, and what it is for."""
_Verb = TypeVar("_Verb", bound=Callable[..., None])


def verb(app: typer.Typer, *examples: str) -> Callable[[_Verb], _Verb]:
    """Make a function a verb of the command line, as its signature and its docstring say.

    Keyword-only parameters are options, and those named `as_...` lose that. URLs are no paths.

    Args:
        app: what gets the verb.
        examples: command lines for its help.
    """
    lines = ["Examples:", *(f"  stretto {command}" for command in examples)]

    def add(function: _Verb) -> _Verb:
        about, _, arguments = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
        described = {name: (form, text) for name, form, text in _ARGUMENT.findall(arguments)}
        hints = get_type_hints(function)
        for name, parameter in inspect.signature(function).parameters.items():
            form, text = described.pop(name)
            given: dict[str, Any] = {"metavar": form or None, "help": " ".join(text.split())}
            if "Path" in str(hints[name]):
                given["callback"] = _local
            if parameter.kind is parameter.KEYWORD_ONLY:
                option = "--" + name.removeprefix("as_").replace("_", "-")
                is_shown = parameter.default not in (None, False, parameter.empty)
                info = typer.Option(option, show_default=is_shown, **given)
            else:
                info = typer.Argument(**given, show_default=False)
            function.__annotations__[name] = Annotated[hints[name], info]
        name = function.__name__.replace("_", "-")
        app.command(name, help=about, epilog="\n\n".join(lines))(function)
        return function

    return add


def _local(given: Path | list[Path] | None) -> Path | list[Path] | None:
    """Refuse URLs as files and folders."""
    if isinstance(given, list):
        return [local_path(path, "use", ConfigError) for path in given]
    return None if given is None else local_path(given, "use", ConfigError)


def open_standard_files() -> None:
    """Open what the shell has closed (`>&-`), or else a file of the run would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  to the end


def of_system(error: OSError) -> StrettoError:
    """Return an error of the system as one of ours."""
    drop_output()
    what = "go on" if error.filename is None else f"use {shown(str(error.filename))}"
    why = (error.strerror or first_line(error)).lower()
    instead = "free space, or look at that file; --traceback shows where it was"
    return StrettoError.cannot(what, why=why, instead=instead)


def drop_output() -> None:
    """If stdout is full, or its reader has gone, send the rest of it nowhere."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@final
class Lasting:
    """A stdout that ends no run: from its first failure on, what is printed goes nowhere."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write, and flush, so that nothing fails later."""
        try:
            self._file.write(text)
            self._file.flush()
        except (OSError, ValueError) as error:
            drop_output()
            warnings.warn(
                f"cannot write to stdout: {first_line(error)}; the run goes on without it",
                RuntimeWarning,
                stacklevel=2,
            )
        return len(text)


def print_json(value: object) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))


@contextmanager
def progress(what: str, *, after: float = 2.0, every: float = 15.0) -> Iterator[None]:
    """Print a line to stderr while slow work lasts: also in a pipe, but once for all ranks.

    Args:
        what: what the command does, such as "reading the data".
        after: seconds before the first line.
        every: seconds between lines.
    """
    done, began, is_first = Event(), monotonic(), os.environ.get("RANK", "0") == "0"

    def report() -> None:
        wait = after if is_first else None
        while not done.wait(wait):
            typer.echo(f"{what} ({monotonic() - began:.0f} s) ...", err=True)
            wait = every

    thread = Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
