"""Triggers: when repeated events happen."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from stretto.errors import TimeError
from stretto.timing.grammar import TimeUnit, exact
from stretto.timing.horizon import Horizon
from stretto.timing.time import Number, Time, TimeLike, rounded
from stretto.timing.timestamp import Axis, Timestamp

Count: TypeAlias = Callable[[Timestamp, Timestamp], int]
"""How many boundaries lie in `(before, after]`."""
Limits: TypeAlias = Sequence[tuple[Axis, int]]
"""Counters of the clock, each with its next tick."""


@final
@dataclass(frozen=True, slots=True)
class BoundTrigger:
    """A trigger on one run: called with the clock before and after a batch.

    It fires when a boundary lies in `(before, after]`. So whatever the batch sizes, no boundary is
    missed and none fires twice.
    """

    count: Count
    """How many boundaries lie in `(before, after]`."""
    units: frozenset[TimeUnit]
    """The units that it reads from the clock."""
    next: Callable[[Timestamp], Limits]
    """When it fires next after a timestamp: as soon as any limit is reached."""

    def __call__(self, before: Timestamp, after: Timestamp) -> bool:
        """Return whether a boundary lies in `(before, after]`."""
        return self.count(before, after) > 0


class Trigger(ABC):
    """When an event happens: `Every`, `At`, or several joined by `|`.

    >>> fires = (Every("10ba") | At("50%")).bind(Horizon("30ba"))
    >>> [b + 1 for b in range(30) if fires(Timestamp(batch=b), Timestamp(batch=b + 1))]
    [10, 15, 20, 30]
    """

    __slots__ = ()

    @abstractmethod
    def bind(self, horizon: Horizon) -> BoundTrigger:
        """Resolve every time for one run.

        Raises:
            ConversionError: a time needs a fact that is not known.
        """

    @abstractmethod
    def scaled(self, ratio: Number) -> Trigger:
        """Return the trigger with all times scaled, except fractions of the run."""

    @final
    def __or__(self, other: Trigger) -> Trigger:
        if not isinstance(other, Trigger):
            return NotImplemented
        return AnyOf((self, other))


@final
@dataclass(frozen=True, slots=True, init=False)
class Every(Trigger):
    """Fires after every `interval` since the start of the run.

    >>> every = Every("10%").bind(Horizon("30ba"))
    >>> [b for b in range(30) if every(Timestamp(batch=b), Timestamp(batch=b + 1))]
    [2, 5, 8, 11, 14, 17, 20, 23, 26, 29]

    Raises:
        TimeError: the interval is not a time or not positive.
    """

    interval: Time

    def __init__(self, interval: TimeLike) -> None:
        object.__setattr__(self, "interval", _positive(Time(interval), "interval"))

    def bind(self, horizon: Horizon) -> BoundTrigger:
        """Resolve the interval for one run."""
        axis = horizon.axis(self.interval.unit)
        ticks = horizon.ticks(self.interval, axis)
        above, below, read = ticks.numerator, ticks.denominator, axis.read

        def count(before: Timestamp, after: Timestamp) -> int:
            return read(after) * below // above - read(before) * below // above

        def following(before: Timestamp) -> Limits:
            return [(axis, -((-(read(before) * below // above) - 1) * above // below))]

        return BoundTrigger(count, frozenset({axis.unit}), following)

    def scaled(self, ratio: Number) -> Every:
        """Return the trigger with its interval scaled, unless it is a fraction of the run."""
        return Every(_stretched(self.interval, ratio))

    def __repr__(self) -> str:
        return f"Every('{self.interval}')"


@final
@dataclass(frozen=True, slots=True, init=False)
class At(Trigger):
    """Fires once at each of the given times, which may be of different units.

    >>> at = At("0.5ep", "75sp").bind(Horizon("1ep", dataset_num_samples=100))
    >>> [s for s in range(0, 100, 25) if at(Timestamp(sample=s), Timestamp(sample=s + 25))]
    [25, 50]

    Raises:
        TimeError: no time is given, or one is not positive.
    """

    times: tuple[Time, ...]

    def __init__(self, *times: TimeLike) -> None:
        if not times:
            raise TimeError.bad("times", times, "there are none", "write for example At('0.5ep')")
        parsed = tuple(_positive(Time(time), "time") for time in times)
        object.__setattr__(self, "times", parsed)

    def bind(self, horizon: Horizon) -> BoundTrigger:
        """Resolve the times for one run."""
        marks: dict[Axis, list[int]] = {}
        for time in self.times:
            axis = horizon.axis(time.unit)
            # Counters are whole numbers: they reach 2.5 at 3.
            marks.setdefault(axis, []).append(math.ceil(horizon.ticks(time, axis)))
        ordered = [(axis, sorted(ticks)) for axis, ticks in marks.items()]

        def count(before: Timestamp, after: Timestamp) -> int:
            total = 0
            for axis, ticks in ordered:  # half-open: a mark at `before` has been passed
                total += bisect_right(ticks, axis.read(after))
                total -= bisect_right(ticks, axis.read(before))
            return total

        def following(before: Timestamp) -> Limits:
            passed = [bisect_right(ticks, axis.read(before)) for axis, ticks in ordered]
            pairs = zip(ordered, passed, strict=True)
            return [(axis, ticks[count]) for (axis, ticks), count in pairs if count < len(ticks)]

        return BoundTrigger(count, frozenset(axis.unit for axis in marks), following)

    def scaled(self, ratio: Number) -> At:
        """Return the trigger with all times scaled, except fractions of the run."""
        return At(*(_stretched(time, ratio) for time in self.times))

    def __repr__(self) -> str:
        return f"At({', '.join(repr(str(time)) for time in self.times)})"


@final
@dataclass(frozen=True, slots=True)
class AnyOf(Trigger):
    """Fires when any of its triggers does; written `Every("1ep") | At("10ba")`.

    >>> (Every("2ba") | At("3ba")).bind(Horizon("9ba"))(Timestamp(batch=2), Timestamp(batch=3))
    True
    """

    triggers: tuple[Trigger, ...]

    def bind(self, horizon: Horizon) -> BoundTrigger:
        """Resolve all the triggers for one run."""
        bound = [trigger.bind(horizon) for trigger in self.triggers]

        def count(before: Timestamp, after: Timestamp) -> int:
            total = 0
            for one in bound:  # a loop takes a third of the time of sum() over a generator
                total += one.count(before, after)
            return total

        return BoundTrigger(
            count,
            frozenset[TimeUnit]().union(*(one.units for one in bound)),
            lambda before: [limit for trigger in bound for limit in trigger.next(before)],
        )

    def scaled(self, ratio: Number) -> AnyOf:
        """Return the trigger with each of its triggers scaled."""
        return AnyOf(tuple(trigger.scaled(ratio) for trigger in self.triggers))


def parse_trigger(value: TimeLike | Trigger) -> Trigger:
    """Return `value` if it is a trigger, else `Every` of it.

    >>> parse_trigger("10%")
    Every('0.1dur')

    Raises:
        TimeError: it is not a time.
    """
    return value if isinstance(value, Trigger) else Every(value)


def _positive(time: Time, name: str) -> Time:
    if time.amount <= 0:
        raise TimeError.bad(name, str(time), "it is not longer than 0", "write for example '1ep'")
    return time


def _stretched(time: Time, ratio: Number) -> Time:
    if time.unit is TimeUnit.DURATION:
        return time
    return rounded(time.amount * exact(ratio), time.unit)
