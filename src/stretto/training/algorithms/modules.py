"""Modules that an algorithm names, and when it is active."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from stretto.errors import TrainingError
from stretto.timing import Horizon, Time, Timestamp

_SHOWN = 8
"""Names listed in a message."""


def find_modules(model: nn.Module, names: Sequence[str], what: str) -> list[nn.Module]:
    """Return the modules of `model` that have these names; `what` says what for.

    >>> find_modules(nn.Sequential(nn.Identity()), ["0"], "freeze")
    [Identity()]

    Raises:
        TrainingError: the model has no module of a name.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            known = [repr(other) for other in modules if other]
            more = ", ..." if len(known) > _SHOWN else ""
            raise TrainingError.cannot(
                f"{what} {name!r}",
                why="the model has no such module",
                instead=f"write {', '.join(known[:_SHOWN])}{more}"
                if known
                else "leave it out: this model has no parts",
            )
    return [modules[name] for name in names]


def progress(horizon: Horizon, start: Time, end: Time) -> Callable[[Timestamp], float]:
    """Return how much of the run from `start` to `end` has passed, in [0, 1].

    >>> passed = progress(Horizon("10ba"), Time("2ba"), Time("60%"))
    >>> [passed(Timestamp(batch=batch)) for batch in (0, 2, 4, 6, 9)]
    [0.0, 0.0, 0.5, 1.0, 1.0]

    Raises:
        TrainingError: the stretch has no length.
        ConversionError: a time needs a fact that is not known.
    """
    axis = horizon.common_axis((start, end))
    horizon.check_moves(axis)
    first, last = horizon.ticks(start, axis), horizon.ticks(end, axis)
    if last <= first:
        raise TrainingError.cannot(
            f"change how the model is trained from {start} to {end}",
            why="the end does not come after the start",
            instead="write an end that is later",
        )

    def passed(timestamp: Timestamp) -> float:
        return min(1.0, max(0.0, float((axis.read(timestamp) - first) / (last - first))))

    return passed
