"""`Scope`: the part of a run that a schedule covers, and the positions of its times in it.

A place in the run is a `Mark`: exact on one counter, that of the time that leads there. So a
length is counted in its own unit, and only the place where it begins is brought to that unit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypeAlias, final

from stretto.errors import ConversionError
from stretto.timing import Axis, Horizon, Time, Timestamp, TimeUnit
from stretto.timing.grammar import WHOLE
from stretto.timing.time import rounded

BoundSchedule: TypeAlias = Callable[[Timestamp], float]
"""A schedule on one run: the factor at a timestamp."""
END = Time(1, TimeUnit.DURATION)
"""The whole of a scope."""
MOST_BORDERS = 1_000
"""A schedule whose formula changes more often has no rows of its own in a plan."""


@final
@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a run: a tick of one counter."""

    axis: Axis
    tick: Fraction
    """Exact, and counted from the start of the run."""
    period: str = field(default="", compare=False)
    """The name of a period that begins here."""

    @property
    def first_tick(self) -> int:
        """The tick at which the counter, which has whole ones, has reached it."""
        return math.ceil(self.tick)


def _end_of(horizon: Horizon) -> Mark:
    axis = horizon.axis(TimeUnit.DURATION)
    return Mark(axis, horizon.ticks(horizon.max_duration, axis))


