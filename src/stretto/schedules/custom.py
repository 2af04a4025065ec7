"""`Custom`: your own callable as a schedule; `as_schedule`: anything as a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from stretto.errors import ScheduleError, shown
from stretto.schedules.arguments import checked_factor, factor
from stretto.schedules.constant import Constant
from stretto.schedules.schedule import BoundSchedule, Schedule, fill
from stretto.schedules.scope import Scope
from stretto.timing import Horizon, Time, Timer, Timestamp, TimeUnit
from stretto.timing.number import is_number
from stretto.timing.unit import parse_unit

READS = "ep ba sp dur"
"""The units that a callable reads by default."""


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
            raise ScheduleError.cannot(
                f"use {shown(function)} as a custom schedule",
                why="it can't be called",
                instead="write a function of the timer, such as lambda timer: 0.5**timer.epoch",
            )
        fill(self, function=function, units=" ".join(map(parse_unit, reads.split())))

    def times(self) -> tuple[Time, ...]:
        """Return no times: the callable reads the clock itself."""
        return ()

    def reads(self, horizon: Horizon) -> frozenset[TimeUnit]:
        """Return the units that were given."""
        return frozenset(horizon.axis(unit).unit for unit in self.units.split())

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor as a function of the timestamp."""
        function, horizon, clock = self.function, scope.horizon, scope.clock

        def value(timestamp: Timestamp) -> float:
            return checked_factor(function(Timer.at(timestamp, horizon, period=clock)), function)

        return value

    def __repr__(self) -> str:
        reads = "" if self.units == READS else f", reads={self.units!r}"
        return f"Custom(function={self.function!r}{reads})"

    def __str__(self) -> str:
        return f"custom {getattr(self.function, '__name__', type(self.function).__name__)}"


def as_schedule(value: object) -> Schedule:
    """Return `value` as a schedule: numbers become `Constant`, callables `Custom`.

    >>> as_schedule(0.5)
    Constant(value=0.5)

    Raises:
        ScheduleError: it is none of these, or the number is not a factor.
    """
    if isinstance(value, Schedule):
        return value
    if is_number(value):
        return Constant(factor(value, "value"))
    is_class = isinstance(value, type)  # probably Cosine instead of Cosine()
    if callable(value) and not is_class:
        return Custom(value)
    raise ScheduleError.cannot(
        f"use {shown(value)} as a schedule",
        why="it is a class" if is_class else "it is not a schedule, a number or a callable",
        instead="write a schedule such as Cosine(warmup='5%'), a number, or a function of the "
        "timer",
    )
