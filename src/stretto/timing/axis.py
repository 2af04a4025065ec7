"""`Axis`: one counter of the clock, read as an integer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter
from typing import final

from stretto.timing.timestamp import NANOSECONDS, Timestamp
from stretto.timing.unit import TimeUnit


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
