"""Schedules with an interval or milestones: `Exponential`, `StepDecay`, `MultiStep`.

An interval is counted in its own unit from the start of the schedule. So `StepDecay("1000ba")`
steps every thousand batches, even if the batch size changes or the schedule starts at an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import floordiv, truediv
from typing import final

from stretto.errors import ScheduleError
from stretto.schedules.fields import Factor, Interval, check_fields, checked_interval, fill
from stretto.schedules.schedule import WarmedUp
from stretto.schedules.scope import (
    END,
    MOST_BORDERS,
    BoundSchedule,
    Mark,
    Scope,
    counted,
    over_common_denominator,
)
from stretto.timing import Time, TimeLike, Timestamp

BEYOND = 2**128
"""More ticks than any counter reaches: nanoseconds since the Big Bang are 2^88."""


@dataclass(frozen=True, slots=True, repr=False)
class _ByInterval(WarmedUp):
    """A factor that starts at 1 and is multiplied by `gamma` over each interval."""

    every: Interval
    gamma: Factor

    def _powers(self, rest: Scope, divide: Callable[[float, float], float]) -> BoundSchedule:
        """Return the powers of `gamma` from the start of `rest` on; `divide` counts intervals."""
        gamma = self.gamma
        read, scale, first, step, last = _intervals(rest, self.every, needs_end=gamma > 1)
        if divide is floordiv:
            # A step that falls on the end is not taken: the last value is the one before it.
            last = max(last - 1, 0)

        def value(timestamp: Timestamp) -> float:
            passed = read(timestamp) * scale - first
            if passed <= 0:
                return 1.0
            return math.pow(gamma, divide(passed if passed < last else last, step))

        if gamma > 1:
            _check_growth(gamma, divide(last, step), self.every)
        return value

    def times(self) -> tuple[Time, ...]:
        """Return its times, and the end if it grows up to there."""
        return (*WarmedUp.times(self), END) if self.gamma > 1 else WarmedUp.times(self)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Exponential(_ByInterval):
    """Smooth exponential decay or growth, by `gamma` over each interval.

    Formula: `gamma ** (t / every)`, where `t` is the time since the warm-up. Source:
    `torch.optim.lr_scheduler.ExponentialLR`, which it equals at whole intervals; with a gamma above
    1, the learning rate range test of Smith 2017 (arXiv 1506.01186), section 3.3. For a decay that
    changes only once per interval, use `StepDecay`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = Exponential("2ba", 0.25).bind(Horizon("10ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 1, 2, 4)]
    [1.0, 0.5, 0.25, 0.0625]

    Args:
        every: the interval.
        gamma: what the factor is multiplied by over each interval.
        warmup: rise from `warmup_start` to 1 over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: the interval is not positive, or `gamma` is not a finite number of at least
            0; at binding, a gamma above 1 grows beyond all floats.
        TimeError: a text is not a time.
    """

    def over_rest(self, rest: Scope, scope: Scope) -> BoundSchedule:  # noqa: ARG002
        """Return the decay from the start of `rest` on."""
        rest.along(Time(self.every).unit).smooth()
        return self._powers(rest, truediv)


@final
@dataclass(frozen=True, slots=True, repr=False)
class StepDecay(_ByInterval):
    """Step decay: multiply by `gamma` after each interval.

    Formula: `gamma ** floor(t / every)`, where `t` is the time since the warm-up. Source:
    `torch.optim.lr_scheduler.StepLR`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = StepDecay("30ep", 0.1).bind(Horizon("90ep"))
    >>> [round(factor(Timestamp(epoch=epoch)), 4) for epoch in (0, 29, 30, 59, 60)]
    [1.0, 1.0, 0.1, 0.1, 0.01]

    Args:
        every: the interval.
        gamma: what the factor is multiplied by after each interval.
        warmup: rise from `warmup_start` to 1 over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: the interval is not positive, or `gamma` is not a finite number of at least
            0; at binding, a gamma above 1 grows beyond all floats.
        TimeError: a text is not a time.
    """

    gamma: Factor = 0.1

    def over_rest(self, rest: Scope, scope: Scope) -> BoundSchedule:  # noqa: ARG002
        """Return the steps from the start of `rest` on."""
        return self._powers(rest, floordiv)

    def borders_after(self, rest: Scope, scope: Scope) -> list[Mark]:  # noqa: ARG002
        """Return the steps."""
        return repeats(rest, Time(self.every))


@final
@dataclass(frozen=True, slots=True, repr=False)
class MultiStep(WarmedUp):
    """Step decay at given times: multiply by `gamma` at each milestone.

    Formula: `gamma ** n`, where `n` milestones have been reached. Milestones are relative to the
    end of the warm-up; to count them from the start, write
    `MultiStep(["30ep", "60ep"]) * Linear(0, 1, over="5ep")`. Source:
    `torch.optim.lr_scheduler.MultiStepLR`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = MultiStep(["0.5dur", "75ep"]).bind(Horizon("90ep", dataset_num_samples=10))
    >>> [round(factor(Timestamp(sample=10 * epoch)), 4) for epoch in (0, 44, 45, 74, 75)]
    [1.0, 1.0, 0.1, 0.1, 0.01]

    Args:
        milestones: the times, in any units; the units may differ.
        gamma: what the factor is multiplied by at each milestone.
        warmup: rise from `warmup_start` to 1 over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: there is no milestone, one is not positive, or `gamma` is not a finite number
            of at least 0; at binding, the milestones are not in order.
        TimeError: a text is not a time.
    """

    milestones: Sequence[TimeLike]
    gamma: Factor = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        fill(self, milestones=_milestones(self.milestones))
        _check_growth(self.gamma, len(self.milestones), None)

    def over_rest(self, rest: Scope, scope: Scope) -> BoundSchedule:  # noqa: ARG002
        """Return the steps from the start of `rest` on."""
        marks = [rest.after(Time(time)) for time in self.milestones]
        for (before, a), (after, b) in pairwise(zip(self.milestones, marks, strict=True)):
            if b.tick < rest.on(b.axis).place(a) or after == before:
                why = f"it does not come later than '{before}' in this run"
                raise ScheduleError.bad("milestone", str(after), why, "write them once, in order")
        # One on the end is never reached.
        ends = [rest.on(mark.axis).end for mark in marks]
        pairs = zip(marks, ends, strict=True)
        kept = [mark for mark, end in pairs if end is None or mark.tick < end]
        factors = [math.pow(self.gamma, number) for number in range(len(kept) + 1)]
        count = counted(kept)
        return lambda timestamp: factors[count(timestamp)]

    def borders_after(self, rest: Scope, scope: Scope) -> list[Mark]:  # noqa: ARG002
        """Return the milestones."""
        return [rest.after(Time(time)) for time in self.milestones]


def repeats(rest: Scope, every: Time, multiplier: int = 1) -> list[Mark]:
    """Return the ends of intervals that follow each other, each `multiplier` times as long.

    There are none if there are more than `MOST_BORDERS`, or if only the run can tell.
    """
    own = rest.along(every.unit)
    step, end, found = own.length(every), own.end, list[Mark]()
    tick = own.start + step
    while step and end is not None and tick < end:
        found.append(Mark(own.axis, tick))
        if len(found) > MOST_BORDERS:
            return []
        step *= multiplier
        tick += step
    return found


def _milestones(milestones: Sequence[TimeLike]) -> tuple[Time, ...]:
    if not isinstance(milestones, (list, tuple)) or not milestones:
        instead = "write for example ['0.5dur', '0.75dur']"
        raise ScheduleError.bad("milestones", milestones, "it is not a list of times", instead)
    return tuple(checked_interval(milestone, "milestone") for milestone in milestones)


def _intervals(
    rest: Scope, every: TimeLike, *, needs_end: bool
) -> tuple[Callable[[Timestamp], int], int, int, int, int]:
    """Return the counter of `every`, a denominator, and over it start, interval and length."""
    every = Time(every)
    own = rest.along(every.unit)
    end = own.place(own.last) if needs_end else own.end
    end = own.start + BEYOND if end is None else end
    scale, first, step, last = over_common_denominator(own.start, own.length(every), end)
    # A fraction of a period of length 0 is 0. Any step will do, since none is ever taken.
    return own.axis.read, scale, first, max(step, 1), last - first


def _check_growth(gamma: float, times: float, every: TimeLike | None) -> None:
    try:
        math.pow(gamma, times)
    except OverflowError:
        often = f"'{every}' of this run" if every else "milestone"
        why = f"multiplied at each {often}, the factor grows beyond all floats"
        raise ScheduleError.bad("gamma", gamma, why, "write at most 1, or closer to it") from None
