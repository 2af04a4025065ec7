"""Schedules from one factor to another: `Linear`, `Cosine`, `Polynomial`, `Curve`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from stretto.errors import ScheduleError, shown
from stretto.schedules.fields import Factor, Length, Positive, check_fields, checked_factor
from stretto.schedules.glide import cosine_left, glide, way
from stretto.schedules.schedule import WarmedUp
from stretto.schedules.scope import END, BoundSchedule, Span
from stretto.timing import Time, Timestamp


@dataclass(frozen=True, slots=True, repr=False)
class _Glide(WarmedUp):
    """A curve from `start` to `end` whose shape is `at`."""

    start: Factor = 1.0
    end: Factor = 0.0
    over: Length = field(default=END, kw_only=True)

    @abstractmethod
    def at(self, passed: float) -> float:
        """Return the factor at a fraction of the curve, from 0 to 1."""

    def first_factor(self) -> float:
        """Return the factor at the start."""
        return self.start

    def over_rest(self, span: Span) -> BoundSchedule:
        """Return the curve from the start of `span` on."""
        return glide(span, span.after(Time(self.over)), self.start, self.end, self.at)

    def shape(self) -> str:
        """Return the curve in words."""
        over = "" if self.over == END else f" over {self.over}"
        return f"{self._name()} from {self.start:g} to {self.end:g}{over}"

    def _name(self) -> str:
        return type(self).__name__.lower()


@final
@dataclass(frozen=True, slots=True, repr=False)
class Linear(_Glide):
    """A straight line from `start` to `end`.

    Formula: `start + (end - start) * x`, where `x` in [0, 1] is the elapsed fraction of `over`.
    Source: `torch.optim.lr_scheduler.LinearLR`; transformers' `get_linear_schedule_with_warmup`;
    as a warm-up, Goyal et al. 2017 (arXiv 1706.02677), section 2.2.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = Linear(1, 0, warmup="2ba").bind(Horizon("10ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 1, 2, 4, 6, 10)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.0]

    Args:
        start: the first factor.
        end: the last factor, constant from then on.
        over: the duration of the curve after the warm-up; a fraction is of the time that is left.
        warmup: rise from `warmup_start` to `start` over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: a factor is not finite or is negative, or a time is negative.
        TimeError: a text is not a time.
    """

    def at(self, passed: float) -> float:
        """Return the factor on the line."""
        return self.start + (self.end - self.start) * passed


@final
@dataclass(frozen=True, slots=True, repr=False)
class Cosine(_Glide):
    """Half a cosine wave from `start` to `end`.

    Formula: `end + (start - end) * (1 + cos(pi * x)) / 2`, where `x` in [0, 1] is the elapsed
    fraction of `over`. Source: Loshchilov and Hutter 2017, SGDR (arXiv 1608.03983), equation 5;
    `torch.optim.lr_scheduler.CosineAnnealingLR`, which rises again where this one stays at `end`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = Cosine(1, 0.1, warmup="5%").bind(Horizon("100ba"))
    >>> [round(factor(Timestamp(batch=batch)), 4) for batch in (0, 1, 5, 100, 101)]
    [0.0, 0.2, 1.0, 0.1, 0.1]

    Args:
        start: the first factor.
        end: the last factor, constant from then on.
        over: the duration of the curve after the warm-up; a fraction is of the time that is left.
        warmup: rise from `warmup_start` to `start` over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: a factor is not finite or is negative, or a time is negative.
        TimeError: a text is not a time.
    """

    def at(self, passed: float) -> float:
        """Return the factor on the wave."""
        return self.end + (self.start - self.end) * cosine_left(passed)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Polynomial(_Glide):
    """A power of the time that is left, from `start` to `end`.

    Formula: `end + (start - end) * (1 - x) ** power`, where `x` in [0, 1] is the elapsed
    fraction of `over`. Source: `torch.optim.lr_scheduler.PolynomialLR`; transformers'
    `get_polynomial_decay_schedule_with_warmup`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = Polynomial(power=2).bind(Horizon("10ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 5, 10, 11)]
    [1.0, 0.25, 0.0, 0.0]

    Args:
        start: the first factor.
        end: the last factor, constant from then on.
        power: the power, above 0; 1 is a straight line.
        over: the duration of the curve after the warm-up; a fraction is of the time that is left.
        warmup: rise from `warmup_start` to `start` over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: a factor is not finite or is negative, the power is not above 0, or a time
            is negative.
        TimeError: a text is not a time.
    """

    power: Positive = field(default=1.0, kw_only=True)

    def at(self, passed: float) -> float:
        """Return the factor on the curve."""
        return self.end + (self.start - self.end) * math.pow(1.0 - passed, self.power)

    def _name(self) -> str:
        return f"polynomial of power {self.power:g}"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Curve(WarmedUp):
    """Your own function of the elapsed fraction of a run or period, from 0 to 1.

    It is relative to its period; the callable of `Custom` reads the clock of the whole run.

    Formula: `function(x)`, where `x` in [0, 1] is the elapsed fraction of `over`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> def triangle(passed: float) -> float:
    ...     return passed if passed <= 0.5 else 1 - passed
    >>> factor = Curve(triangle).bind(Horizon("10ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 4, 5, 8, 10)]
    [0.0, 0.4, 0.5, 0.19999999999999996, 0.0]

    Args:
        function: the factor as a function of the elapsed fraction.
        over: the duration of the curve after the warm-up; a fraction is of the time that is left.
        warmup: rise from `warmup_start` to `function(0.0)` over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: the function can't be called or does not return factors, or a time is
            negative.
        TimeError: a text is not a time.
    """

    function: Callable[[float], float]
    over: Length = field(default=END, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        if not callable(self.function):
            raise ScheduleError.cannot(
                f"use {shown(self.function)} as a curve",
                why="it can't be called",
                instead="write a function of the part that has passed, such as lambda x: 1 - x",
            )

    def first_factor(self) -> float:
        """Return the factor at the start."""
        return checked_factor(self.function(0.0), self.function)

    def over_rest(self, span: Span) -> BoundSchedule:
        """Return the curve from the start of `span` on."""
        function, read = self.function, span.smooth().axis.read
        scale, first, total, stop = way(span, span.after(Time(self.over)))
        last = checked_factor(function(stop / total if total else 1.0), function)
        start = self.first_factor() if total else last

        def value(timestamp: Timestamp) -> float:
            passed = read(timestamp) * scale - first
            if passed <= 0:
                return start
            if passed >= stop:
                return last
            return checked_factor(function(passed / total), function)

        return value

    def shape(self) -> str:
        """Return the schedule in words."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"curve {name}" + ("" if self.over == END else f" over {self.over}")
