"""Ramps: sizes that grow from a start to an end over a stretch of the run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from stretto.batching.policy import (
    BatchSizePolicy,
    BoundPolicy,
    checked_size,
    checked_world_size,
    stretched,
)
from stretto.batching.scheduled.bound_ramps import Equal, bound_line, bound_stairs
from stretto.batching.scheduled.fixed import Fixed
from stretto.batching.written import RAMPS, written
from stretto.errors import Argument, BatchSizeError, shown
from stretto.timing import Horizon, Time, TimeLike
from stretto.timing.time import Number


@written(RAMPS, "linear")
@final
@dataclass(frozen=True, slots=True, init=False)
class LinearRamp(BatchSizePolicy):
    """Grows in equal increments, each held equally long: `start` at 0, `end` from `over` on.

    At time t the size is `start + increment * floor(k * t / over)`, k increments in all. With an
    increment of 1 it is a straight line; a larger one is what `--rampup-batch-size <start>
    <increment> <samples>` did in Megatron, which ignores it since Megatron-LM pull request 4411.

    With `equal="batches"` each size is held for equally many batches, so size `b` for a part of
    `over` that is proportional to `b`: with an increment of 1, ModernBERT's
    `BatchSizeWarmupScheduler`.

    >>> LinearRamp(32, 256, "10%", increment=32)
    LinearRamp(start=32, end=256, over=Time('0.1dur'), increment=32)

    Args:
        start: the size of the first batch.
        end: the size from `over` on, at least `start`.
        over: how long the ramp is, from the start of the run, in any unit.
        increment: by how much the size grows at once.
        equal: what each size gets equally much of: `time`, in the unit of `over`, or `batches`.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, the end is below the start or not
            a whole number of increments above it, the ramp has no length, or `equal` is neither.
    """

    start: int
    end: int
    over: Time
    increment: int
    equal: Equal

    def __init__(
        self, start: int, end: int, over: TimeLike, *, increment: int = 1, equal: Equal = "time"
    ) -> None:
        fields = {
            "equal": _checked_equal(equal),
            "start": checked_size(start),
            "end": checked_size(end),
            "over": _length(Time(over)),
            "increment": checked_size(increment, "the increment of a ramp"),
        }
        _rising(start, end)
        if (end - start) % increment:
            nearest = end - (end - start) % increment
            raise BatchSizeError.cannot(
                f"ramp from {start} to {end} in increments of {increment}",
                why=f"they differ by {end - start}",
                instead=f"write an end such as {nearest} or {nearest + increment}",
            )
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Resolve the length of the ramp for one run."""
        count = (self.end - self.start) // self.increment
        if count == 0:
            return Fixed(self.start).bind(horizon)
        return bound_line(
            horizon, self.start, self.increment, count, over=self.over, equal=self.equal
        )

    def scaled(self, ratio: Number) -> LinearRamp:
        """Return the ramp with its length stretched."""
        over = stretched(self.over, ratio)
        return LinearRamp(self.start, self.end, over, increment=self.increment, equal=self.equal)

    def times(self) -> tuple[Time, ...]:
        """Return the length of the ramp."""
        return (self.over,)

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return a line if the ramp has no stages."""
        del horizon, largest
        return _no_stages(self.start, self.end)

    def __repr__(self) -> str:
        return _shown(self)


@written(RAMPS, "double")
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
        equal: what each size gets equally much of: `time`, in the unit of `over`, or `batches`.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, the end is below the start, the
            ramp has no length, or `equal` is neither.
    """

    start: int
    end: int
    over: Time
    equal: Equal

    def __init__(self, start: int, end: int, over: TimeLike, *, equal: Equal = "time") -> None:
        object.__setattr__(self, "equal", _checked_equal(equal))
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
        return bound_stairs(horizon, self.sizes, over=self.over, equal=self.equal)

    def scaled(self, ratio: Number) -> DoublingRamp:
        """Return the ramp with its length stretched."""
        return DoublingRamp(self.start, self.end, stretched(self.over, ratio), equal=self.equal)

    def times(self) -> tuple[Time, ...]:
        """Return the length of the ramp."""
        return (self.over,)

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return a line if the ramp has no stages."""
        del horizon, largest
        return _no_stages(self.start, self.end)

    def __repr__(self) -> str:
        return _shown(self)


@written(RAMPS, "stages")
@final
@dataclass(frozen=True, slots=True, init=False)
class StagedRamp(BatchSizePolicy):
    """Grows through the given sizes, each held equally long; the last one from `over` on.

    >>> StagedRamp([256, 512, 2048], "1Btok")
    StagedRamp(sizes=(256, 512, 2048), over=Time('1000000000tok'))

    Args:
        sizes: two or more sizes in ascending order.
        over: how long the ramp is, from the start of the run, in any unit.
        equal: what each size gets equally much of: `time`, in the unit of `over`, or `batches`.

    Raises:
        BatchSizeError: the sizes are not integers of at least 1 in ascending order, the ramp has
            no length, or `equal` is neither.
    """

    sizes: tuple[int, ...]
    over: Time
    equal: Equal

    def __init__(self, sizes: Sequence[int], over: TimeLike, *, equal: Equal = "time") -> None:
        object.__setattr__(self, "equal", _checked_equal(equal))
        checked = tuple(checked_size(size) for size in sizes)
        ascending = all(a < b for a, b in itertools.pairwise(checked))
        if len(checked) < 2 or not ascending:
            raise BatchSizeError.cannot(
                f"ramp through the sizes {shown(list(sizes))}",
                why="they are not in ascending order" if checked[1:] else "they are too few",
                instead="write two or more in ascending order such as [256, 512, 2048]; "
                "sizes that shrink are written as Steps",
            )
        object.__setattr__(self, "sizes", checked)
        object.__setattr__(self, "over", _length(Time(over)))

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Resolve the length of the ramp for one run."""
        return bound_stairs(horizon, self.sizes, over=self.over, equal=self.equal)

    def scaled(self, ratio: Number) -> StagedRamp:
        """Return the ramp with its length stretched."""
        return StagedRamp(self.sizes, stretched(self.over, ratio), equal=self.equal)

    def times(self) -> tuple[Time, ...]:
        """Return the length of the ramp."""
        return (self.over,)

    def __repr__(self) -> str:
        return _shown(self)


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
            raise BatchSizeError.cannot(
                f"use {size} as {name} batch size",
                why=f"it is not a multiple of world_size * micro_batch_size = {unit}",
                instead=f"write a multiple such as {lower} or {lower + unit}",
            )
    return DoublingRamp(initial, final, over)


