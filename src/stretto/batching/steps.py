"""Constant batch sizes and sizes that change at given times."""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from stretto.batching.functions import AsManyAsFit, SizeCallable, SizeFunction
from stretto.batching.policy import (
    BatchSizePolicy,
    Bound,
    Hold,
    Size,
    SizeLike,
    Tokens,
    batches_of,
    check_units,
    checked_size,
    timed,
    whole_size,
)
from stretto.errors import BatchSizeError, ConversionError, shown
from stretto.schedules.fields import fill
from stretto.timing import Axis, Horizon, Time, Timestamp, TimeUnit
from stretto.timing.epochs import next_epoch, outgrows_epoch
from stretto.timing.time import Number


def bound_steps(edges: Sequence[tuple[Axis, int]], sizes: Sequence[int]) -> Bound:
    """Return the size of the last edge that has been reached, each on its own counter.

    There is one size more than there are edges: `sizes[0]` holds from the start of the run.
    """
    axes = {id(axis): axis for axis, _ in edges}
    aligned = edges[0][0] if len(axes) == 1 else None  # one counter: found by bisection
    ticks, edges = [tick for _, tick in edges], tuple(edges)

    def reached(timestamp: Timestamp) -> int:
        if aligned is not None:
            return bisect_right(ticks, aligned.read(timestamp))
        passed = (at for at, (axis, tick) in enumerate(edges, 1) if axis.read(timestamp) >= tick)
        return max(passed, default=0)

    def holds_until(timestamp: Timestamp) -> Hold:
        # On several counters, any later step may come next.
        number = reached(timestamp)
        return Hold(edges[number : None if aligned is None else number + 1])

    return timed(
        lambda timestamp: sizes[reached(timestamp)],
        units=frozenset(axis.unit for axis in axes.values()),
        bounds=(min(sizes), max(sizes)),
        holds_until=holds_until,
    )


def sample_axis(horizon: Horizon, axis: Axis) -> Axis:
    """Return the counter of samples if `axis` is a multiple of it, else `axis`."""
    samples = horizon.axis(TimeUnit.SAMPLE)
    if axis.unit is TimeUnit.EPOCH and horizon.dataset_num_samples is not None:
        return samples
    if axis.unit is TimeUnit.TOKEN and horizon.tokens_per_sample is not None:
        return samples
    return axis


def _is_after(
    horizon: Horizon, times: Sequence[Time], edges: Sequence[tuple[Axis, int]], sizes: Sequence[int]
) -> bool:
    """Return whether the last edge comes after the one before it, or if that is unknown."""
    *earlier, (axis, tick) = edges
    axis_before, before = earlier[-1]
    if axis is axis_before:
        return before < tick
    if TimeUnit.BATCH in (axis.unit, axis_before.unit):
        is_read = horizon.lengths is None and horizon.tokens_per_sample is None
        if is_read and isinstance(sizes[0], Tokens):
            return True
        # The sizes before decide which comes first.
        now = Timestamp()
        for (edge, at), size in zip(earlier, sizes, strict=False):
            if outgrows_epoch(horizon, now, whole_size(horizon, now.sample, size)):
                now = next_epoch(horizon, now)
            batches = batches_of(horizon, now, size)
            count, most = batches.count_until(edge, at), whole_size(horizon, now.sample, size)
            if count is None or outgrows_epoch(horizon, now, most):
                return True
            now = batches.timestamp(count)
        return axis.read(now) < tick
    for unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN):
        with suppress(ConversionError):
            first, last = (horizon.ticks(time, horizon.axis(unit)) for time in times)
            return first < last
    return True


