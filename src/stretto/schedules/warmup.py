"""Warm-up: a linear ramp as a separate period before a schedule."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from stretto.errors import ScheduleError
from stretto.schedules.arguments import factor, optional_length
from stretto.schedules.glide import line
from stretto.schedules.schedule import BoundSchedule, Schedule, fill
from stretto.schedules.scope import Scope, Span
from stretto.timing import Time, TimeLike, Timestamp


@dataclass(frozen=True, slots=True, repr=False)
class WarmedUp(Schedule):
    """A schedule with an optional warm-up period."""

    warmup: Time | None
    """The duration of the warm-up, or None."""
    warmup_start: float
    """The factor at the start of the warm-up."""

    @abstractmethod
    def own_times(self) -> tuple[Time, ...]:
        """Return the times of the schedule without the warm-up."""

    @abstractmethod
    def first_factor(self) -> float:
        """Return the factor right after the warm-up."""

    @abstractmethod
    def over_rest(self, span: Span) -> BoundSchedule:
        """Return the schedule after the warm-up, over the rest of the scope."""

    def times(self) -> tuple[Time, ...]:
        """Return the times that must be placed on one axis."""
        return self.own_times() if self.warmup is None else (self.warmup, *self.own_times())

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over `scope` as a function of the timestamp.

        Raises:
            ConversionError: a time needs a fact that is not known; the message names it.
            ScheduleError: the warm-up is longer than the scope, or the schedule does not fit.
        """
        span = scope.span(self.times())
        if self.warmup is None:
            return self.over_rest(span)
        rise = Rise(self.warmup, self.warmup_start, self.first_factor())
        return after_warmup(span, rise, self.over_rest)


def set_warmup(schedule: Schedule, warmup: TimeLike | None, warmup_start: float) -> None:
    """Set the two warm-up fields of a schedule.

    Raises:
        ScheduleError: the warm-up is negative, or `warmup_start` is not a factor.
        TimeError: the warm-up is not a time.
    """
    fill(
        schedule,
        warmup=optional_length(warmup, "warmup"),
        warmup_start=factor(warmup_start, "warmup_start"),
    )


@dataclass(frozen=True, slots=True)
class Rise:
    """A linear rise over `time`, from one factor to another."""

    time: Time
    start: float
    end: float


def after_warmup(span: Span, rise: Rise, rest: Callable[[Span], BoundSchedule]) -> BoundSchedule:
    """Return the factor: `rise` first, then `rest` over the rest of `span`.

    Raises:
        ScheduleError: the rise is longer than the span.
    """
    cut = span.after(rise.time)
    if span.end is not None and cut > span.end:
        raise ScheduleError.cannot(
            f"warm up over '{rise.time}'",
            why="the run or period to warm up in is only "
            f"'{span.show(span.end - span.start)}' long",
            instead="write a shorter warm-up, or a fraction such as '5%'",
        )
    main = rest(span.part(cut, span.end))
    if cut == span.start:
        return main
    ramp = line(span, cut, rise.start, rise.end)
    read, turn = span.axis.read, math.ceil(cut)

    def value(timestamp: Timestamp) -> float:
        return main(timestamp) if read(timestamp) >= turn else ramp(timestamp)

    return value


def warmup_text(warmup: Time | None, warmup_start: float) -> str:
    """Return the warm-up part of a schedule's description."""
    return "" if warmup is None else f", after a warm-up from {warmup_start:g} over {warmup}"
