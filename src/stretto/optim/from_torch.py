"""`from_torch`: use any torch scheduler as a schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stretto.errors import ScheduleError, first_line
from stretto.schedules import BoundSchedule, Schedule
from stretto.schedules.fields import fill
from stretto.schedules.scope import Scope, integers
from stretto.timing import Time, TimeLike, Timestamp

Factory = Callable[[Optimizer], Any]

_KEPT = 4096
"""Number of recent values that are cached; earlier steps restart the scheduler."""


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class TorchSchedule(Schedule):
    """A torch scheduler as a function of time; made by `from_torch`."""

    factory: Factory
    every: Time

    def __init__(self, factory: Factory, *, every: TimeLike = "1ba") -> None:
        interval = Time(every)
        if not callable(factory):  # a scheduler itself is not
            raise ScheduleError.bad(
                "factory", factory, "it is not a function", "pass a function optimizer -> scheduler"
            )
        if interval.amount <= 0:
            raise ScheduleError.bad("every", str(interval), "it is not positive", "write '1ba'")
        fill(self, factory=factory, every=interval)

    def times(self) -> tuple[Time, ...]:
        """Return the interval between steps."""
        return (self.every,)

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over `scope` as a function of the timestamp.

        Raises:
            ScheduleError: the scheduler cannot be built or stepped.
        """
        span = scope.span().along(self.every.unit)
        scale, start, interval = integers(span.start, span.length(self.every))
        read = span.axis.read
        steps = _SchedulerValues(self.factory)

        def value(timestamp: Timestamp) -> float:
            passed = max(0, read(timestamp) * scale - start)
            return steps.factor(passed // interval if interval else 0)

        return value

    def __str__(self) -> str:
        return f"a torch scheduler stepped every {self.every}"


@final
class _SchedulerValues:
    """The factors of a torch scheduler, stepped on a separate optimizer."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._begin()

    def factor(self, step: int) -> float:
        """Return the learning rate after `step` steps, relative to the initial one."""
        if step < self._first:
            self._begin()
        while step >= self._first + len(self._values):
            self._advance()
        return self._values[step - self._first]

    def _begin(self) -> None:
        parameter = torch.nn.Parameter(torch.zeros(()))
        self._optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
        try:
            self._scheduler = self._factory(self._optimizer)
            self._scheduler.step  # noqa: B018  what is not a scheduler is refused here
        except Exception as error:
            raise ScheduleError.cannot(
                "build the torch scheduler",
                why=first_line(error),
                instead="return a scheduler of the given optimizer",
            ) from error
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise ScheduleError.cannot(
                "read ReduceLROnPlateau as a function of time",
                why="it follows a metric",
                instead="let the batch size follow it: Plateau('validation/loss', ...)",
            )
        self._first = 0
        self._values = [self._now()]

    def _advance(self) -> None:
        with warnings.catch_warnings():
            # This optimizer never steps; only its learning rate is read.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            try:
                self._scheduler.step()
            except Exception as error:
                done = self._first + len(self._values) - 1
                raise ScheduleError.cannot(
                    f"step the torch scheduler more than {done} times",
                    why=first_line(error),
                    instead="give it as many steps as the run has intervals",
                ) from error
        self._values.append(self._now())
        if len(self._values) > 2 * _KEPT:
            del self._values[:_KEPT]
            self._first += _KEPT

    def _now(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def from_torch(factory: Factory, every: TimeLike = "1ba") -> TorchSchedule:
    """Return a torch scheduler as a schedule: a pure function of time, in any unit.

    The scheduler is built on a separate optimizer with a learning rate of 1 and stepped there, as
    often as the time requires. So it can be read at any time, backwards too, and has no state to
    save. Its learning rate is the factor. For a scheduler with absolute learning rates, write them
    relative to the optimizer's: `OneCycleLR(max_lr=1.0)` peaks at the base learning rate.

    >>> from torch.optim.lr_scheduler import StepLR
    >>> from stretto.timing import Horizon
    >>> schedule = from_torch(lambda optimizer: StepLR(optimizer, step_size=2), every="1ep")
    >>> factor = schedule.bind(Horizon("6ep"))
    >>> [round(factor(Timestamp(epoch=epoch)), 3) for epoch in (0, 1, 2, 5, 2)]
    [1.0, 1.0, 0.1, 0.01, 0.1]

    Args:
        factory: makes a scheduler for a given optimizer.
        every: the time of one `step()`.

    `ReduceLROnPlateau` depends on a metric, not on time, so it is refused. A batch size can depend
    on a metric: see `Plateau`.

    Raises:
        ScheduleError: `factory` is not a function, or `every` is not positive. When it is bound:
            the scheduler cannot be built; when it is read: it cannot be stepped so often.
    """
    return TorchSchedule(factory, every=every)