StepsLike: TypeAlias = str | Mapping[str, SizeLike] | Mapping[Time, SizeLike]
"""The written form of steps: text, or times and sizes."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class Fixed(BatchSizePolicy):
    """The same size for the whole run.

    >>> policy = Fixed(64).bind(Horizon("1ep"))
    >>> from stretto.timing import Timestamp
    >>> policy.holds_until(Timestamp(), {})
    Hold(limits=())

    Args:
        size: samples or tokens of one optimizer step, over all ranks: 64, or `"64Ktok"`.

    Raises:
        BatchSizeError: the size is neither an integer of at least 1 nor tokens.
    """

    size: Size

    def end_size(self) -> int:
        """Return the constant."""
        return int(self.size)

    def bind(self, horizon: Horizon) -> Bound:
        """Return the constant."""
        del horizon
        return bound_steps((), (self.size,))


@final
@dataclass(frozen=True, slots=True, init=False)
class PiecewiseConstant(BatchSizePolicy):
    """Sizes that change at given times, the first of them 0.

    Text has the form of Megatron's `--step-batch-size-schedule`, with units: spaces or commas
    between the steps, in ascending order. Each time is read on its own counter, so batches, samples
    and epochs mix exactly.

    >>> PiecewiseConstant("0tok:768 250Btok:1536")
    PiecewiseConstant('0tok:768 250Btok:1536')
    >>> PiecewiseConstant({"0ep": 32, "10%": 64, "3000ba": 128})
    PiecewiseConstant('0ep:32 0.1dur:64 3000ba:128')

    Args:
        steps: `"<time>:<size> <time>:<size> ..."`, or a mapping from times to sizes, which are all
            in samples or all in tokens: `"0tok:16Ktok 2Mtok:64Ktok"`.

    Raises:
        BatchSizeError: there are no steps, the first is not at 0, a size is not an integer of at
            least 1, or the times are not in ascending order.
        TimeError: a time cannot be read.
    """

    steps: tuple[tuple[Time, int], ...]

    def __init__(self, steps: StepsLike) -> None:
        fill(self, steps=_checked(_pairs(steps)))
        check_units(self)

    def bind(self, horizon: Horizon) -> Bound:
        """Resolve the times of the steps for one run.

        Raises:
            BatchSizeError: on this run the times are out of order.
            ConversionError: a time needs a fact that is not known.
        """
        times, sizes = [time for time, _ in self.steps[1:]], [size for _, size in self.steps]
        axes = [sample_axis(horizon, horizon.axis(time.unit)) for time in times]
        edges = [
            (axis, math.ceil(horizon.ticks(time, axis)))
            for axis, time in zip(axes, times, strict=True)
        ]
        # Of steps that begin at the same sample or batch, the last one stays.
        for at in reversed(range(len(edges) - 1)):
            if edges[at] == edges[at + 1]:
                del edges[at], times[at], sizes[at + 1]
        for number in range(1, len(edges)):
            if not _is_after(horizon, times[number - 1 : number + 1], edges[: number + 1], sizes):
                why = f"on this run '{times[number]}' does not come after '{times[number - 1]}'"
                instead = "write times in ascending order, or all in one unit"
                what = f"follow the steps {str(self)!r}"
                raise BatchSizeError.cannot(what, why=why, instead=instead)
        return bound_steps(edges, sizes)

    def end_size(self) -> int:
        """Return the last size."""
        return self.steps[-1][1]

    def scaled(self, ratio: Number) -> PiecewiseConstant:
        """Return the steps at stretched times; of two that meet, the later one stays."""
        return PiecewiseConstant(dict(BatchSizePolicy.scaled(self, ratio).steps))

    def __str__(self) -> str:
        return " ".join(f"{time}:{size}" for time, size in self.steps)

    def __repr__(self) -> str:
        return f"PiecewiseConstant({str(self)!r})"


def _pairs(steps: object) -> list[tuple[Time, int]]:
    if isinstance(steps, str):
        in_tokens = re.sub(r"(?<![^\s,])([0-9][0-9_.]*[KMBT]?):", r"\1tok:", steps)
        if in_tokens != steps:
            why = f"times need a unit, as in {in_tokens!r}; from_megatron reads it as Megatron does"
            raise _refused(steps, why)
        return [_step(text, steps) for text in steps.replace(",", " ").split()]
    if not isinstance(steps, Mapping):
        raise _refused(steps, "they are neither text nor a mapping")
    return [(Time(time), checked_size(size)) for time, size in steps.items()]


def _step(text: str, whole: str) -> tuple[Time, int]:
    time, colon, size = text.rpartition(":")
    if not colon:
        raise _refused(whole, f"{shown(text)} is not '<time>:<size>'")
    found = Time(time)
    try:
        return found, checked_size(size)
    except BatchSizeError as error:
        raise _refused(whole, f"{shown(size)}: {error.message.why}") from None


def _checked(pairs: list[tuple[Time, int]]) -> tuple[tuple[Time, int], ...]:
    pairs.sort(key=lambda pair: pair[0].amount != 0)  # the first size may come last, as in Megatron
    shown = " ".join(f"{time}:{size}" for time, size in pairs)
    if not pairs:
        raise _refused(shown, "there are none")
    if pairs[0][0].amount != 0:
        raise _refused(shown, "the first one does not start at 0")
    for (before, _), (after, _) in itertools.pairwise(pairs):
        if after.amount <= 0 or (after.unit is before.unit and after <= before):
            raise _refused(shown, f"'{after}' does not come after '{before}'")
    return tuple(pairs)


def _refused(steps: object, why: str) -> BatchSizeError:
    return BatchSizeError.bad("steps", steps, why, "write for example '0tok:768 250Btok:1536'")


PolicyLike: TypeAlias = BatchSizePolicy | int | str | Time | Mapping[Any, SizeLike] | SizeCallable
"""Anything that `as_policy` reads as a batch size policy."""


def as_policy(value: object) -> BatchSizePolicy:
    """Return `value` as a batch size policy.

    A number, or an amount such as `"64Ktok"`, is the size of the whole run; `"auto"` is as many
    samples as fit into memory. Other text is steps. A mapping from times is steps. A function
    `(timestamp, current) -> size` is called before every batch.

    >>> as_policy(64), as_policy("0ep:32 2ep:64"), as_policy({"0ep": 32, "2ep": 64})
    (Fixed(64), PiecewiseConstant('0ep:32 2ep:64'), PiecewiseConstant('0ep:32 2ep:64'))

    Raises:
        BatchSizeError: it is none of these; the message says what to write.
        TimeError: a time cannot be read.
    """
    if isinstance(value, BatchSizePolicy):
        return value
    if isinstance(value, Mapping):
        return PiecewiseConstant(value)
    if isinstance(value, str):
        if value == "auto":
            return AsManyAsFit()
        if ":" in value or not value.strip():
            return PiecewiseConstant(value)
        steps = (
            "write a number such as 128, tokens such as '64Ktok', or steps such as '0ep:8 1ep:16'"
        )
        return Fixed(checked_size(value, instead=steps))
    if callable(value) and not isinstance(value, type):
        return SizeFunction(value)
    if isinstance(value, (list, tuple)):
        what, why = f"use {shown(value)} as a batch size", f"it is a {type(value).__name__}"
        instead = "write steps such as '0ep:8 1ep:16' or {'0ep': 8, '1ep': 16}"
        raise BatchSizeError.cannot(what, why=why, instead=instead)
    if hasattr(value, "policy") and hasattr(value, "schedule"):
        why, instead = "it is a pair", "pass its policy, its schedule as 'lr', and its rule"
        raise BatchSizeError.bad("batch_size", value, why, instead)
    return Fixed(value)
