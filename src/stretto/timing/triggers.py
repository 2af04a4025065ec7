"""Triggers: when something happens that happens now and then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import final

from stretto.errors import TimeError, cannot
from stretto.timing.conversion import rounded
from stretto.timing.horizon import Horizon
from stretto.timing.time import Time, TimeLike
from stretto.timing.timestamp import Timestamp
from stretto.timing.unit import TimeUnit


@final
@dataclass(frozen=True, slots=True)
class BoundTrigger:
    """A trigger on one run: called with the clock before and after a batch.

    It fires when a boundary lies in `(before, after]`, so however large the batches are, none is
    missed and none fires twice.
    """

    count: Callable[[Timestamp, Timestamp], int]
    """How many boundaries lie in `(before, after]`."""
    needs_wall_clock: bool
    """Whether it reads wall time, so that ranks must be told by one of them."""

    def __call__(self, before: Timestamp, after: Timestamp) -> bool:
        """Return whether a boundary lies in `(before, after]`."""
        return self.count(before, after) > 0


class Trigger(ABC):
    """When something happens: `Every`, `At`, or several joined by `|`."""

    __slots__ = ()

    @abstractmethod
    def bind(self, horizon: Horizon) -> BoundTrigger:
        """Resolve every time for one run.

        Raises:
            ConversionError: a time needs a fact that is not known.
        """

    @abstractmethod
    def scaled(self, ratio: Fraction) -> Trigger:
        """Return the trigger with every time that is not a fraction of the run stretched."""

    def __or__(self, other: Trigger) -> Trigger:
        return AnyOf((self, other))


@final
@dataclass(frozen=True, slots=True, init=False)
class Every(Trigger):
    """Fires each time another `interval` has passed since the start of the run.

    >>> every = Every("10%").bind(Horizon("30ba"))
    >>> [b for b in range(30) if every(Timestamp(batch=b), Timestamp(batch=b + 1))]
    [2, 5, 8, 11, 14, 17, 20, 23, 26, 29]

    Raises:
        TimeError: the interval is not a time or not positive.
    """

    interval: Time

    def __init__(self, interval: TimeLike) -> None:
        object.__setattr__(self, "interval", _positive(Time(interval), "an interval"))

    def bind(self, horizon: Horizon) -> BoundTrigger:
        """Resolve the interval for one run."""
        axis = horizon.axis(self.interval.unit)
        ticks = horizon.ticks(self.interval, axis)
        above, below, read = ticks.numerator, ticks.denominator, axis.read

        def count(before: Timestamp, after: Timestamp) -> int:
            return read(after) * below // above - read(before) * below // above

        return BoundTrigger(count, axis.unit is TimeUnit.SECOND)

    def scaled(self, ratio: Fraction) -> Every:
        """Return the trigger with its interval stretched, unless it is a fraction of the run."""
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
            raise TimeError(
                cannot("fire at no time at all", why="none was given", instead="write At('0.5ep')")
            )
        parsed = tuple(_positive(Time(time), "a time to fire at") for time in times)
        object.__setattr__(self, "times", parsed)

    def bind(self, horizon: Horizon) -> BoundTrigger:
        """Resolve the times for one run."""
        axes = [horizon.axis(time.unit) for time in self.times]
        marks = [
            (axis.read, horizon.ticks(time, axis))
            for time, axis in zip(self.times, axes, strict=True)
        ]

        def count(before: Timestamp, after: Timestamp) -> int:
            return sum(read(before) < mark <= read(after) for read, mark in marks)

        return BoundTrigger(count, any(axis.unit is TimeUnit.SECOND for axis in axes))

    def scaled(self, ratio: Fraction) -> At:
        """Return the trigger with its times stretched, but for fractions of the run."""
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
            return sum(trigger.count(before, after) for trigger in bound)

        return BoundTrigger(count, any(trigger.needs_wall_clock for trigger in bound))

    def scaled(self, ratio: Fraction) -> AnyOf:
        """Return the trigger with each of its triggers stretched."""
        return AnyOf(tuple(trigger.scaled(ratio) for trigger in self.triggers))


def parse_trigger(value: TimeLike | Trigger) -> Trigger:
    """Return `value` if it is a trigger, else `Every` of it.

    >>> parse_trigger("10%")
    Every('0.1dur')

    Raises:
        TimeError: it is not a time.
    """
    return value if isinstance(value, Trigger) else Every(value)


def _positive(time: Time, what: str) -> Time:
    if time.amount <= 0:
        raise TimeError(
            cannot(
                f"use '{time}' as {what}",
                why="it is not after the start of the run",
                instead="write a time such as '1ep'",
            )
        )
    return time


def _stretched(time: Time, ratio: Fraction) -> Time:
    return time if time.unit is TimeUnit.DURATION else rounded(time.amount * ratio, time.unit)