def _checked_equal(equal: object) -> str:
    if equal not in ("time", "batches"):
        raise BatchSizeError.cannot(
            f"use {shown(equal)} as the 'equal' of a ramp",
            why="there is no such choice",
            instead=("write ", Argument("equal", "time"), " or ", Argument("equal", "batches")),
        )
    return str(equal)


def _shown(ramp: LinearRamp | DoublingRamp | StagedRamp) -> str:
    """A ramp as it is written; `equal` only where it is not what it is by default."""
    values = {field.name: getattr(ramp, field.name) for field in dataclasses.fields(ramp)}
    if ramp.equal == "time":
        del values["equal"]
    return f"{type(ramp).__name__}({', '.join(f'{name}={values[name]!r}' for name in values)})"


def _no_stages(start: int, end: int) -> tuple[str, ...]:
    if start < end:
        return ()
    return (f"the batch size ramp has no stages left: it starts at its end, {end:,} samples",)


def _length(over: Time) -> Time:
    if over.amount <= 0:
        raise BatchSizeError.cannot(
            f"ramp the batch size over '{over}'",
            why="it is not longer than 0",
            instead="write a length such as '10%', or Fixed(size) for no ramp",
        )
    return over


def _rising(start: int, end: int) -> None:
    steps = f"0ep:{start} 1ep:{end}"
    if end < start:
        raise BatchSizeError.cannot(
            f"ramp the batch size from {start} to {end}",
            why="a ramp does not shrink",
            instead=(
                "write ",
                Argument("start", end),
                ", ",
                Argument("end", start),
                ", or ",
                Argument("steps", f"'{steps}'", python=f"Steps('{steps}')"),
            ),
        )
