"""Checks the arguments of schedules."""

from __future__ import annotations

import math
from typing import SupportsFloat

from stretto.errors import ScheduleError, shown
from stretto.timing import Time, TimeLike
from stretto.timing.number import is_number


def factor(value: object, name: str) -> float:
    """Return `value` as a factor: a finite number of at least 0.

    Raises:
        ScheduleError: it is not.
    """
    number = _as_float(value) if is_number(value) else math.nan
    if not 0.0 <= number < math.inf:
        raise ScheduleError.cannot(
            f"use {name}={shown(value)}",
            why="it is not a finite number of at least 0",
            instead="write a number such as 0.1",
        )
    return abs(number)  # a negative zero becomes a plain one


def positive(value: object, name: str) -> float:
    """Return `value` as a finite number above 0.

    Raises:
        ScheduleError: it is not.
    """
    number = factor(value, name)
    if number == 0:
        raise ScheduleError.cannot(
            f"use {name}={shown(value)}",
            why="it is not above 0",
            instead="write a number such as 1.0",
        )
    return number


def checked_factor(value: object, source: object) -> float:
    """Return the result of a user's function, if it is a factor.

    Raises:
        ScheduleError: it is not.
    """
    # The fast path for nearly all results; nan fails the comparison.
    if type(value) is float and 0.0 <= value < math.inf:
        return value
    # Another kind of number, such as a scalar of NumPy or torch.
    number = _as_float(value)
    if 0.0 <= number < math.inf:
        return number
    name = getattr(source, "__qualname__", shown(source))
    raise ScheduleError.cannot(
        f"use {shown(value)} as a factor",
        why=f"the schedule {name} returned it, and a factor is a finite number of at least 0",
        instead="return a number such as 0.1",
    )


def length(value: TimeLike, name: str) -> Time:
    """Return `value` as a length of time, which may be zero.

    Raises:
        ScheduleError: it is negative.
        TimeError: it is not a time.
    """
    time = Time(value)
    if time.amount < 0:
        raise ScheduleError.cannot(
            f"use {name}='{time}'", why="it is negative", instead=f"write '{-time}'"
        )
    return time


def optional_length(value: TimeLike | None, name: str) -> Time | None:
    """Return `value` as a length of time, or None.

    Raises:
        ScheduleError: it is negative.
        TimeError: it is not a time.
    """
    return None if value is None else length(value, name)


def interval(value: TimeLike, name: str) -> Time:
    """Return `value` as a positive interval of time.

    Raises:
        ScheduleError: it is not positive.
        TimeError: it is not a time.
    """
    time = Time(value)
    if time.amount <= 0:
        raise ScheduleError.cannot(
            f"use {name}='{time}'",
            why="it is not longer than nothing",
            instead=f"write a time such as '1{time.unit}'",
        )
    return time


def _as_float(value: object) -> float:
    """Return the float nearest to a number; nan, which no range contains, if there is none."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan
