"""What a terminal shows beside the answer: progress of slow work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

import typer


@contextmanager
def progress(what: str, *, after: float = 2.0, every: float = 15.0) -> Iterator[None]:
    """Print a line to stderr while slow work lasts: also in a pipe.

    Args:
        what: what the command does, such as "reading the data".
        after: seconds before the first line.
        every: seconds between lines.
    """
    done, began = Event(), monotonic()

    def report() -> None:
        wait = after
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
