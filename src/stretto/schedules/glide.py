"""Curves from one factor to another that several schedules share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from stretto.errors import ScheduleError
from stretto.schedules.scope import BoundSchedule, Span, integers
from stretto.timing import Time, Timestamp


def line(span: Span, to: Fraction, start: float, end: float) -> BoundSchedule:
    """Return the straight line from `start` to `end` that begins with `span` and ends at `to`."""
    rise = end - start
    return glide(span, to, start, end, lambda passed: start + rise * passed)


def glide(
    span: Span, to: Fraction, start: float, end: float, at: Callable[[float], float]
) -> BoundSchedule:
    """Return the way from `start` to `end` that begins with `span` and ends at `to`.

    `at` returns the factor at a fraction of the curve, from 0 to 1. The factor is constant before
    and after the curve, and after the end of the span.
    """
    read = span.axis.read
    scale, first, total, stop = way(span, to)
    start = start if total else end  # a curve of length 0 starts at its end
    if start != end:
        span.smooth()
    low, high = min(start, end), max(start, end)
    last = end if stop == total else min(max(at(stop / total), low), high)

    def value(timestamp: Timestamp) -> float:
        passed = read(timestamp) * scale - first
        if passed <= 0:
            return start
        if passed >= stop:
            return last
        result = at(passed / total)
        # Rounding may exceed an end by one unit in the last place.
        if result > high:
            return high
        return result if result > low else low

    return value


def way(span: Span, to: Fraction) -> tuple[int, int, int, int]:
    """Return a denominator, and over it the start, the length and the last tick of a curve.

    The last tick is its end, or the end of the span if that comes first.
    """
    scale, first, last, stop = integers(
        span.start, to, to if span.end is None else min(to, span.end)
    )
    return scale, first, last - first, stop - first


def cosine_left(passed: float) -> float:
    """Return the part of half a cosine wave that is left, from 1 to 0.

    >>> cosine_left(0.0), cosine_left(1.0)
    (1.0, 0.0)
    """
    return (1.0 + math.cos(math.pi * passed)) / 2


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
