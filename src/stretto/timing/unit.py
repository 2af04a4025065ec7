"""The six units of time."""

from __future__ import annotations

from enum import StrEnum

from stretto.errors import TimeError, shown


class TimeUnit(StrEnum):
    """A unit of time in a training run; its value is how it is written.

    >>> TimeUnit("ep") is TimeUnit.EPOCH
    True
    """

    EPOCH = "ep"
    """Passes over the data set; may be fractional."""
    BATCH = "ba"
    """Optimizer steps."""
    SAMPLE = "sp"
    """Samples, counted over all ranks."""
    TOKEN = "tok"
    """Tokens, counted over all ranks."""
    DURATION = "dur"
    """A fraction of the run, relative to its `max_duration`."""
    SECOND = "sec"
    """Seconds of wall clock."""


NAMES = {
    TimeUnit.EPOCH: "epochs",
    TimeUnit.BATCH: "batches",
    TimeUnit.SAMPLE: "samples",
    TimeUnit.TOKEN: "tokens",
    TimeUnit.DURATION: "fractions of the run",
    TimeUnit.SECOND: "seconds",
}
"""The name of each unit in messages and tables."""

WHOLE = frozenset({TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN})
"""Units that come in whole numbers only."""


def parse_unit(value: object) -> TimeUnit:
    """Return the unit that `value` names.

    >>> parse_unit("sp")
    <TimeUnit.SAMPLE: 'sp'>

    Raises:
        TimeError: `value` is not the short name of a unit.
    """
    try:
        return TimeUnit(value)  # type: ignore[arg-type]
    except ValueError:
        raise TimeError.cannot(
            f"read {shown(value)} as a unit of time",
            why="there is no such unit",
            instead="write one of 'ep', 'ba', 'sp', 'tok', 'dur', 'sec'",
        ) from None
