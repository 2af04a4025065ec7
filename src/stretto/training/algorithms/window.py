"""The elapsed fraction of a part of the run, which most algorithms depend on."""

from __future__ import annotations

from collections.abc import Callable

from stretto.errors import TrainingError
from stretto.timing import Horizon, Time, Timestamp


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
