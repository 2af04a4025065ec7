"""Schedules from one factor to another, with restarts, and those that hold in between."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

from stretto.errors import ScheduleError
from stretto.schedules.fields import (
    Factor,
    Interval,
    Length,
    Positive,
    check_fields,
    checked_factor,
)
from stretto.schedules.intervals import BEYOND, repeats
from stretto.schedules.schedule import Schedule, WarmedUp, cosine_left, curve_ticks, transition
from stretto.schedules.scope import END, BoundSchedule, Mark, Scope, over_common_denominator
from stretto.timing import Time, Timestamp


@dataclass(frozen=True, slots=True, repr=False)
class _Transition(WarmedUp):
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

    def over_rest(self, rest: Scope, scope: Scope) -> BoundSchedule:  # noqa: ARG002
        """Return the curve from the start of `rest` on."""
        over = Time(self.over)
        own = rest.along(over.unit)
        return transition(own, own.after(over).tick, self.start, self.end, self.at)

    def borders_after(self, rest: Scope, scope: Scope) -> list[Mark]:  # noqa: ARG002
        """Return the end of the curve."""
        return [rest.after(Time(self.over))]


@final
@dataclass(frozen=True, slots=True, repr=False)
class Linear(_Transition):
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
class Cosine(_Transition):
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
        left = (1.0 + math.cos(math.pi * passed)) / 2  # `cosine_left`, without a call
        return self.end + (self.start - self.end) * left


@final
@dataclass(frozen=True, slots=True, repr=False)
class Polynomial(_Transition):
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
            raise ScheduleError.bad(
                "function", self.function, "it can't be called", "write for example lambda x: 1 - x"
            )

    def first_factor(self) -> float:
        """Return the factor at the start."""
        return checked_factor(self.function(0.0), self.function)

    def over_rest(self, rest: Scope, scope: Scope) -> BoundSchedule:  # noqa: ARG002
        """Return the curve from the start of `rest` on."""
        over = Time(self.over)
        own = rest.along(over.unit).smooth()
        function, read = self.function, own.axis.read
        scale, first, total, stop = curve_ticks(own, own.after(over).tick)
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

    def borders_after(self, rest: Scope, scope: Scope) -> list[Mark]:  # noqa: ARG002
        """Return the end of the curve."""
        return [rest.after(Time(self.over))]


@final
@dataclass(frozen=True, slots=True, repr=False)
class InverseSqrt(WarmedUp):
    """Decay with the square root of time; needs no end of the run.

    Formula: `max(floor, end + (1 - end) * sqrt(s / (s + t)))`, where `t` is the time since the
    warm-up and `s` is the time scale; with `s` equal to the warm-up `w`, the root is
    `sqrt(w / time)`. Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 3; transformers'
    `get_inverse_sqrt_schedule`. Megatron and Levanter have a `floor` (`min_lr`), OLMo-core an
    `end` (`alpha_f`).

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = InverseSqrt(warmup="4ba").bind(Horizon("64ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 2, 4, 16, 64)]
    [0.0, 0.5, 1.0, 0.5, 0.25]

    Args:
        timescale: the time scale; by default, as long as the warm-up.
        end: the factor that the decay tends to.
        floor: the smallest factor after the warm-up; the decay stops there.
        warmup: rise from `warmup_start` to 1 over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: there is neither a time scale nor a warm-up, one is not positive, a factor is
            not finite or is negative, or the floor is above 1.
        TimeError: a text is not a time.
    """

    timescale: Interval | None = None
    end: Factor = field(default=0.0, kw_only=True)
    floor: Factor = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.floor > 1:
            raise ScheduleError.bad("floor", self.floor, "the decay begins at 1", "write 0 to 1")
        if not (self.timescale or self.warmup):
            why, instead = "there is no warm-up either", "write for example '1000ba'"
            raise ScheduleError.bad("timescale", self.timescale, why, instead)

    def over_rest(self, rest: Scope, scope: Scope) -> BoundSchedule:
        """Return the decay from the start of `rest` on."""
        # Without a time scale, the length of the warm-up counts: all before `rest`.
        own = rest.on(rest.first.axis)
        if self.timescale is None:
            timescale = own.start - scope.on(own.axis).start
        else:
            own = rest.along(Time(self.timescale).unit)
            timescale = own.length(Time(self.timescale))
        stop = own.start + BEYOND if own.end is None else own.end
        scale, first, unit, last = over_common_denominator(own.start, timescale, stop)
        # A fraction of a period of length 0 is 0. Any unit will do, since no time passes.
        read, unit, last = own.smooth().axis.read, max(unit, 1), last - first
        end, fall, floor = self.end, 1.0 - self.end, self.floor

        def value(timestamp: Timestamp) -> float:
            passed = read(timestamp) * scale - first
            if passed <= 0:
                return 1.0
            left = math.sqrt(unit / (unit + (passed if passed < last else last)))
            return max(floor, end + fall * left)

        return value


@final
@dataclass(frozen=True, slots=True, repr=False)
class CosineRestarts(WarmedUp):
    """Cosine decay from `start` to `end` that starts anew, each cycle `multiplier` times as long.

    Formula: `end + (start - end) * (1 + cos(pi * t / t_i)) / 2`, where `t` is the time since the
    last restart and cycle `i` is `t_i = t_0 * multiplier ** i` long. Source: Loshchilov and Hutter
    2017, SGDR (arXiv 1608.03983), equation 5, with `T_mult` an integer as there;
    `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = CosineRestarts("4ba", 2).bind(Horizon("12ba"))
    >>> [round(factor(Timestamp(batch=batch)), 4) for batch in (0, 2, 3, 4, 8, 12)]
    [1.0, 0.5, 0.1464, 1.0, 0.5, 0.0]

    Args:
        t_0: the length of the first cycle.
        multiplier: how many times as long each cycle is as the one before; an integer from 1.
        start: the factor at each restart.
        end: the factor that each cycle falls to.
        warmup: rise from `warmup_start` to `start` over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: a factor is not finite or is negative, `t_0` is not positive, or the
            multiplier is not an integer of at least 1.
        TimeError: a text is not a time.
    """

    t_0: Interval
    multiplier: int = 1
    start: Factor = field(default=1.0, kw_only=True)
    end: Factor = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        if type(self.multiplier) is not int or self.multiplier < 1:
            why, instead = "it is not an integer of at least 1", "write 1, or 2 to double cycles"
            raise ScheduleError.bad("multiplier", self.multiplier, why, instead)

    def first_factor(self) -> float:
        """Return the factor at each restart."""
        return self.start

    def over_rest(self, rest: Scope, scope: Scope) -> BoundSchedule:  # noqa: ARG002
        """Return the cycles from the start of `rest` on."""
        t_0 = Time(self.t_0)
        own = rest.along(t_0.unit).smooth()
        end = own.start + BEYOND if own.end is None else own.end
        scale, first, cycle, last = over_common_denominator(own.start, own.length(t_0), end)
        # A fraction of a period of length 0 is 0. Any cycle will do, since none ever starts.
        read, cycle, last = own.axis.read, max(cycle, 1), last - first
        is_even, starts, lengths = self.multiplier == 1, *_cycles(cycle, self.multiplier, last)
        top, bottom, fall = self.start, self.end, self.start - self.end
        low, high = min(top, bottom), max(top, bottom)

        def at(passed: int) -> float:
            if is_even:
                part = passed % cycle / cycle
            else:
                number = bisect_right(starts, passed) - 1
                part = (passed - starts[number]) / lengths[number]
            result = bottom + fall * cosine_left(part)
            # Rounding may exceed an end by one unit in the last place.
            if result > high:
                return high
            return result if result > low else low

        # A restart that falls on the end is not taken: the last value is the one before it.
        is_restart = last % cycle == 0 if is_even else last in starts
        last_value = bottom if is_restart else at(last)

        def value(timestamp: Timestamp) -> float:
            passed = read(timestamp) * scale - first
            if passed >= last:
                return last_value
            return at(passed) if passed > 0 else top

        return value

    def borders_after(self, rest: Scope, scope: Scope) -> list[Mark]:  # noqa: ARG002
        """Return the restarts."""
        return repeats(rest, Time(self.t_0), self.multiplier)


def _cycles(cycle: int, multiplier: int, last: int) -> tuple[list[int], list[int]]:
    """Return the starts and lengths of growing cycles up to `last`; there are few."""
    starts, lengths = [0], [cycle]
    while multiplier > 1 and starts[-1] + lengths[-1] <= last:
        starts.append(starts[-1] + lengths[-1])
        lengths.append(lengths[-1] * multiplier)
    return starts, lengths


DecayShape: TypeAlias = Literal["linear", "cosine", "1-sqrt", "exponential"]
"""The decays of `WSD`: `1 - x`, `(1 + cos(pi * x)) / 2`, `1 - sqrt(x)` or `2 ** (1 - x) - 1`."""

_LEFT: Mapping[str, Callable[[float], float]] = {
    "1-sqrt": lambda passed: 1.0 - math.sqrt(passed),
    "exponential": lambda passed: math.pow(2.0, 1.0 - passed) - 1.0,
}


@final
@dataclass(frozen=True, slots=True, repr=False)
class WSD(WarmedUp):
    """Warm-up, stable at 1, then decay at the end of the run.

    The three are periods of one run, so `warmup="5%"` and `decay="20%"` are both fractions of the
    whole run: `Periods([("5%", Linear(0, 1)), ("rest", 1), ("20%", Linear(1, 0))])`.

    Formula: 1 until the decay, then `end + (1 - end) * shape(x)`, where `x` in [0, 1] is the
    elapsed fraction of the decay. Source: Hu et al. 2024, MiniCPM (arXiv 2404.06395), for the
    three stages; Hägele et al. 2024 (arXiv 2405.18392) for the shape `1-sqrt`; Megatron-LM's
    `--lr-wsd-decay-style` for `exponential`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = WSD("20%", warmup="5%").bind(Horizon("100ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 1, 5, 80, 90, 100)]
    [0.0, 0.2, 1.0, 1.0, 0.5, 0.0]

    Args:
        decay: the duration of the decay, which ends with the run.
        end: the last factor.
        shape: how the factor falls.
        warmup: rise from `warmup_start` to 1 over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: a factor is not finite or is negative, a time is negative, or there is no
            such shape; at binding, warm-up and decay are together longer than the run.
        TimeError: a text is not a time.
    """

    decay: Length
    end: Factor = 0.0
    shape: DecayShape = field(default="linear", kw_only=True)

    def times(self) -> tuple[Time, ...]:
        """Return its times, and the end that the decay is measured back from."""
        return (*WarmedUp.times(self), END)

    def over_rest(self, rest: Scope, scope: Scope) -> BoundSchedule:
        """Return the stable stage and the decay, which is measured back from the end of `scope`.

        Raises:
            ScheduleError: warm-up and decay are together longer than the scope.
        """
        cut = scope.moved(scope.last, -Time(self.decay))
        own = rest.on(cut.axis)
        if cut.tick < own.start:
            length = own.place(scope.last) - own.place(scope.first)
            why = f"with the warm-up it is longer than '{own.show(length)}'"
            raise ScheduleError.bad("decay", str(self.decay), why, "write a shorter one")
        fall = self._fall().within(scope.part(cut, scope.last, cut.axis))
        read, turn = cut.axis.read, cut.first_tick

        def value(timestamp: Timestamp) -> float:
            return fall(timestamp) if read(timestamp) >= turn else 1.0

        return value

    def borders_after(self, rest: Scope, scope: Scope) -> list[Mark]:  # noqa: ARG002
        """Return where the decay begins."""
        return [scope.moved(scope.last, -Time(self.decay))]

    def _fall(self) -> Schedule:
        if self.shape == "linear":
            return Linear(1.0, self.end)
        if self.shape == "cosine":
            return Cosine(1.0, self.end)
        end, left = self.end, _LEFT[self.shape]
        return Curve(lambda passed: end + (1.0 - end) * left(passed))
