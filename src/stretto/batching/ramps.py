"""Batch sizes that grow over a time."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, final

from stretto.batching.policy import (
    BatchSizePolicy,
    Bound,
    Hold,
    Size,
    SizeLike,
    SizePart,
    checked_number,
    checked_size,
    checked_world_size,
    grain_of,
    has_tokens,
    in_unit_of,
    size_text,
    timed,
)
from stretto.batching.steps import Fixed, PiecewiseConstant, sample_axis
from stretto.errors import BatchSizeError
from stretto.schedules.fields import Check, Interval
from stretto.timing import Horizon, Time, TimeLike, Timestamp, TimeUnit

Sizes: TypeAlias = Annotated[
    Sequence[Size], Check(lambda value, *_: tuple(map(checked_size, value)))
]
Equal: TypeAlias = Literal["time", "batches"]
"""The quantity that is the same for all sizes of a ramp."""


def _bound_ramp(
    horizon: Horizon,
    ramp: LinearRamp | DoublingRamp | StagedRamp,
    sizes: Sequence[int],
    sum_before: Callable[[int], int],
    grain: int = 1,
) -> Bound:
    """Return the ramp through `sizes`, the last of which begins at `over`.

    `sum_before` returns the sum of the sizes before a level. Sizes are rounded down to multiples of
    `grain`, so that a hold does not end with each token that a ramp grows by. Nothing is listed
    here, since there may be millions of levels.

    Raises:
        BatchSizeError: equal batches over a wall time; how long a batch takes is not known.
        ConversionError: a level begins at a part of an epoch of unknown length.
    """
    # `len` and `bisect` of a range end at 2^63.
    count, over, equal = sizes.index(sizes[-1]), Time(ramp.over), ramp.equal
    if count == 0:
        return Fixed(sizes[0]).bind(horizon)
    axis = sample_axis(horizon, horizon.axis(over.unit))
    if equal == "batches" and axis.unit is TimeUnit.SECOND:
        why, instead = f"over '{over}', their number is not known", "write 'time', or over='10%'"
        raise BatchSizeError.bad("equal", equal, why, instead)
    ticks = horizon.ticks(over, axis)
    above, below = ticks.numerator, ticks.denominator
    # Larger sizes are held longer, so that each has equally many batches.
    grows = equal == "batches" and axis.unit is not TimeUnit.BATCH
    parts = sum_before if grows else int
    whole = parts(count)
    if axis.unit is TimeUnit.EPOCH:
        marks = (ticks * parts(level) / whole for level in range(1, count + 1))
        part = next((mark for mark in marks if mark.denominator != 1), None)
        if part is not None:
            horizon.ticks(Time(part, TimeUnit.EPOCH), axis)  # refuses it

    def level_at(timestamp: Timestamp) -> int:
        passed = whole * axis.read(timestamp) * below // above
        if not grows:
            return min(count, passed)
        low, high = 0, count
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if parts(middle) <= passed else (low, middle - 1)
        return low

    def holds_until(timestamp: Timestamp) -> Hold:
        level = level_at(timestamp)
        if level == count:
            return Hold()
        near = sizes[level + 1 : level + 1 + grain]
        after = level + 1 + bisect_left(near, (sizes[level] // grain + 1) * grain)
        return Hold(((axis, -(-above * parts(min(after, count)) // (below * whole))),))

    def size_at(timestamp: Timestamp) -> int:
        size = sizes[level_at(timestamp)]
        return size - size % grain or size

    return timed(
        size_at,
        units=frozenset({axis.unit}),
        bounds=(sizes[0], sizes[count]),
        holds_until=holds_until,
    )


def _sums(sizes: Sequence[int]) -> Callable[[int], int]:
    return [0, *itertools.accumulate(sizes)].__getitem__


@dataclass(frozen=True, slots=True, repr=False)
class _Ramp(BatchSizePolicy):
    """A ramp from `start` to `end`."""

    start: Size
    end: Size
    over: Interval
    equal: Equal = field(default="time", kw_only=True)

    def __post_init__(self) -> None:
        BatchSizePolicy.__post_init__(self)
        if self.end < self.start:
            instead = f"write PiecewiseConstant('0ep:{self.start} 1ep:{self.end}')"
            what = f"ramp the batch size from {self.start} to {self.end}"
            raise BatchSizeError.cannot(what, why="a ramp does not shrink", instead=instead)

    def end_size(self) -> int:
        """Return the end of the ramp."""
        return int(self.end)

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return a line if the ramp has no stages."""
        del horizon, largest
        end = size_text(self.end)
        only = f"the batch size ramp has no stages left: it starts at its end, {end}"
        return () if self.start < self.end else (only,)


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
        over: the length of the ramp from the start of the run, in any unit.
        increment: what is added at once; by default one sample, or one token if samples are not
            known to have equally many.
        equal: what is the same for all sizes: `time`, in the unit of `over`, or `batches`.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, the end is below the start or not
            a whole number of increments above it, the ramp has no length, or `equal` is neither.
    """

    increment: SizePart = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        _Ramp.__post_init__(self)
        if rest := (self.end - self.start) % self.increment:
            why = f"from {self.start} it is not a number of increments of {self.increment}"
            lower = in_unit_of(self.end, self.end - rest)
            instead = f"write {lower} or {in_unit_of(lower, lower + self.increment)}"
            raise BatchSizeError.bad("end", self.end, why, instead)

    def bind(self, horizon: Horizon) -> Bound:
        """Resolve the length of the ramp for one run."""
        start, step, grain = self.start, self.increment, grain_of(self, horizon)
        sizes = range(start, self.end + 1, step)

        def sum_before(level: int) -> int:
            return int(level * start + step * level * (level - 1) // 2)

        return _bound_ramp(horizon, self, sizes, sum_before, grain if step < grain else 1)


@final
@dataclass(frozen=True, slots=True, repr=False)
class DoublingRamp(_Ramp):
    """Doubles from `start` up to `end`, each size held equally long; `end` from `over` on.

    From 8 to 64 there are three doublings, so 8, 16 and 32 are held for a third of `over` each.
    If the end is not a doubling of the start, the last step is smaller: 8, 16, 32, 48.

    >>> DoublingRamp(8, 64, "40%").sizes
    (8, 16, 32, 64)

    Args:
        start: the size of the first batch.
        end: the size from `over` on, at least `start`.
        over: the length of the ramp from the start of the run, in any unit.
        equal: what is the same for all sizes: `time`, in the unit of `over`, or `batches`.

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

    def bind(self, horizon: Horizon) -> Bound:
        """Resolve the length of the ramp for one run."""
        return _bound_ramp(horizon, self, self.sizes, _sums(self.sizes))


