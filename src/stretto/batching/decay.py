"""How far a schedule has decayed, as a function of one counter of the clock.

Pairs such as `Seesaw` need two things: the factor by which a schedule has fallen since its peak,
and when it will have fallen further. Both are read from the bound schedule, so any decaying
schedule will do, including periods, products and your own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import final

from stretto.batching.steps import sample_axis
from stretto.errors import BatchSizeError, ConversionError
from stretto.schedules import BoundSchedule, Schedule, Scope
from stretto.timing import Axis, Horizon, Timestamp, TimeUnit
from stretto.timing.grammar import NAMES

_GRID = 1_021
"""Intervals of the run at whose ends a schedule is read, to check that it falls after its peak.
A prime: places that divide a number of restarts would all be alike."""
_NOISE = 1e-9
"""A smaller relative rise is rounding."""
_FARTHEST = 2**62
"""More ticks than any run has."""


@final
@dataclass(frozen=True, slots=True)
class Decay:
    """A schedule on one run that may rise to a peak and then only falls."""

    axis: Axis
    """The one counter that it follows."""
    value: BoundSchedule
    peak: int
    """The tick of its largest value."""
    top: float
    """Its largest value."""
    end: int | None
    """The tick at which the run ends; None if only the run can tell."""
    _at: Callable[[int], Timestamp]

    @classmethod
    def on(cls, horizon: Horizon, schedule: Schedule) -> Decay:
        """Return the decay of `schedule` on the run of `horizon`.

        Raises:
            BatchSizeError: it follows batches or the wall clock or several counters, does not
                fall on this run, or rises again after it has fallen.
            ConversionError: a time needs a fact that is not known.
        """
        axis = _axis(horizon, schedule)
        value, at = schedule.bind(horizon), _timestamps(horizon, axis)
        end = _end(horizon, axis)
        reach = _reach(horizon, schedule, axis, end)
        even = {reach * number // _GRID for number in range(_GRID + 1)}
        grid = sorted(even.union(_edges(horizon, schedule, axis, reach)))
        _check_counters(horizon, schedule, value, [at(tick) for tick in grid], axis)
        values = [value(at(tick)) for tick in grid]
        highest = max(range(len(grid)), key=values.__getitem__)
        decay = cls(axis, value, grid[highest], values[highest], end, at)
        _check_falls(schedule, values[highest:])
        return decay

    @property
    def last(self) -> float | None:
        """The value at the last tick of the run; None if only the run can tell."""
        return None if self.end is None else self.value(self._at(max(self.end - 1, 0)))

    def is_before_peak(self, timestamp: Timestamp) -> bool:
        """Return whether it still rises, or is at its peak."""
        return self.axis.read(timestamp) <= self.peak

    def cut_at(self, timestamp: Timestamp) -> float:
        """Return the value as a fraction of the peak: 1 before the peak, never above 1."""
        if self.is_before_peak(timestamp):
            return 1.0
        return min(self.value(timestamp) / self.top, 1.0)

    def next_change(self, timestamp: Timestamp, is_over: Callable[[float], bool]) -> int | None:
        """Return the first tick after `timestamp` at which `is_over(cut)` holds; None for never.

        `is_over` must hold for every smaller cut, too.
        """
        now = self.axis.read(timestamp)
        limit = now + _FARTHEST if self.end is None else self.end
        step, before = 1, now
        while True:
            after = min(now + step, limit)
            if after <= before:
                return None
            if is_over(self.cut_at(self._at(after))):
                return _first(lambda tick: is_over(self.cut_at(self._at(tick))), before, after)
            before, step = after, 2 * step


def _axis(horizon: Horizon, schedule: Schedule) -> Axis:
    """Return the one counter of all times of a schedule; by default, the counter of the run."""
    axes: dict[Axis, TimeUnit] = {}
    for unit in [time.unit for time in schedule.times()] or [TimeUnit.DURATION]:
        axis = sample_axis(horizon, horizon.axis(unit))
        if axis.unit in (TimeUnit.BATCH, TimeUnit.SECOND):
            raise cannot_grow(schedule, f"it follows {NAMES[axis.unit]}", _UNITS)
        axes.setdefault(axis, unit)
    if len(axes) > 1:
        units = " and ".join(f"'{axis.unit}'" for axis in axes)
        raise cannot_grow(schedule, f"it mixes {units}", "write all its times in one unit")
    return next(iter(axes))


_UNITS = "write its times in 'ep', 'sp', 'tok' or 'dur', and max_duration in one of the first three"


def _timestamps(horizon: Horizon, axis: Axis) -> Callable[[int], Timestamp]:
    """Return a function from a tick to the timestamp, with the counters that follow from it."""
    num_samples, each = horizon.dataset_num_samples, horizon.tokens_per_sample or 0
    if axis.unit is TimeUnit.TOKEN:
        return lambda tick: Timestamp(token=tick)
    if axis.unit is TimeUnit.EPOCH:
        return lambda tick: Timestamp(epoch=tick)

    def at(tick: int) -> Timestamp:
        epoch, within = divmod(tick, num_samples) if num_samples else (0, 0)
        return Timestamp(
            epoch=epoch,
            sample=tick,
            token=tick * each,
            sample_in_epoch=within,
            token_in_epoch=within * each,
        )

    return at


def _end(horizon: Horizon, axis: Axis) -> int | None:
    try:
        end = horizon.ticks(horizon.max_duration, axis)
    except ConversionError:
        return None
    return -(-end.numerator // end.denominator)


def _reach(horizon: Horizon, schedule: Schedule, axis: Axis, end: int | None) -> int:
    """Return the last tick that is read: the end, or the sum of all times of the schedule."""
    if end is not None:
        return max(end - 1, 1)
    lengths = [horizon.ticks(time, axis) for time in schedule.times()]
    return int(sum(lengths, Fraction(1)))


def _edges(horizon: Horizon, schedule: Schedule, axis: Axis, reach: int) -> Iterator[int]:
    """Yield the ticks around each place where the formula changes: a peak is at one of them."""
    for mark in schedule.borders(Scope.of(horizon)):
        tick = int(horizon.ticks_of(mark.tick / mark.axis.scale, mark.axis.unit, axis))
        yield from (near for near in (tick - 1, tick, tick + 1) if 0 <= near <= reach)


def _check_counters(
    horizon: Horizon,
    schedule: Schedule,
    value: BoundSchedule,
    timestamps: list[Timestamp],
    axis: Axis,
) -> None:
    """Refuse a schedule that depends on other counters than `axis`."""
    known = {"sample"}
    if horizon.dataset_num_samples is not None:
        known |= {"epoch", "sample_in_epoch"}
    if horizon.tokens_per_sample is not None:
        known |= {"token"} | ({"token_in_epoch"} if "epoch" in known else set())
    known = {TimeUnit.TOKEN: {"token"}, TimeUnit.EPOCH: {"epoch"}}.get(axis.unit, known)
    others = [name for name in Timestamp._fields if name not in known]
    for number, timestamp in enumerate(timestamps):
        moved = timestamp._replace(**dict.fromkeys(others, 7**15 * number + 1))
        if value(moved) != value(timestamp):
            raise cannot_grow(schedule, f"it reads other counters than '{axis.unit}'", _UNITS)


def _check_falls(schedule: Schedule, values: list[float]) -> None:
    if any(after > before * (1 + _NOISE) for before, after in pairwise(values)):
        raise cannot_grow(schedule, "it rises again after it has fallen", "write Cosine()")
    if values[-1] >= values[0]:
        raise cannot_grow(schedule, "it does not fall on this run", "write Cosine()")


def _first(holds: Callable[[int], bool], before: int, after: int) -> int:
    """Return the first tick in (before, after] at which a condition holds; it holds at `after`."""
    while after - before > 1:
        middle = (before + after) // 2
        if holds(middle):
            after = middle
        else:
            before = middle
    return after


def cannot_grow(schedule: object, why: str, instead: str) -> BatchSizeError:
    """Return the error for a schedule whose decay a batch size cannot replace."""
    what = f"grow the batch with the decay of '{schedule}'"
    return BatchSizeError.cannot(what, why=why, instead=instead)
