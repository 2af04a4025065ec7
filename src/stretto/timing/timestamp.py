"""`Timestamp`: the position of a run in every unit."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from stretto.errors import TimeError, UnitError, shown
from stretto.timing.time import Time
from stretto.timing.unit import TimeUnit, parse_unit

NANOSECONDS = 10**9
"""Nanoseconds in a second."""


def nanoseconds(seconds: float) -> int:
    """Return a wall time in nanoseconds.

    >>> nanoseconds(0.25)
    250000000

    Raises:
        TimeError: it is negative, nan, or longer than 30,000 years.
    """
    if not 0 <= seconds < 1e12:
        raise TimeError.cannot(
            f"move the clock by seconds={shown(seconds)}",
            why="it only goes forward, by less than 1e12 seconds",
            instead="pass the seconds since the last update",
        )
    return round(float(seconds) * NANOSECONDS)


class Timestamp(NamedTuple):
    """An immutable snapshot of the clock; plain integers, so it is exact and JSON keeps it.

    `sample` is the position on the line of samples: with a data set of `n` samples it is always
    `epoch * n + sample_in_epoch`, even if samples were skipped (`last_batch="drop"`).
    Counts are over all ranks. Tokens are 0 if they are not tracked.

    >>> Timestamp(epoch=1, batch=20, sample=160, sample_in_epoch=60).get("ba")
    Time('20ba')
    """

    epoch: int = 0
    """Whole epochs finished."""
    batch: int = 0
    """Batches (optimizer steps) finished."""
    sample: int = 0
    """Samples passed."""
    token: int = 0
    """Tokens passed."""
    batch_in_epoch: int = 0
    """Batches begun and finished in this epoch."""
    sample_in_epoch: int = 0
    """Samples passed in this epoch."""
    token_in_epoch: int = 0
    """Tokens passed in this epoch."""
    run_nanoseconds: int = 0
    """Wall time of the run, over all its resumes."""
    job_nanoseconds: int = 0
    """Wall time of this job: since the run was last started or resumed."""
    epoch_nanoseconds: int = 0
    """Wall time of this epoch."""
    batch_nanoseconds: int = 0
    """Wall time of the last batch."""

    def get(self, unit: str) -> Time:
        """Return the count in `unit`: whole epochs, batches, samples, tokens or wall-clock seconds.

        A fraction of an epoch or of the run needs the facts that a `Horizon` has:
        `horizon.position(timestamp, unit)`.

        >>> Timestamp(run_nanoseconds=90_000_000_000).get("sec")
        Time('1m30s')

        Raises:
            UnitError: `unit` is `dur`.
        """
        found = parse_unit(unit)
        if found is TimeUnit.SECOND:
            return Time(Fraction(self.run_nanoseconds, NANOSECONDS), found)
        if found is TimeUnit.DURATION:
            raise UnitError.cannot(
                "get the fraction of the run from a timestamp alone",
                why="it does not know how long the run is",
                instead="write horizon.position(timestamp, 'dur')",
            )
        return Time(getattr(self, _COUNTERS[found]), found)

    def to_state(self) -> dict[str, int]:
        """Return the snapshot as a record that JSON keeps exactly.

        >>> Timestamp(batch=3).to_state()["batch"]
        3
        """
        return self._asdict()

    @classmethod
    def from_state(cls, state: Mapping[str, int]) -> Timestamp:
        """Return the snapshot that `to_state` wrote.

        >>> Timestamp.from_state(Timestamp(batch=3).to_state()) == Timestamp(batch=3)
        True

        Raises:
            TimeError: a count is missing, unknown, negative or not an integer.
        """
        for name in (*cls._fields, *state):
            value = state.get(name)
            if name not in cls._fields or type(value) is not int or value < 0:
                raise TimeError.cannot(
                    f"read a timestamp with {name}={shown(value)}",
                    why="each count is an integer of at least 0",
                    instead=f"write exactly {', '.join(cls._fields)}",
                )
        return cls(**state)


_COUNTERS = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
}
