"""Schedules from one factor to another: `Linear`, `Cosine`, `Polynomial`, `Curve`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from stretto.errors import ScheduleError, shown
from stretto.schedules.arguments import checked_factor, factor, length, positive
from stretto.schedules.glide import cosine_left, glide, way
from stretto.schedules.schedule import BoundSchedule, fill
from stretto.schedules.scope import END, Span
from stretto.schedules.warmup import WarmedUp, set_warmup, warmup_text
from stretto.timing import Time, TimeLike, Timestamp


@dataclass(frozen=True, slots=True, init=False, repr=False)
class _Glide(WarmedUp):
    """A curve from `start` to `end` whose shape is `at`."""

    start: float
    end: float
    over: Time

    def __init__(
        self,
        start: float = 1.0,
        end: float = 0.0,
        *,
        over: TimeLike = END,
        warmup: TimeLike | None = None,
        warmup_start: float = 0.0,
    ) -> None:
        fill(self, start=factor(start, "start"), end=factor(end, "end"), over=length(over, "over"))
        set_warmup(self, warmup, warmup_start)

    @abstractmethod
    def at(self, passed: float) -> float:
        """Return the factor at a fraction of the curve, from 0 to 1."""

    def own_times(self) -> tuple[Time, ...]:
        """Return the duration of the curve."""
        return (self.over,)

    def first_factor(self) -> float:
        """Return the factor at the start."""
        return self.start

    def over_rest(self, span: Span) -> BoundSchedule:
        """Return the curve from the start of `span` on."""
        return glide(span, span.after(self.over), self.start, self.end, self.at)

    def _text(self, shape: str) -> str:
        over = "" if self.over == END else f" over {self.over}"
        warmup = warmup_text(self.warmup, self.warmup_start)
        return f"{shape} from {self.start:g} to {self.end:g}{over}{warmup}"


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
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

    def __str__(self) -> str:
        return self._text("linear")


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
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

    def __str__(self) -> str:
        return self._text("cosine")


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
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

    power: float

    def __init__(
        self,
        start: float = 1.0,
        end: float = 0.0,
        *,
        power: float = 1.0,
        over: TimeLike = END,
        warmup: TimeLike | None = None,
        warmup_start: float = 0.0,
    ) -> None:
        _Glide.__init__(self, start, end, over=over, warmup=warmup, warmup_start=warmup_start)
        fill(self, power=positive(power, "power"))

    def at(self, passed: float) -> float:
        """Return the factor on the curve."""
        return self.end + (self.start - self.end) * math.pow(1.0 - passed, self.power)

    def __str__(self) -> str:
        return self._text(f"polynomial of power {self.power:g}")


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
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
    over: Time

    def __init__(
        self,
        function: Callable[[float], float],
        *,
        over: TimeLike = END,
        warmup: TimeLike | None = None,
        warmup_start: float = 0.0,
    ) -> None:
        if not callable(function):
            raise ScheduleError.cannot(
                f"use {shown(function)} as a curve",
                why="it can't be called",
                instead="write a function of the part that has passed, such as lambda x: 1 - x",
            )
        fill(self, function=function, over=length(over, "over"))
        set_warmup(self, warmup, warmup_start)

    def own_times(self) -> tuple[Time, ...]:
        """Return the duration of the curve."""
        return (self.over,)

    def first_factor(self) -> float:
        """Return the factor at the start."""
        return checked_factor(self.function(0.0), self.function)

    def over_rest(self, span: Span) -> BoundSchedule:
        """Return the curve from the start of `span` on."""
        function, read = self.function, span.smooth().axis.read
        scale, first, total, stop = way(span, span.after(self.over))
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

    def __str__(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        over = "" if self.over == END else f" over {self.over}"
        return f"curve {name}{over}{warmup_text(self.warmup, self.warmup_start)}"