@final
@dataclass(frozen=True, slots=True)
class Scope:
    """The part of a run that a schedule covers: the whole run, or a period.

    It is read on one counter, in exact ticks.

    >>> run = Scope.of(Horizon("90ep", dataset_num_samples=100))
    >>> rest = run.part(run.after(Time("5%")), run.last)
    >>> rest.start, rest.after(Time("0.5dur")).tick
    (Fraction(450, 1), Fraction(4725, 1))
    """

    horizon: Horizon
    axis: Axis
    """The counter of its length, which fractions are of."""
    first: Mark
    """Where it begins."""
    last: Mark
    """Where it ends."""

    @property
    def start(self) -> Fraction:
        """The tick at which it begins.

        Raises:
            ConversionError: that is unknown on this counter.
        """
        return self.place(self.first)

    @property
    def end(self) -> Fraction | None:
        """The tick at which it ends; None if it ends with the run and that is unknown.

        Raises:
            ConversionError: the end of a period is unknown on this counter.
        """
        try:
            return self.place(self.last)
        except ConversionError:
            if self.last != _end_of(self.horizon):
                raise
            return None  # nothing is read after the end of the run

    @classmethod
    def of(cls, horizon: Horizon) -> Scope:
        """Return the whole run, on the counter of its length.

        >>> Scope.of(Horizon("2ep", dataset_num_samples=50)).end
        Fraction(100, 1)
        """
        axis = horizon.axis(TimeUnit.DURATION)
        return cls(horizon, axis, Mark(axis, Fraction(0)), _end_of(horizon))

    def part(self, first: Mark, last: Mark, axis: Axis | None = None) -> Scope:
        """Return the interval between two marks, on the same counter by default."""
        return Scope(self.horizon, self.axis if axis is None else axis, first, last)

    def after(self, time: Time) -> Mark:
        """Return where `time` has passed since the start of the scope."""
        return self.moved(self.first, time)

    def length(self, time: Time) -> Fraction:
        """Return the length of `time`, in ticks of its own counter."""
        return self.after(time).tick - self.along(time.unit).start

    def moved(self, mark: Mark, time: Time) -> Mark:
        """Return the place `time` after `mark`; `time` may be negative.

        A fraction is of the scope. Batches are counted from the first that starts at or after the
        mark.

        Raises:
            ConversionError: a fact is missing.
        """
        own = self.along(time.unit)
        each = own.axis.scale
        if time.unit is TimeUnit.DURATION:
            each = own.place(own.last) - own.start
        tick = own.place(mark) + time.amount * each
        if own.axis.unit is TimeUnit.EPOCH:
            # Through the horizon, which refuses parts of an epoch of unknown size.
            self.horizon.ticks_of(tick / own.axis.scale, TimeUnit.EPOCH, own.axis)
        return Mark(own.axis, tick)

    def along(self, unit: TimeUnit) -> Scope:
        """Return the same interval on the axis of `unit`; for `dur` this one."""
        return self if unit is TimeUnit.DURATION else self.on(self.horizon.axis(unit))

    def on(self, axis: Axis) -> Scope:
        """Return the same interval on another axis."""
        return replace(self, axis=axis)

    def place(self, mark: Mark) -> Fraction:
        """Return the tick of the scope's counter at which `mark` is.

        Raises:
            ConversionError: a fact is missing.
        """
        if mark.axis.read is self.axis.read:
            return mark.tick
        if mark.tick <= 0:
            return Fraction(0)  # zero is zero in every unit, even if facts are missing
        amount, unit = mark.tick / mark.axis.scale, mark.axis.unit
        try:
            return self.horizon.ticks_of(amount, unit, self.axis)
        except ConversionError as error:
            said, other = error.message, self.axis.unit
            if TimeUnit.SECOND not in (unit, other):
                raise
            instead = f"write the wall-clock time in '{unit}', too"
            if unit is TimeUnit.SECOND:  # a product has a clock for each factor
                factors = f"Linear(0, 1, over='{rounded(amount, unit)}') * Cosine()"
                instead = f"write it in '{other}', or a product such as {factors}"
                instead += ", which is a list in a run file"
            raise ConversionError.cannot(said.what, why=said.why, instead=instead) from None

    def covers(self, mark: Mark) -> bool:
        """Return whether `mark` is before the end of the scope."""
        end = self.on(mark.axis).end
        return end is None or mark.tick < end

    def is_over(self, mark: Mark) -> bool:
        """Return whether `mark` is after the end of the scope."""
        last = self.last
        if self.horizon.lengths is not None and last.axis.unit is not TimeUnit.SECOND:
            # To count all batches of unequal samples takes a look at each of them.
            return self.on(last.axis).place(mark) > last.tick
        end = self.on(mark.axis).end
        return end is not None and mark.tick > end

    def smooth(self) -> Scope:
        """Return this scope for a curve that changes with every batch.

        Raises:
            ConversionError: it counts epochs, whose number of samples is not known.
        """
        self.horizon.check_moves(self.axis)
        return self

    def passed(self, timestamp: Timestamp, unit: TimeUnit) -> Time:
        """Return the time since the start of the scope in `unit`; for `dur`, as a fraction of it.

        Batches, samples and tokens are those that have passed whole.

        Raises:
            ConversionError: the start of the scope, or its end for `dur`, is unknown in `unit`.
        """
        own = self.along(unit)
        ticks = max(Fraction(0), own.axis.read(timestamp) - own.start)
        if unit is not TimeUnit.DURATION:
            passed = ticks / own.axis.scale
            return Time(math.floor(passed) if unit in WHOLE else passed, unit)
        length = own.place(own.last) - own.start
        return Time(min(Fraction(1), ticks / length) if length else 1, unit)

    def show(self, position: Fraction) -> str:
        """Return a position or length on this axis as text for a message."""
        return str(rounded(position / self.axis.scale, self.axis.unit))


def counted(marks: Sequence[Mark]) -> Callable[[Timestamp], int]:
    """Return a function that counts how many of `marks`, which are in order, have been reached."""
    edges = [(mark.axis.read, mark.first_tick) for mark in marks]

    def count(timestamp: Timestamp) -> int:
        return bisect_left(edges, x=True, key=lambda edge: edge[0](timestamp) < edge[1])

    return count


def over_common_denominator(*positions: Fraction) -> tuple[int, ...]:
    """Return a common denominator, then the positions as integers over it.

    Integers compare and subtract exactly and fast. So a bound schedule reads its counter,
    multiplies by the denominator, and computes in integers until it returns a float.

    >>> over_common_denominator(Fraction(9, 2), Fraction(1, 3))
    (6, 27, 2)
    """
    denominator = math.lcm(*(position.denominator for position in positions))
    return denominator, *(int(position * denominator) for position in positions)