@final
@dataclass(frozen=True, slots=True, repr=False)
class StagedRamp(BatchSizePolicy):
    """Grows through the given sizes, each held equally long; the last one from `over` on.

    >>> StagedRamp([256, 512, 2048], "1Btok")
    StagedRamp((256, 512, 2048), '1Btok')

    Args:
        sizes: two or more sizes in ascending order.
        over: the length of the ramp from the start of the run, in any unit.
        equal: what is the same for all sizes: `time`, in the unit of `over`, or `batches`.

    Raises:
        BatchSizeError: the sizes are not integers of at least 1 in ascending order, the ramp has
            no length, or `equal` is neither.
    """

    sizes: Sizes
    over: Interval
    equal: Equal = field(default="time", kw_only=True)

    def __post_init__(self) -> None:
        BatchSizePolicy.__post_init__(self)
        ascending = all(a < b for a, b in itertools.pairwise(self.sizes))
        if len(self.sizes) < 2 or not ascending:
            why = "they are not two or more in ascending order"
            instead = "write such, or PiecewiseConstant"
            raise BatchSizeError.bad("sizes", list(self.sizes), why, instead)

    def bind(self, horizon: Horizon) -> Bound:
        """Resolve the length of the ramp for one run."""
        return _bound_ramp(horizon, self, self.sizes, _sums(self.sizes))

    def end_size(self) -> int:
        """Return the last size."""
        return int(self.sizes[-1])


