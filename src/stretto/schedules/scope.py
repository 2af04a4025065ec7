"""`Scope`: the part of a run that a schedule covers, and the positions of its times in it.

A scope starts as the whole run (`RunScope`), without an axis. A schedule asks for an axis on which
all its times can be placed, and gets a `Span`: an interval of that axis, which can be cut into
parts. All positions are exact, in ticks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias, final

from stretto.errors import ConversionError
from stretto.timing import Axis, Horizon, Time, Timestamp, TimeUnit
from stretto.timing.conversion import rounded
from stretto.timing.timer import PeriodClock

BoundSchedule: TypeAlias = Callable[[Timestamp], float]
"""A schedule on one run: the factor at a timestamp."""
END = Time(1, TimeUnit.DURATION)
"""The whole of a scope."""


@final
@dataclass(frozen=True, slots=True)
class RunScope:
    """The whole run.

    >>> RunScope(Horizon("2ep", dataset_num_samples=50)).span([END]).end
    Fraction(100, 1)
    """

    horizon: Horizon

    @property
    def clock(self) -> None:
        """None: the clock of the run is that of the horizon."""

    def span(self, times: Iterable[Time]) -> Span:
        """Return the run on an axis that all of `times` can be placed on.

        Raises:
            ConversionError: a fact is missing; the message names it.
        """
        times = list(times)
        axis = self.horizon.common_axis(times)
        if any(time.unit is TimeUnit.DURATION for time in times):
            return Span(self.horizon, axis, Fraction(0), self._end(axis))
        try:
            return Span(self.horizon, axis, Fraction(0), self._end(axis))
        except ConversionError:  # no time depends on the end, so it may be unknown
            return Span(self.horizon, axis, Fraction(0), None)

    def _end(self, axis: Axis) -> Fraction:
        return self.horizon.ticks(self.horizon.max_duration, axis)


@final
@dataclass(frozen=True, slots=True)
class Span:
    """An interval of one axis, in exact ticks.

    >>> run = RunScope(Horizon("90ep", dataset_num_samples=100)).span([END])
    >>> rest = run.part(run.after(Time("5%")), run.end)
    >>> rest.start, rest.after(Time("0.5dur"))
    (Fraction(450, 1), Fraction(4725, 1))
    """

    horizon: Horizon
    axis: Axis
    """The counter that positions are measured on."""
    start: Fraction
    end: Fraction | None
    """None if it is unknown on this axis and no time depends on it."""

    def span(self, times: Iterable[Time]) -> Span:  # noqa: ARG002 (its axis was chosen for them)
        """Return this span; its axis was chosen for `times`."""
        return self

    def part(self, start: Fraction, end: Fraction | None) -> Span:
        """Return the interval from `start` to `end` of the same axis."""
        return Span(self.horizon, self.axis, start, end)

    def after(self, time: Time) -> Fraction:
        """Return the position at which `time` has passed since the start of the span."""
        return self.moved(self.start, time)

    def length(self, time: Time) -> Fraction:
        """Return the length of `time` from the start of the span, in ticks."""
        return self.after(time) - self.start

    def moved(self, position: Fraction, time: Time) -> Fraction:
        """Return the position `time` after `position`; `time` may be negative.

        A fraction is of the span. Batches are counted from the first that starts at or after the
        position: if the batch size changes, their length depends on where they are.

        Raises:
            ConversionError: a fact is missing; the message names it.
        """
        if time.unit is TimeUnit.DURATION:
            assert self.end is not None, "a schedule that refers to the end has it in its times"
            moved = position + time.amount * (self.end - self.start)
        elif time.unit is self.axis.unit:
            moved = position + time.amount * self.axis.scale
        elif time.unit is TimeUnit.BATCH and position != 0:
            batches = self.horizon.convert(self._time(position), TimeUnit.BATCH) + time
            moved = self.horizon.ticks(max(batches, Time(0, TimeUnit.BATCH)), self.axis)
        else:
            moved = position + self.horizon.ticks(time, self.axis)
        if self.axis.unit is TimeUnit.EPOCH:
            # Through the horizon, which refuses parts of an epoch of unknown size.
            return self.horizon.ticks(self._time(moved), self.axis)
        return moved

    def along(self, unit: TimeUnit) -> Span:
        """Return the same interval on the axis of `unit`; for `dur` this one.

        Intervals such as `1000ba` are equal only on their own axis: if the batch size changes, each
        has another number of samples.

        Raises:
            ConversionError: the start of the span is unknown in `unit`.
        """
        if unit in (TimeUnit.DURATION, self.axis.unit):
            return self
        axis = self.horizon.axis(unit)
        end = None
        if self.end is not None:
            try:
                end = self._on(self.end, axis)
            except ConversionError:  # only the value after the end depends on it
                end = None
        return Span(self.horizon, axis, self._on(self.start, axis), end)

    def smooth(self) -> Span:
        """Return this span for a curve that changes with every batch.

        Raises:
            ConversionError: it counts epochs, whose number of samples is not known.
        """
        self.horizon.check_moves(self.axis)
        return self

    @property
    def clock(self) -> PeriodClock:
        """The time since the start of the span."""
        return self.passed

    def passed(self, timestamp: Timestamp, unit: TimeUnit) -> Time:
        """Return the time since the start of the span in `unit`; for `dur`, as a fraction of it.

        Raises:
            ConversionError: the start of the span, or its end for `dur`, is unknown in `unit`.
        """
        own = self.along(unit)
        ticks = max(Fraction(0), own.axis.read(timestamp) - own.start)
        if unit is not TimeUnit.DURATION:
            return rounded(ticks / own.axis.scale, unit)
        if own.end is None:
            why = f"where it ends is not known in '{own.axis.unit}'"
            instead = "write the durations of the periods in the unit of max_duration"
            what = "know the elapsed fraction of the period"
            raise ConversionError.cannot(what, why=why, instead=instead)
        length = own.end - own.start
        return Time(min(Fraction(1), ticks / length) if length else 1, unit)

    def show(self, position: Fraction) -> str:
        """Return a position or length on this axis as text for a message."""
        return str(rounded(position / self.axis.scale, self.axis.unit))

    def _on(self, position: Fraction, axis: Axis) -> Fraction:
        if position == 0:
            return Fraction(0)  # zero is zero in every unit, even if facts are missing
        return self.horizon.ticks(self._time(position), axis)

    def _time(self, position: Fraction) -> Time:
        return rounded(position / self.axis.scale, self.axis.unit)


Scope: TypeAlias = RunScope | Span
"""The part of a run that a schedule covers: the whole run or a period."""


def integers(*positions: Fraction) -> tuple[int, ...]:
    """Return a common denominator, then the positions as integers over it.

    Integers compare and subtract exactly and fast. So a bound schedule reads its counter,
    multiplies by the denominator, and computes in integers until it returns a float.

    >>> integers(Fraction(9, 2), Fraction(1, 3))
    (6, 27, 2)
    """
    denominator = math.lcm(*(position.denominator for position in positions))
    return denominator, *(int(position * denominator) for position in positions)
