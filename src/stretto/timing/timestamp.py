"""`Timestamp`, a reading of the clock, and its counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter
from typing import NamedTuple, final

from stretto.errors import TimeError, UnitError
from stretto.timing.grammar import TimeUnit, parse_unit
from stretto.timing.time import Time

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
        instead = "pass the seconds since the last update"
        raise TimeError.bad("seconds", seconds, "it is not from 0 to 1e12", instead)
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
            why, instead = "it has no horizon", "write horizon.position(timestamp, 'dur')"
            raise UnitError.cannot("get 'dur' of a timestamp", why=why, instead=instead)
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
                instead = f"write exactly {', '.join(cls._fields)}"
                raise TimeError.bad(name, value, "it is not a count of a timestamp", instead)
        return cls(**state)


_COUNTERS = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
}


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """One counter of the clock, read as an integer number of ticks.

    Comparing ticks is exact and fast; `scale` says how many of them one unit has. The axis of
    epochs over a data set of n samples ticks in samples, that of seconds in nanoseconds.

    >>> from stretto.timing import Horizon
    >>> axis = Horizon("2ep", dataset_num_samples=100).axis("ep")
    >>> axis.read(Timestamp(epoch=1, sample=150, sample_in_epoch=50)), axis.scale
    (150, Fraction(100, 1))
    """

    unit: TimeUnit
    """The unit that the axis measures."""
    read: Callable[[Timestamp], int]
    """The ticks passed at a timestamp."""
    scale: Fraction
    """Ticks in one unit."""


_SAMPLES = attrgetter("sample")
_WHOLE_EPOCHS = Axis(TimeUnit.EPOCH, attrgetter("epoch"), Fraction(1))
_OTHERS = {
    TimeUnit.BATCH: Axis(TimeUnit.BATCH, attrgetter("batch"), Fraction(1)),
    TimeUnit.SAMPLE: Axis(TimeUnit.SAMPLE, _SAMPLES, Fraction(1)),
    TimeUnit.TOKEN: Axis(TimeUnit.TOKEN, attrgetter("token"), Fraction(1)),
    TimeUnit.SECOND: Axis(TimeUnit.SECOND, attrgetter("run_nanoseconds"), Fraction(NANOSECONDS)),
}
"""Made once, so that the axes of two horizons with the same facts are equal."""


def axes(num_samples: int | None, run_unit: TimeUnit) -> dict[TimeUnit, Axis]:
    """Return the axis of each unit, over data of `num_samples` and a run measured in `run_unit`.

    >>> axes(None, TimeUnit.BATCH)[TimeUnit.DURATION].unit
    <TimeUnit.BATCH: 'ba'>
    """
    epochs = _WHOLE_EPOCHS
    if num_samples is not None:
        epochs = Axis(TimeUnit.EPOCH, _SAMPLES, Fraction(num_samples))
    found = {TimeUnit.EPOCH: epochs, **_OTHERS}
    return {**found, TimeUnit.DURATION: found[run_unit]}