def rampup(
    final: SizeLike,
    over: TimeLike,
    *,
    world_size: int,
    micro_batch_size: SizeLike,
    initial_global_train_batch_size: SizeLike | None = None,
) -> BatchSizePolicy:
    """Return a ramp that only changes gradient accumulation, so the hardware is used evenly.

    Every size is a multiple of `world_size * micro_batch_size`: all ranks always run full
    micro-batches, and the number of accumulation steps doubles.

    >>> rampup(4096, "10%", world_size=8, micro_batch_size=128).sizes
    (1024, 2048, 4096)

    Args:
        final: the size from `over` on.
        over: the length of the ramp from the start of the run, in any unit.
        world_size: the number of ranks.
        micro_batch_size: samples in one forward and backward pass of a rank, or tokens if all
            sizes are in tokens.
        initial_global_train_batch_size: the first size; by default, the smallest possible,
            `world_size * micro_batch_size`.

    Raises:
        BatchSizeError: a size is not a multiple of `world_size * micro_batch_size`, or the final
            size is below the initial one.
    """
    micro = checked_size(micro_batch_size, "a micro-batch size")
    unit = in_unit_of(micro, checked_world_size(world_size) * micro)
    given = initial_global_train_batch_size
    initial, last = unit if given is None else checked_size(given), checked_size(final)
    for name, size in (("initial_global_train_batch_size", initial), ("final", last)):
        if size % unit or has_tokens(size) != has_tokens(unit):
            lower = in_unit_of(unit, max(unit, size - size % unit))
            why = f"it is not a multiple of world_size * micro_batch_size = {unit}"
            instead = f"write {lower} or {in_unit_of(unit, lower + unit)}"
            raise BatchSizeError.bad(name, size, why, instead)
    return DoublingRamp(initial, last, over)


def from_megatron(
    ramp: str | list[int], *, seq_length: int | None = None, global_batch_size: int | None = None
) -> BatchSizePolicy:
    """Return the batch sizes of a Megatron setting, read as it is written there.

    `step_batch_size_schedule` is text. Its thresholds are tokens if `seq_length` is given, as
    Megatron-LM gives it; else they are samples. Tokens are rounded down to whole samples.
    `rampup_batch_size`, which Megatron Core 0.19.2 ignores, is `[start, increment, samples]`.

    Sizes equal those of Megatron's calculators at every step (tested with Megatron Core 0.19.2 and
    0.16.1), but arithmetic is exact. They read `1.001B` as 1000999999, and may take a size of
    `rampup_batch_size` one step late, since they divide as floats.

    >>> from_megatron("0:768 250B:1536", seq_length=4096)
    PiecewiseConstant('0sp:768 61035156sp:1536')
    >>> from_megatron([32, 32, 5_000_000], global_batch_size=1024)
    LinearRamp(32, 1024, '5Msp', increment=32)

    Args:
        ramp: the text, with suffixes K, M, B and T, or the three numbers.
        seq_length: tokens in each sample.
        global_batch_size: the size after `rampup_batch_size`.

    Raises:
        BatchSizeError: it is neither, or another argument is missing or meaningless.
    """
    text = str(ramp).strip("[]()").replace(",", " ").upper()
    if ":" in text and global_batch_size is None:
        parts = re.sub(r"(\S+):(\S+)", r"\1sp:\2sp", text).split()
        parts.sort(key=lambda part: Time(part.partition(":")[0]) if ":" in part else Time("0sp"))
        steps = PiecewiseConstant(" ".join(parts)).steps
        each = 1 if seq_length is None else checked_number(seq_length, "a sequence length")
        return PiecewiseConstant(" ".join(f"{at.amount // each}sp:{size}" for at, size in steps))
    numbers = [f"{number}sp" for number in text.split()]
    if len(numbers) != 3 or global_batch_size is None or seq_length is not None:
        why = "it is neither text with colons alone, nor three numbers and global_batch_size"
        instead = "write from_megatron('0:768 250B:1536', seq_length=4096)"
        instead += " or from_megatron([32, 32, 5_000_000], global_batch_size=1024)"
        raise BatchSizeError.bad("ramp", ramp, why, instead)
    return LinearRamp(numbers[0], global_batch_size, numbers[2], increment=numbers[1])
