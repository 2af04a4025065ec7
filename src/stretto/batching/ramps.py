"""Ramps: sizes that grow from a start to an end over a stretch of the run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import final

from stretto.batching.fixed import Fixed
from stretto.batching.policy import (
    BatchSizePolicy,
    BoundPolicy,
    Hold,
    TimedPolicy,
    checked_size,
    checked_world_size,
    stretched,
)
from stretto.batching.staircase import BoundAlignedStairs, BoundStairs, line
from stretto.errors import BatchSizeError, cannot, shown
from stretto.timing import Axis, Horizon, Time, TimeLike, Timestamp, TimeUnit
from stretto.timing.time import Number


@final
@dataclass(frozen=True, slots=True, init=False)
class LinearRamp(BatchSizePolicy):
    """Grows in equal increments, each held equally long: `start` at 0, `end` from `over` on.

    At time t the size is `start + increment * floor(k * t / over)`, k increments in all. With an
    increment of 1 it is a straight line; a larger one is what Megatron's `--rampup-batch-size
    <start> <increment> <samples>` does.

    >>> LinearRamp(32, 256, "10%", increment=32)
    LinearRamp(start=32, end=256, over=Time('0.1dur'), increment=32)

    Args:
        start: the size of the first batch.
        end: the size from `over` on, at least `start`.
        over: how long the ramp is, from the start of the run, in any unit.
        increment: by how much the size grows at once.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, the end is below the start or not
            a whole number of increments above it, or the ramp has no length.
    """

    start: int
    end: int
    over: Time
    increment: int

    def __init__(self, start: int, end: int, over: TimeLike, *, increment: int = 1) -> None:
        fields = {
            "start": checked_size(start),
            "end": checked_size(end),
            "over": _length(Time(over)),
            "increment": checked_size(increment, "the increment of a ramp"),
        }
        _rising(start, end)
        if (end - start) % increment:
            nearest = end - (end - start) % increment
            raise BatchSizeError(
                cannot(
                    f"ramp from {start} to {end} in increments of {increment}",
                    why=f"they differ by {end - start}",
                    instead=f"write an end such as {nearest} or {nearest + increment}",
                )
            )
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Resolve the length of the ramp for one run."""
        count = (self.end - self.start) // self.increment
        if count == 0:
            return Fixed(self.start).bind(horizon)
        axis, ticks = _ticks(horizon, self.over, count)
        above, below = ticks.numerator, ticks.denominator
        return BoundLine(axis, self.start, self.increment, count, above, below)

    def scaled(self, ratio: Number) -> LinearRamp:
        """Return the ramp with its length stretched."""
        over = stretched(self.over, ratio)
        return LinearRamp(self.start, self.end, over, increment=self.increment)

    def times(self) -> tuple[Time, ...]:
        """Return the length of the ramp."""
        return (self.over,)


@final
@dataclass(frozen=True, slots=True, init=False)
class DoublingRamp(BatchSizePolicy):
    """Doubles from `start` up to `end`, each size held equally long; `end` from `over` on.

    From 8 to 64 there are three doublings, so 8, 16 and 32 are held for a third of `over` each.
    Where the end is not a doubling of the start, the last step is smaller: 8, 16, 32, 48.

    >>> DoublingRamp(8, 64, "40%").sizes
    (8, 16, 32, 64)

    Args:
        start: the size of the first batch.
        end: the size from `over` on, at least `start`.
        over: how long the ramp is, from the start of the run, in any unit.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, the end is below the start, or the
            ramp has no length.
    """

    start: int
    end: int
    over: Time

    def __init__(self, start: int, end: int, over: TimeLike) -> None:
        object.__setattr__(self, "start", checked_size(start))
        object.__setattr__(self, "end", checked_size(end))
        object.__setattr__(self, "over", _length(Time(over)))
        _rising(start, end)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in order, the last of them the end."""
        sizes = [self.start]
        while sizes[-1] < self.end:
            sizes.append(min(2 * sizes[-1], self.end))
        return tuple(sizes)

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Resolve the length of the ramp for one run."""
        return _stairs(horizon, self.sizes, self.over)

    def scaled(self, ratio: Number) -> DoublingRamp:
        """Return the ramp with its length stretched."""
        return DoublingRamp(self.start, self.end, stretched(self.over, ratio))

    def times(self) -> tuple[Time, ...]:
        """Return the length of the ramp."""
        return (self.over,)


@final
@dataclass(frozen=True, slots=True, init=False)
class StagedRamp(BatchSizePolicy):
    """Grows through the given sizes, each held equally long; the last one from `over` on.

    >>> StagedRamp([256, 512, 2048], "1Btok")
    StagedRamp(sizes=(256, 512, 2048), over=Time('1000000000tok'))

    Args:
        sizes: two or more sizes in ascending order.
        over: how long the ramp is, from the start of the run, in any unit.

    Raises:
        BatchSizeError: the sizes are not integers of at least 1 in ascending order, or the ramp
            has no length.
    """

    sizes: tuple[int, ...]
    over: Time

    def __init__(self, sizes: Sequence[int], over: TimeLike) -> None:
        checked = tuple(checked_size(size) for size in sizes)
        ascending = all(a < b for a, b in itertools.pairwise(checked))
        if len(checked) < 2 or not ascending:
            raise BatchSizeError(
                cannot(
                    f"ramp through the sizes {shown(list(sizes))}",
                    why="they are not in ascending order" if checked[1:] else "they are too few",
                    instead="write two or more in ascending order such as [256, 512, 2048]; "
                    "sizes that shrink are written as Steps",
                )
            )
        object.__setattr__(self, "sizes", checked)
        object.__setattr__(self, "over", _length(Time(over)))

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Resolve the length of the ramp for one run."""
        return _stairs(horizon, self.sizes, self.over)

    def scaled(self, ratio: Number) -> StagedRamp:
        """Return the ramp with its length stretched."""
        return StagedRamp(self.sizes, stretched(self.over, ratio))

    def times(self) -> tuple[Time, ...]:
        """Return the length of the ramp."""
        return (self.over,)


def rampup(
    final: int,
    over: TimeLike,
    *,
    world_size: int,
    micro_batch_size: int,
    initial_global_train_batch_size: int | None = None,
) -> BatchSizePolicy:
    """Return the ramp that only drops gradient accumulation, so that the hardware is used evenly.

    Every size is a multiple of `world_size * micro_batch_size`: all ranks always run full
    micro-batches and the ramp is a number of accumulation steps that doubles.

    >>> rampup(4096, "10%", world_size=8, micro_batch_size=128).sizes
    (1024, 2048, 4096)

    Args:
        final: the size from `over` on.
        over: how long the ramp is, from the start of the run, in any unit.
        world_size: how many ranks there are.
        micro_batch_size: samples in one forward and backward pass of a rank.
        initial_global_train_batch_size: the size to start from; left out, the lowest possible
            one, `world_size * micro_batch_size`.

    Raises:
        BatchSizeError: a size is not a multiple of `world_size * micro_batch_size`, or the final
            size is below the initial one.
    """
    unit = checked_world_size(world_size) * checked_size(micro_batch_size, "a micro-batch size")
    initial = unit if initial_global_train_batch_size is None else initial_global_train_batch_size
    for name, size in (("the initial", initial), ("the final", final)):
        if checked_size(size) % unit:
            lower = max(unit, size - size % unit)
            raise BatchSizeError(
                cannot(
                    f"use {size} as {name} batch size",
                    why=f"it is not a multiple of world_size * micro_batch_size = {unit}",
                    instead=f"write a multiple such as {lower} or {lower + unit}",
                )
            )
    return DoublingRamp(initial, final, over)


@final
@dataclass(frozen=True, slots=True)
class BoundLine(TimedPolicy):
    """A linear ramp on one counter: `count` increments over `above / below` ticks."""

    axis: Axis
    start_size: int
    increment: int
    count: int
    above: int
    below: int

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
        return Hold(((self.axis, -(-self.above * (level + 1) // (self.below * self.count))),))

    def _level(self, timestamp: Timestamp) -> int:
        passed = self.count * self.axis.read(timestamp) * self.below
        return min(self.count, passed // self.above)


def _stairs(horizon: Horizon, sizes: tuple[int, ...], over: Time) -> BoundPolicy:
    count = len(sizes) - 1
    if count == 0:
        return BoundStairs((), sizes)
    axis, ticks = _ticks(horizon, over, count)
    edges = tuple(math.ceil(ticks * number / count) for number in range(1, count + 1))
    return BoundAlignedStairs(axis, edges, sizes)


def _ticks(horizon: Horizon, over: Time, count: int) -> tuple[Axis, Fraction]:
    """The counter that a ramp of `count` equal parts is read on, and how long the ramp is."""
    axis = line(horizon, horizon.axis(over.unit))
    ticks = horizon.ticks(over, axis)
    if axis.unit is TimeUnit.EPOCH and (ticks / count).denominator != 1:
        # Refused there, with the missing fact: a part of an epoch of unknown length.
        horizon.ticks(Time(ticks / count, TimeUnit.EPOCH), axis)
    return axis, ticks


def _length(over: Time) -> Time:
    if over.amount <= 0:
        raise BatchSizeError(
            cannot(
                f"ramp the batch size over '{over}'",
                why="it is not longer than 0",
                instead="write a length such as '10%', or Fixed(size) for no ramp",
            )
        )
    return over


def _rising(start: int, end: int) -> None:
    if end < start:
        raise BatchSizeError(
            cannot(
                f"ramp the batch size from {start} to {end}",
                why="a ramp does not shrink",
                instead=f"write start={end}, end={start}, or Steps('0ep:{start} 1ep:{end}')",
            )
        )
