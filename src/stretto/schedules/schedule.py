"""`Schedule`, the base of all schedules, and curves that several share."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeAlias, final

from stretto.errors import ConversionError, PlanWarning, ScheduleError
from stretto.schedules.fields import (
    Factor,
    Length,
    Timed,
    check_fields,
    checked_factor,
    fill,
)
from stretto.schedules.scope import BoundSchedule, Mark, Scope, over_common_denominator
from stretto.timing import Horizon, Time, Timer, Timestamp, TimeUnit
from stretto.timing.grammar import is_number, parse_unit


def linear(scope: Scope, to: Fraction, start: float, end: float) -> BoundSchedule:
    """Return the straight line from `start` to `end` that begins with `scope` and ends at `to`."""
    rise = end - start
    return transition(scope, to, start, end, lambda passed: start + rise * passed)


def transition(
    scope: Scope, to: Fraction, start: float, end: float, at: Callable[[float], float]
) -> BoundSchedule:
    """Return the curve from `start` to `end` that begins with `scope` and ends at `to`.

    `at` returns the factor at a fraction of the curve, from 0 to 1. The factor is constant before
    and after the curve, and after the end of the scope.
    """
    read = scope.axis.read
    scale, first, total, stop = curve_ticks(scope, to)
    start = start if total else end  # a curve of length 0 starts at its end
    if start != end:
        scope.smooth()
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


def curve_ticks(scope: Scope, to: Fraction) -> tuple[int, int, int, int]:
    """Return a denominator, and over it the start, the length and the last tick of a curve.

    The last tick is its end, or the end of the scope if that comes first.
    """
    end = scope.end if scope.is_over(Mark(scope.axis, to)) else to
    scale, first, last, stop = over_common_denominator(scope.start, to, to if end is None else end)
    return scale, first, last - first, stop - first


def cosine_left(passed: float) -> float:
    """Return the part of half a cosine wave that is left, from 1 to 0.

    >>> cosine_left(0.0), cosine_left(1.0)
    (1.0, 0.0)
    """
    return (1.0 + math.cos(math.pi * passed)) / 2


READS = "ep ba sp dur"
"""The units that a callable reads by default."""
Column: TypeAlias = tuple[str, int | None]
"""The key of a value in a parameter group, and its index if there are several."""


class Base(NamedTuple):
    """The value that a schedule multiplies: where it is among the groups of an optimizer."""

    groups: Sequence[Mapping[str, Any]]
    """The parameter groups, with their initial values."""
    number: int
    """The index of the group."""
    column: Column
    scheduled: frozenset[Column]
    """All values of the group that are scheduled."""
    made: dict[Any, Any]
    """What schedules have made of these groups, for other schedules of the same groups."""
    measured: Sequence[float] = ()
    """What evaluations have measured so far, for schedules that follow a metric."""


@dataclass(frozen=True, slots=True, repr=False)
class Schedule(Timed):
    """A factor as a pure function of time; multiplies the optimizer's initial value.

    A schedule is a frozen value without state and without `.step()`. `bind` resolves its times on
    one run. The result is read at the timestamp *before* a batch, so the first batch has the value
    of time 0. Before its start and after its end, a schedule is constant.

    All times of a schedule are relative to its *scope*: the run, or the period it is in. A `warmup`
    is a separate period before the schedule:
    `Cosine(warmup="5%")` is `Periods([("5%", Linear(0, 1)), ("rest", Cosine())])`.

    >>> from stretto.schedules import Linear
    >>> factor = Linear(1, 0).bind(Horizon("10ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 5, 10, 11)]
    [1.0, 0.5, 0.0, 0.0]

    A subclass is a frozen dataclass that defines `within`; fields that
    are annotated `Factor`, `Positive`, `Length` or `Interval` are checked.
    """

    error = ScheduleError

    def bind(self, horizon: Horizon) -> BoundSchedule:
        """Return the factor on one run as a function of the timestamp.

        This resolves all times and raises all errors.

        Raises:
            ConversionError: a time needs a fact that is not known; the message names it.
            ScheduleError: the times contradict each other or do not fit into the run.
        """
        return self.within(Scope.of(horizon))

    @abstractmethod
    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over `scope` as a function of the timestamp.

        Raises:
            ConversionError: a time needs a fact that is not known; the message names it.
            ScheduleError: the times contradict each other or do not fit into the scope.
        """

    def on(self, base: Base) -> Schedule:
        """Return the schedule of one value; only wrapped torch schedulers depend on the value.

        Raises:
            ScheduleError: there is no such schedule for that value.
        """
        return self.replaced(lambda one: one.on(base) if isinstance(one, Schedule) else one)

    def reads(self, horizon: Horizon) -> frozenset[TimeUnit]:
        """Return the units that it reads from the clock of a run.

        By default, those of its times, and what the schedules inside it read. A plan leaves out
        schedules that read counts known only during the run.
        """
        own = frozenset(horizon.axis(time.unit).unit for time in self.times())
        return own.union(*(one.reads(horizon) for one in self._inside()))

    def metrics(self) -> frozenset[str]:
        """Return the metrics that it follows, such as `validation/loss`; a plan leaves it out."""
        return frozenset[str]().union(*(one.metrics() for one in self._inside()))

    def borders(self, scope: Scope) -> list[Mark]:
        """Return where its formula changes inside `scope`, as far as known: a plan has rows there.

        Named periods give their names to the marks. By default, where those of the schedules
        inside it change.
        """
        return [mark for one in self._inside() for mark in one.borders(scope)]

    def _inside(self) -> list[Schedule]:
        found: list[Schedule] = []

        def visit(one: object) -> object:
            found.extend([one] if isinstance(one, Schedule) else [])
            return one

        self.replaced(visit)
        return found

    def __mul__(self, other: ScheduleLike) -> Schedule:
        return Product(self, other)

    def __rmul__(self, other: ScheduleLike) -> Schedule:
        return Product(other, self)

    def __add__(self, other: ScheduleLike) -> Schedule:
        return Sum(self, other)

    def __radd__(self, other: ScheduleLike) -> Schedule:
        return Sum(other, self)


class HasFactor(Protocol):
    """An object that is a schedule by its method."""

    def get_factor(self, timer: Timer, /) -> float:
        """Return the factor at the time of a timer."""
        ...


ScheduleLike: TypeAlias = Schedule | float | Callable[[Timer], float] | HasFactor
"""Anything that `as_schedule` reads as a schedule."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class _Several(Schedule):
    """Several schedules as one, each with its own counter."""

    schedules: tuple[Schedule, ...]

    def __init__(self, *schedules: ScheduleLike) -> None:
        if not schedules:
            name = type(self).__name__
            what, instead = f"make a {name.lower()} of no schedules", f"write {name}(Cosine(), 0.5)"
            raise ScheduleError.cannot(what, why="it has at least one", instead=instead)
        fill(self, schedules=tuple(as_schedule(schedule) for schedule in schedules))


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Product(_Several):
    """Several schedules multiplied, each with its own counter; written `a * b`.

    Formula: the product of the factors.

    >>> from stretto.schedules import Linear, StepDecay
    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = (Linear(0, 1, over="4ba") * StepDecay("1ep", 0.5)).bind(Horizon("4ep"))
    >>> [factor(Timestamp(batch=batch, epoch=batch // 6)) for batch in (0, 2, 4, 6, 12)]
    [0.0, 0.5, 1.0, 0.5, 0.25]

    Args:
        schedules: the schedules, or numbers or callables.

    Raises:
        ScheduleError: there is none, or one is not a schedule.
    """

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the product over `scope` as a function of the timestamp."""
        return product_of([schedule.within(scope) for schedule in self.schedules])


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Sum(_Several):
    """Several schedules added, each with its own counter; written `a + b`.

    Formula: the sum of the factors.

    >>> from stretto.schedules import Linear
    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = (Linear(0.5, 0, over="4ba") + Linear(0.5, 0)).bind(Horizon("8ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 2, 4, 8)]
    [1.0, 0.625, 0.25, 0.0]

    Args:
        schedules: the schedules, or numbers or callables.

    Raises:
        ScheduleError: there is none, or one is not a schedule.
    """

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the sum over `scope` as a function of the timestamp."""
        bound = [schedule.within(scope) for schedule in self.schedules]
        return lambda timestamp: _finite(sum([one(timestamp) for one in bound]))


@final
@dataclass(frozen=True, slots=True, repr=False)
class Floor(Schedule):
    """A schedule that never falls below a factor.

    Formula: `max(least, schedule)`; also during a warm-up of the schedule.

    >>> from stretto.schedules import Linear
    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = Floor(Linear(1, 0), 0.25).bind(Horizon("8ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 4, 7, 8)]
    [1.0, 0.5, 0.25, 0.25]

    Args:
        schedule: the schedule, or a number or a callable.
        least: the smallest factor.

    Raises:
        ScheduleError: it is not a schedule, or `least` is not a finite number of at least 0.
    """

    schedule: ScheduleLike
    least: Factor

    def __post_init__(self) -> None:
        check_fields(self)
        fill(self, schedule=as_schedule(self.schedule))

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the larger factor over `scope` as a function of the timestamp."""
        bound, least = as_schedule(self.schedule).within(scope), self.least
        return lambda timestamp: max(bound(timestamp), least)


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Custom(Schedule):
    """A factor from your own callable, which reads the clock.

    The callable gets a `Timer` set to the timestamp: `timer.epoch`, `timer.get("tok")`,
    `timer.get_elapsed_duration()`. It must depend on nothing else, since a plan calls it out of
    order and a resumed run calls it again. `scaled` leaves the callable as it is.

    A plan must know what the callable reads: by default, epochs, batches, samples and the fraction
    of the run. If it reads tokens or wall time, write `Custom(function, reads="tok")`.

    The counters are those of the whole run. Inside `Periods`, `timer.get_current_period_time(unit)`
    and `timer.get_current_period_frac_elapsed()` are those of the period.

    >>> from stretto.timing import Horizon, Timestamp
    >>> def halve_each_epoch(timer: Timer) -> float:
    ...     return 0.5**timer.epoch
    >>> factor = Custom(halve_each_epoch).bind(Horizon("3ep"))
    >>> [factor(Timestamp(epoch=epoch)) for epoch in (0, 1, 2)]
    [1.0, 0.5, 0.25]

    Args:
        function: returns the factor at the time of a timer.
        reads: the units that it reads from the timer, separated by spaces.

    Raises:
        TimeError: `reads` has an unknown unit.
        ScheduleError: the function can't be called; when it is, it does not return a finite number
            of at least 0.
    """

    function: Callable[[Timer], float]
    units: str

    def __init__(self, function: Callable[[Timer], float], reads: str = READS) -> None:
        if not callable(function):
            raise ScheduleError.bad(
                "function", function, "it can't be called", "write a function of the timer"
            )
        fill(self, function=function, units=" ".join(map(parse_unit, reads.split())))

    def reads(self, horizon: Horizon) -> frozenset[TimeUnit]:
        """Return the units that were given."""
        return frozenset(horizon.axis(unit).unit for unit in self.units.split())

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor as a function of the timestamp."""
        function, horizon, passed = self.function, scope.horizon, scope.passed
        warns = _warns_of_steps(scope)

        def value(timestamp: Timestamp) -> float:
            timer = Timer.at(timestamp, horizon, period=passed)
            timer.on_fraction = warns
            return checked_factor(function(timer), function)

        return value

    def __repr__(self) -> str:
        reads = "" if self.units == READS else f", reads={self.units!r}"
        return f"Custom(function={self.function!r}{reads})"


def _warns_of_steps(scope: Scope) -> Callable[[], object] | None:
    """Return what warns once that fractions change only with epochs; None if they do not."""
    try:
        scope.smooth()
    except ConversionError as error:
        text = f"a function of the run's fraction changes only between epochs: {error.message.why}"
        text = f"{text}; {error.message.instead}"
        return cache(partial(warnings.warn, text, PlanWarning, stacklevel=2))
    return None


@dataclass(frozen=True, slots=True, repr=False)
class WarmedUp(Schedule):
    """A schedule with an optional warm-up period."""

    warmup: Length | None = field(default=None, kw_only=True)
    """The duration of the warm-up, or None."""
    warmup_start: Factor = field(default=0.0, kw_only=True)
    """The factor at the start of the warm-up."""

    def first_factor(self) -> float:
        """Return the factor right after the warm-up; by default, 1."""
        return 1.0

    @abstractmethod
    def over_rest(self, rest: Scope, scope: Scope) -> BoundSchedule:
        """Return the schedule after the warm-up, over the `rest` of `scope`."""

    def borders_after(self, rest: Scope, scope: Scope) -> list[Mark]:  # noqa: ARG002
        """Return where its formula changes after the warm-up; by default, nowhere."""
        return []

    def borders(self, scope: Scope) -> list[Mark]:
        """Return the end of the warm-up, and where the formula changes after it."""
        if self.warmup is None:
            return self.borders_after(scope, scope)
        cut = scope.after(Time(self.warmup))
        return [cut, *self.borders_after(scope.part(cut, scope.last), scope)]

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over `scope` as a function of the timestamp.

        Raises:
            ConversionError: a time needs a fact that is not known; the message names it.
            ScheduleError: the warm-up is longer than the scope, or the schedule does not fit.
        """
        if self.warmup is None:
            return self.over_rest(scope, scope)
        cut = scope.after(Time(self.warmup))
        own = scope.on(cut.axis)
        if scope.is_over(cut):
            why = f"the run or period is only '{own.show((own.end or 0) - own.start)}' long"
            instead = "write a shorter one, or a fraction such as '5%'"
            raise ScheduleError.bad("warmup", str(self.warmup), why, instead)
        main = self.over_rest(scope.part(cut, scope.last), scope)
        if cut.tick == own.start:
            return main
        ramp = linear(own, cut.tick, self.warmup_start, self.first_factor())
        read, turn = cut.axis.read, cut.first_tick

        def value(timestamp: Timestamp) -> float:
            return main(timestamp) if read(timestamp) >= turn else ramp(timestamp)

        return value


@final
@dataclass(frozen=True, slots=True, repr=False)
class Constant(WarmedUp):
    """A constant factor, after an optional warm-up.

    Formula: `value`. Source: `torch.optim.lr_scheduler.ConstantLR`; with a warm-up, transformers'
    `get_constant_schedule_with_warmup`.

    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = Constant(warmup="4ba").bind(Horizon("10ba"))
    >>> [factor(Timestamp(batch=batch)) for batch in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]

    Args:
        value: the factor.
        warmup: rise from `warmup_start` to the value over this time first.
        warmup_start: the factor of the first batch of a warm-up.

    Raises:
        ScheduleError: a factor is not finite or is negative, or a time is negative.
        TimeError: a text is not a time.
    """

    value: Factor = 1.0

    def first_factor(self) -> float:
        """Return the factor."""
        return self.value

    def over_rest(self, rest: Scope, scope: Scope) -> BoundSchedule:  # noqa: ARG002 (the same everywhere)
        """Return the factor as a function of the timestamp."""
        constant = self.value

        def value(timestamp: Timestamp) -> float:  # noqa: ARG001
            return constant

        return value


def as_schedule(value: object) -> Schedule:
    """Return `value` as a schedule: numbers become `Constant`, callables `Custom`.

    So does an object with a method `get_factor(timer)`.

    >>> as_schedule(0.5)
    Constant(value=0.5)

    Raises:
        ScheduleError: it is none of these, or the number is not a factor.
    """
    if isinstance(value, Schedule):
        return value
    if is_number(value):
        return Constant(value)  # type: ignore[arg-type]
    is_class = isinstance(value, type)  # probably Cosine instead of Cosine()
    own = None if is_class else getattr(value, "get_factor", None)
    if callable(own):  # the protocol of a schedule that is an object: get_factor(timer)
        return Custom(own)
    if callable(value) and not is_class:
        return Custom(value)
    why = "it is a class" if is_class else "it is not a schedule, a number or a callable"
    instead = "write for example Cosine(warmup='5%'), a number, or a function of the timer"
    if hasattr(value, "get_last_lr"):
        instead = "write from_torch(lambda optimizer: ..., every='1ba') for a scheduler of torch"
    raise ScheduleError.bad("schedule", value, why, instead)


def product_of(bound: Sequence[BoundSchedule]) -> BoundSchedule:
    """Return the product of schedules that are bound to one run."""

    def value(timestamp: Timestamp) -> float:
        product = 1.0
        for factor in bound:
            product *= factor(timestamp)
        return _finite(product)

    return value


def _finite(factor: float) -> float:
    """Return a factor that several schedules make, if it is finite."""
    return factor if factor < math.inf else checked_factor(factor, "the schedules")
