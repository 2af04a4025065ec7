"""Ramps on one run: where each of their sizes begins."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias, final

from stretto.batching.policy import BoundPolicy, Hold, TimedPolicy
from stretto.batching.scheduled.staircase import BoundAlignedStairs, BoundStairs, line
from stretto.errors import BatchSizeError
from stretto.timing import Axis, Horizon, Time, Timestamp, TimeUnit

Equal: TypeAlias = Literal["time", "batches"]
"""What the sizes of a ramp get equally much of."""


def bound_line(
    horizon: Horizon, start: int, increment: int, count: int, *, over: Time, equal: Equal
) -> BoundPolicy:
    """Return the ramp from `start` in `count` increments, at least one."""
    axis, ticks = _ticks(horizon, over, equal)
    grows = _grows_with_size(axis, equal)
    bound = BoundLine(axis, start, increment, count, ticks.numerator, ticks.denominator, grows)
    whole = bound.parts(count)
    levels = range(1, count + 1) if grows else (1,)
    _check_epochs(horizon, axis, (ticks * bound.parts(level) / whole for level in levels))
    return bound


def bound_stairs(
    horizon: Horizon, sizes: tuple[int, ...], *, over: Time, equal: Equal
) -> BoundPolicy:
    """Return the ramp through the sizes."""
    if len(sizes) == 1:
        return BoundStairs((), sizes)
    axis, ticks = _ticks(horizon, over, equal)
    parts = sizes[:-1] if _grows_with_size(axis, equal) else (1,) * (len(sizes) - 1)
    marks = [ticks * before / sum(parts) for before in itertools.accumulate(parts)]
    _check_epochs(horizon, axis, marks)
    return BoundAlignedStairs(axis, tuple(map(math.ceil, marks)), sizes)


@final
@dataclass(frozen=True, slots=True)
class BoundLine(TimedPolicy):
    """A linear ramp on one counter: `count` increments over `above / below` ticks.

    Each size is held for an equal part of them, or if `grows`, for a part proportional to it.
    """

    axis: Axis
    start_size: int
    increment: int
    count: int
    above: int
    below: int
    grows: bool = False

    @property
    def units(self) -> frozenset[TimeUnit]:
        """The unit of the counter."""
        return frozenset({self.axis.unit})

    @property
    def bounds(self) -> tuple[int, int]:
        """The start and the end."""
        return self.start_size, self.start_size + self.increment * self.count

    def size_at(self, timestamp: Timestamp) -> int:
        """Return the size on the line, rounded down to an increment."""
        return self.start_size + self.increment * self._level(timestamp)

    def holds_until(self, timestamp: Timestamp, state: object) -> Hold:
        """Return a hold until the next increment."""
        del state
        level = self._level(timestamp)
        if level == self.count:
            return Hold()
        parts, before = self.parts(self.count), self.parts(level + 1)
        return Hold(((self.axis, -(-self.above * before // (self.below * parts))),))

    def _level(self, timestamp: Timestamp) -> int:
        """How many increments are behind: exact, without a list of them."""
        passed = self.parts(self.count) * self.axis.read(timestamp) * self.below // self.above
        if not self.grows:
            return min(self.count, passed)
        return bisect_right(range(1, self.count + 1), passed, key=self.parts)

    def parts(self, level: int) -> int:
        """Return how many parts of the ramp the sizes before a level take together."""
        if not self.grows:
            return level
        return level * self.start_size + self.increment * level * (level - 1) // 2


def _ticks(horizon: Horizon, over: Time, equal: Equal) -> tuple[Axis, Fraction]:
    """The counter that a ramp is read on, and how long the ramp is.

    Raises:
        BatchSizeError: equal batches over a wall time, of which a batch takes what it takes.
    """
    axis = line(horizon, horizon.axis(over.unit))
    if equal == "batches" and axis.unit is TimeUnit.SECOND:
        raise BatchSizeError.cannot(
            f"hold each size for equally many batches over '{over}'",
            why="how long a batch takes is not known",
            instead="write the ramp's length in 'tok', 'sp', 'ep' or 'ba', or equal='time'",
        )
    return axis, horizon.ticks(over, axis)


def _grows_with_size(axis: Axis, equal: Equal) -> bool:
    """Whether a size is held for longer the larger it is: as long as equally many batches take."""
    return equal == "batches" and axis.unit is not TimeUnit.BATCH


def _check_epochs(horizon: Horizon, axis: Axis, marks: Iterable[Fraction]) -> None:
    """Refuse a part of an epoch of unknown length, with the missing fact."""
    if axis.unit is TimeUnit.EPOCH:
        part = next((mark for mark in marks if mark.denominator != 1), None)
        if part is not None:
            horizon.ticks(Time(part, TimeUnit.EPOCH), axis)
