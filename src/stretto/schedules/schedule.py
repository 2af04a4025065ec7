"""`Schedule`: a factor as a pure function of time."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Self, TypeAlias

from stretto.errors import ScheduleError, shown
from stretto.schedules.scope import RunScope, Scope
from stretto.timing import Horizon, Time, Timer, Timestamp, TimeUnit
from stretto.timing.conversion import rounded
from stretto.timing.number import exact
from stretto.timing.time import Number

BoundSchedule: TypeAlias = Callable[[Timestamp], float]
"""A schedule on one run: the factor at a timestamp."""


@dataclass(frozen=True, slots=True, repr=False)
class Schedule(ABC):
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

    A subclass is a frozen dataclass that defines `times` and `within`.
    """

    def bind(self, horizon: Horizon) -> BoundSchedule:
        """Return the factor on one run as a function of the timestamp.

        This resolves all times and raises all errors.

        Raises:
            ConversionError: a time needs a fact that is not known; the message names it.
            ScheduleError: the times contradict each other or do not fit into the run.
        """
        return self.within(RunScope(horizon))

    @abstractmethod
    def times(self) -> tuple[Time, ...]:
        """Return the times that must be placed on one axis.

        A time in `dur` means that the end of the scope must be placed there, too.
        """

    @abstractmethod
    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over `scope` as a function of the timestamp.

        Raises:
            ConversionError: a time needs a fact that is not known; the message names it.
            ScheduleError: the times contradict each other or do not fit into the scope.
        """

    def reads(self, horizon: Horizon) -> frozenset[TimeUnit]:
        """Return the units that it reads from the clock of a run; by default, those of its times.

        A plan leaves out schedules that read counts known only during the run.
        """
        return frozenset(horizon.axis(time.unit).unit for time in self.times())

    def scaled(self, ratio: Number) -> Self:
        """Return the schedule with all times multiplied by `ratio`; scale the horizon, too.

        Fractions (`dur`, `%`) are unchanged, since they scale with the run. Batches, samples and
        tokens are rounded up to whole numbers, as in `Horizon.scaled`.

        >>> from stretto.schedules import MultiStep
        >>> MultiStep(["30ep", "75%"]).scaled(0.5).milestones
        (Time('15ep'), Time('0.75dur'))

        Raises:
            ScheduleError: the ratio is not positive.
            TimeError: the ratio is not a finite number.
        """
        factor = exact(ratio)
        if factor <= 0:
            raise ScheduleError.cannot(
                f"scale a schedule by {shown(ratio)}",
                why="a time can't be stretched to nothing",
                instead="write a ratio above 0 such as 0.5",
            )
        copy: Self = object.__new__(type(self))
        fill(copy, **{f.name: _stretched(getattr(self, f.name), factor) for f in fields(self)})
        return copy

    def __mul__(self, other: ScheduleLike) -> Schedule:
        from stretto.schedules.product import Product  # a product is itself a schedule

        return Product(self, other)

    def __rmul__(self, other: ScheduleLike) -> Schedule:
        from stretto.schedules.product import Product

        return Product(other, self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(_arguments(self))})"


ScheduleLike: TypeAlias = Schedule | float | Callable[[Timer], float]
"""Anything that `as_schedule` reads as a schedule."""


def fill(schedule: Schedule, **values: object) -> None:
    """Set the fields of a frozen schedule while it is built."""
    for name, value in values.items():
        object.__setattr__(schedule, name, value)


def _stretched(value: object, ratio: Fraction) -> object:
    if isinstance(value, Time) and value.unit is not TimeUnit.DURATION:
        return rounded(value.amount * ratio, value.unit)
    if isinstance(value, Schedule):
        return value.scaled(ratio)
    if isinstance(value, tuple):
        return tuple(_stretched(item, ratio) for item in value)
    return value


def _arguments(schedule: Schedule) -> Iterator[str]:
    """Return the constructor's arguments that differ from the defaults, as source."""
    for name, parameter in inspect.signature(type(schedule)).parameters.items():
        value = getattr(schedule, name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield from map(repr, value)
        elif value != parameter.default:
            yield f"{name}={value!r}"
