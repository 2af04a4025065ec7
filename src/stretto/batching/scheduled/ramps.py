"""Ramps: sizes that grow from a start to an end over a stretch of the run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final, get_args

from stretto.batching import policy
from stretto.batching.policy import (
    BatchSizePolicy,
    BoundPolicy,
    Size,
    checked_size,
    checked_world_size,
)
from stretto.batching.scheduled.bound_ramps import Equal, bound_line, bound_stairs
from stretto.batching.scheduled.fixed import Fixed
from stretto.batching.written import RAMPS, written
from stretto.errors import Argument, BatchSizeError, shown
from stretto.schedules.fields import Interval, check_fields, fill, one_of
from stretto.timing import Horizon, Time, TimeLike

CHECKS = policy.CHECKS | {"Equal": partial(one_of, choices=get_args(Equal), error=BatchSizeError)}


@dataclass(frozen=True, slots=True, repr=False)
class _Ramp(BatchSizePolicy):
    """A ramp from `start` to `end`."""

    start: Size
    end: Size
    over: Interval
    equal: Equal = field(default="time", kw_only=True)
    checks = CHECKS

    def __post_init__(self) -> None:
        check_fields(self)
        if self.end < self.start:
            steps = f"0ep:{self.start} 1ep:{self.end}"
            raise BatchSizeError.cannot(
                f"ramp the batch size from {self.start} to {self.end}",
                why="a ramp does not shrink",
                instead=(
                    "write ",
                    Argument("start", self.end),
                    ", ",
                    Argument("end", self.start),
                    ", or ",
                    Argument("steps", f"'{steps}'", python=f"Steps('{steps}')"),
                ),
            )

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return a line if the ramp has no stages."""
        del horizon, largest
        if self.start < self.end:
            return ()
        end = f"it starts at its end, {self.end:,} samples"
        return (f"the batch size ramp has no stages left: {end}",)


@written(RAMPS, "linear")
@final
@dataclass(frozen=True, slots=True, repr=False)
class LinearRamp(_Ramp):
    """Grows in equal increments, each held equally long: `start` at 0, `end` from `over` on.

    At time t the size is `start + increment * floor(k * t / over)`, k increments in all. With an
    increment of 1 it is a straight line; a larger one is what `--rampup-batch-size <start>
    <increment> <samples>` did in Megatron, which ignores it since Megatron-LM pull request 4411.

    With `equal="batches"` each size is held for equally many batches, so size `b` for a part of
    `over` that is proportional to `b`: with an increment of 1, ModernBERT's
    `BatchSizeWarmupScheduler`.

    >>> LinearRamp(32, 256, "10%", increment=32)
    LinearRamp(32, 256, '0.1dur', increment=32)

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

    increment: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        _Ramp.__post_init__(self)
        increment = checked_size(self.increment, "the increment of a ramp")
        if rest := (self.end - self.start) % increment:
            raise BatchSizeError.cannot(
                f"ramp from {self.start} to {self.end} in increments of {increment}",
                why=f"they differ by {self.end - self.start}",
                instead=f"write an end such as {self.end - rest} or {self.end - rest + increment}",
            )
        fill(self, increment=increment)

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Resolve the length of the ramp for one run."""
        count = (self.end - self.start) // self.increment
        if count == 0:
            return Fixed(self.start).bind(horizon)
        over = Time(self.over)
        return bound_line(horizon, self.start, self.increment, count, over=over, equal=self.equal)


@written(RAMPS, "double")
@final
@dataclass(frozen=True, slots=True, repr=False)
class DoublingRamp(_Ramp):
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

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in order, the last of them the end."""
        sizes = [self.start]
        while sizes[-1] < self.end:
            sizes.append(min(2 * sizes[-1], self.end))
        return tuple(sizes)

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Resolve the length of the ramp for one run."""
        return bound_stairs(horizon, tuple(self.sizes), over=Time(self.over), equal=self.equal)


@written(RAMPS, "stages")
@final
@dataclass(frozen=True, slots=True, repr=False)
class StagedRamp(BatchSizePolicy):
    """Grows through the given sizes, each held equally long; the last one from `over` on.

    >>> StagedRamp([256, 512, 2048], "1Btok")
    StagedRamp((256, 512, 2048), '1000000000tok')

    Args:
        sizes: two or more sizes in ascending order.
        over: how long the ramp is, from the start of the run, in any unit.
        equal: what each size gets equally much of: `time`, in the unit of `over`, or `batches`.

    Raises:
        BatchSizeError: the sizes are not integers of at least 1 in ascending order, the ramp has
            no length, or `equal` is neither.
    """

    sizes: Sequence[int]
    over: Interval
    equal: Equal = field(default="time", kw_only=True)
    checks = CHECKS

    def __post_init__(self) -> None:
        check_fields(self)
        checked = tuple(checked_size(size) for size in self.sizes)
        ascending = all(a < b for a, b in itertools.pairwise(checked))
        if len(checked) < 2 or not ascending:
            raise BatchSizeError.cannot(
                f"ramp through the sizes {shown(list(checked))}",
                why="they are not in ascending order" if checked[1:] else "they are too few",
                instead="write two or more in ascending order such as [256, 512, 2048]; "
                "sizes that shrink are written as Steps",
            )
        fill(self, sizes=checked)

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Resolve the length of the ramp for one run."""
        return bound_stairs(horizon, tuple(self.sizes), over=Time(self.over), equal=self.equal)


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
