"""What a terminal shows beside the answer: progress of slow work, and a plan's small chart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

import typer

from stretto.planning import Plan

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60


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


def chart(plan: Plan, *, width: int = WIDTH) -> str:
    """Return batch sizes and scheduled values over the batches of a run, one line each.

    >>> from stretto import Horizon, Steps, plan
    >>> print(chart(plan(Horizon("320sp"), Steps("0sp:8 160sp:16")), width=12))
    batch size  ▁▁▁▁▁▁▁▁████  8 to 16
    """
    batches = plan.num_batches
    if not batches:
        return ""
    count = min(width, batches)
    seen = [column * (batches - 1) // max(count - 1, 1) for column in range(count)]
    lines = {"batch size": [float(_size(plan, batch)) for batch in seen]}
    for batch in seen:
        for name, value in plan.values_at(batch).items():
            lines.setdefault(name, []).append(value)
    longest = max(map(len, lines))
    return "\n".join(f"{name:<{longest}}  {_bars(values)}" for name, values in lines.items())


def _size(plan: Plan, batch: int) -> int:
    return next(one.size for one in reversed(plan.stages) if one.first.batch <= batch)


def _bars(values: list[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(BARS[round((value - low) * scale)] for value in values)
    return f"{bars}  {low:.4g} to {high:.4g}" if high > low else f"{bars}  {low:.4g}"
