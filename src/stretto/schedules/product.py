"""`Product`: several schedules multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from stretto.errors import ScheduleError
from stretto.schedules.custom import as_schedule
from stretto.schedules.schedule import BoundSchedule, Schedule, ScheduleLike, fill
from stretto.schedules.scope import Scope
from stretto.timing import Horizon, Time, Timestamp, TimeUnit


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Product(Schedule):
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

    schedules: tuple[Schedule, ...]

    def __init__(self, *schedules: ScheduleLike) -> None:
        if not schedules:
            raise ScheduleError.cannot(
                "multiply no schedules",
                why="a product has at least one factor",
                instead="write Product(Cosine(), StepDecay('1ep'))",
            )
        fill(self, schedules=tuple(as_schedule(schedule) for schedule in schedules))

    def times(self) -> tuple[Time, ...]:
        """Return the times of all the schedules."""
        return tuple(time for schedule in self.schedules for time in schedule.times())

    def reads(self, horizon: Horizon) -> frozenset[TimeUnit]:
        """Return what any of the schedules reads."""
        return frozenset[TimeUnit]().union(*(one.reads(horizon) for one in self.schedules))

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the product over `scope` as a function of the timestamp."""
        return product_of([schedule.within(scope) for schedule in self.schedules])

    def __str__(self) -> str:
        return " times ".join(f"({schedule})" for schedule in self.schedules)


def product_of(bound: Sequence[BoundSchedule]) -> BoundSchedule:
    """Return the product of schedules that are bound to one run."""

    def value(timestamp: Timestamp) -> float:
        product = 1.0
        for factor in bound:
            product *= factor(timestamp)
        return product

    return value
