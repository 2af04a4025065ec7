"""A bound policy of steps: a size from each of some ticks on."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from stretto.batching.policy import BoundPolicy, Hold, TimedPolicy
from stretto.errors import BatchSizeError, ConversionError
from stretto.timing import Axis, Horizon, Time, Timestamp, TimeUnit
from stretto.timing.epochs import equal_batches, next_epoch, outgrows_epoch


@final
@dataclass(frozen=True, slots=True)
class BoundStairs(TimedPolicy):
    """The size of the last step that has been reached, each step on a counter of its own.

    There is one size more than there are edges: `sizes[0]` holds from the start of the run.
    """

    edges: tuple[tuple[Axis, int], ...]
    sizes: tuple[int, ...]

    @classmethod
    def on(
        cls, horizon: Horizon, times: Sequence[Time], sizes: tuple[int, ...], *, what: str
    ) -> BoundPolicy:
        """Return the steps that begin at `times`, checked to be in order on this run."""
        marks = [place(horizon, time) for time in times]
        for number in range(1, len(marks)):
            if not _in_order(horizon, times, marks, sizes, number):
                before, after = times[number - 1], times[number]
                raise BatchSizeError.cannot(
                    f"follow {what}",
                    why=f"on this run '{after}' does not come after '{before}'",
                    instead="write times that come in ascending order, or all in one unit",
                )
        axes = {id(axis) for axis, _ in marks}
        if len(axes) == 1:
            return BoundAlignedStairs(marks[0][0], tuple(tick for _, tick in marks), sizes)
        return cls(tuple(marks), sizes)

    @property
    def units(self) -> frozenset[TimeUnit]:
        """The units of the edges."""
        return frozenset(axis.unit for axis, _ in self.edges)

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest of the sizes."""
        return min(self.sizes), max(self.sizes)

    def size_at(self, timestamp: Timestamp) -> int:
        """Return the size of the last step that has been reached."""
        return self.sizes[self._reached(timestamp)]

    def holds_until(self, timestamp: Timestamp, state: object) -> Hold:
        """Return a hold until any later step is reached."""
        del state
        return Hold(self.edges[self._reached(timestamp) :])

    def _reached(self, timestamp: Timestamp) -> int:
        for number in range(len(self.edges), 0, -1):
            axis, tick = self.edges[number - 1]
            if axis.read(timestamp) >= tick:
                return number
        return 0


@final
@dataclass(frozen=True, slots=True)
class BoundAlignedStairs(TimedPolicy):
    """Steps that are all on one counter, found by bisection."""

    axis: Axis
    ticks: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def units(self) -> frozenset[TimeUnit]:
        """The unit of the counter."""
        return frozenset({self.axis.unit})

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest of the sizes."""
        return min(self.sizes), max(self.sizes)

    def size_at(self, timestamp: Timestamp) -> int:
        """Return the size of the last step that has been reached."""
        return self.sizes[bisect_right(self.ticks, self.axis.read(timestamp))]

    def holds_until(self, timestamp: Timestamp, state: object) -> Hold:
        """Return a hold until the next step."""
        del state
        reached = bisect_right(self.ticks, self.axis.read(timestamp))
        if reached == len(self.ticks):
            return Hold()
        return Hold(((self.axis, self.ticks[reached]),))


def place(horizon: Horizon, time: Time) -> tuple[Axis, int]:
    """Return the counter that `time` is read on, and the first tick at which it is reached.

    What is a number of samples is put on the counter of samples, so that epochs, samples and
    tokens of a known number per sample are compared exactly.
    """
    axis = line(horizon, horizon.axis(time.unit))
    return axis, math.ceil(horizon.ticks(time, axis))


def line(horizon: Horizon, axis: Axis) -> Axis:
    """Return the counter of samples where `axis` counts nothing else, else `axis`."""
    samples = horizon.axis(TimeUnit.SAMPLE)
    if axis.unit is TimeUnit.EPOCH and horizon.dataset_num_samples is not None:
        return samples
    if axis.unit is TimeUnit.TOKEN and horizon.tokens_per_sample is not None:
        return samples
    return axis


def _in_order(
    horizon: Horizon,
    times: Sequence[Time],
    marks: Sequence[tuple[Axis, int]],
    sizes: tuple[int, ...],
    number: int,
) -> bool:
    """Whether step `number` is reached after the one before it, as far as this can be known."""
    (axis_before, before), (axis, tick) = marks[number - 1], marks[number]
    if axis is axis_before:
        return before < tick
    if TimeUnit.BATCH in (axis.unit, axis_before.unit):
        # Where batches meet samples, the sizes up to here say which comes first.
        now = Timestamp()
        for (edge, at), size in zip(marks[:number], sizes, strict=False):
            if outgrows_epoch(horizon, now, size):
                now = next_epoch(horizon, now)
            batches = equal_batches(horizon, now, size)
            count = batches.count_until(edge, at)
            if count is None or outgrows_epoch(horizon, now, size):
                return True
            now = batches.timestamp(count)
        return axis.read(now) < tick
    try:
        shared = horizon.common_axis([times[number - 1], times[number]])
        return horizon.ticks(times[number - 1], shared) < horizon.ticks(times[number], shared)
    except ConversionError:
        return True
