"""`from_torch`: use any torch scheduler as a schedule."""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from stretto.errors import ScheduleError, first_line
from stretto.optim.hyperparameters import INITIAL, plain
from stretto.schedules import BoundSchedule, Schedule
from stretto.schedules.fields import fill
from stretto.schedules.schedule import Base, Column
from stretto.schedules.scope import Scope, over_common_denominator
from stretto.timing import Time, TimeLike, Timestamp

Factory = Callable[[Optimizer], Any]
Cell: TypeAlias = tuple[int, Column]
"""A value: the number of its parameter group, and its column there."""


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class TorchSchedule(Schedule):
    """A torch scheduler as a function of time; made by `from_torch`."""

    factory: Factory
    every: Time
    _read: Callable[[int], float] | None = field(default=None, compare=False)
    """Returns the factor after so many steps; None: no optimizer is known."""

    def __init__(self, factory: Factory, *, every: TimeLike = "1ba") -> None:
        interval = Time(every)
        if not callable(factory):  # a scheduler itself is not
            raise ScheduleError.bad(
                "factory", factory, "it is not a function", "pass a function optimizer -> scheduler"
            )
        if interval.amount <= 0:
            raise ScheduleError.bad("every", str(interval), "it is not positive", "write '1ba'")
        fill(self, factory=factory, every=interval, _read=None)

    def times(self) -> tuple[Time, ...]:
        """Return the interval between steps."""
        return (self.every,)

    def on(self, base: Base) -> Schedule:
        """Return the schedule that steps the scheduler on a copy of these groups.

        Raises:
            ScheduleError: the scheduler cannot be built; or it also sets a value that is not
                scheduled.
        """
        steps, cell = _steps(self.factory, base), (base.number, base.column)
        sets = steps.sets(base.number)
        if base.column not in sets:  # its learning rate stands for the value
            steps, cell = _steps(self.factory, base, base.column), (base.number, _RATE)
        elif base.column == _RATE and sets - base.scheduled:
            key, index = min(sets - base.scheduled, key=str)
            name = "momentum" if key == "betas" and index == 0 else key
            both = f"{{'lr': schedule, {name!r}: schedule}} with one schedule = from_torch(...)"
            instead = f"write {both}, or cycle_momentum=False in OneCycleLR and CyclicLR"
            raise _refused(f"follow {steps.name} for 'lr' alone", f"it sets {name!r}, too", instead)
        found = TorchSchedule(self.factory, every=self.every)
        fill(found, _read=lambda step: steps.factor(step, cell))
        return found

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over `scope` as a function of the timestamp.

        Raises:
            ScheduleError: the scheduler cannot be stepped.
        """
        own = scope.along(self.every.unit)
        scale, start, interval = over_common_denominator(own.start, own.length(self.every))
        read = own.axis.read
        factor = self._read or _relative(self.factory)

        def value(timestamp: Timestamp) -> float:
            passed = max(0, read(timestamp) * scale - start)
            return factor(passed // interval if interval else 0)

        return value

    def __str__(self) -> str:
        return f"a torch scheduler stepped every {self.every}"


_RATE: Column = ("lr", None)


def _steps(factory: Factory, base: Base, column: Column = _RATE) -> _Steps:
    """Return the values of a scheduler, which all schedules of an optimizer share.

    The value in `column` takes the place of the learning rate of its group.
    """
    if (factory, column) not in base.made:
        groups = [dict(group) for group in base.groups]
        for group in groups:
            value = group.get(column[0], group["lr"])
            group["lr"] = value[column[1] or 0] if isinstance(value, tuple) else value
        base.made[factory, column] = _Steps(factory, groups, column[0])
    found: _Steps = base.made[factory, column]
    return found


def _relative(factory: Factory) -> Callable[[int], float]:
    """Return the factors of a scheduler for any optimizer, if they are the same for all."""
    made: list[_Steps] = []

    def factor(step: int) -> float:
        if not made:  # not when it is bound: `on` may come later, with groups that it needs
            made.extend(_Steps(factory, [{"lr": lr, "momentum": 0.9}]) for lr in (1.0, 2.0))
        one, two = (each.factor(step, (0, _RATE)) for each in made)
        if not math.isclose(one, two, rel_tol=1e-9):
            what = f"read {made[0].name} as a factor"
            why = "its learning rates do not depend on the optimizer's, which is not known here"
            instead = (
                "pass base={'lr': 0.1} to plan, or state optimizer.lr in the run file; in a pair "
                "such as Seesaw, write Cosine(end=0.1)"
            )
            raise _refused(what, why, instead)
        return one

    return factor


@final
class _Shadow(Optimizer):
    """The groups of an optimizer without its parameters."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        without = ("params", f"{INITIAL}lr")
        settings = [
            {key: plain(value) for key, value in group.items() if key not in without}
            for group in groups
        ]
        owned = [{**one, "params": [torch.nn.Parameter(torch.zeros(()))]} for one in settings]
        super().__init__(owned, settings[0])


@final
class _Steps:
    """The values of a torch scheduler, stepped on a shadow of an optimizer."""

    def __init__(
        self, factory: Factory, groups: Sequence[Mapping[str, Any]], rate: str = "lr"
    ) -> None:
        optimizer = self._optimizer = _Shadow(groups)
        self._rate = rate  # what the learning rate stands for
        self._base = _numbers(optimizer)
        try:
            self._scheduler = factory(optimizer)
            self._scheduler.step  # noqa: B018  what is not a scheduler is refused here
            is_torchs = isinstance(self._scheduler, LRScheduler)
            if is_torchs and self._scheduler.optimizer is not optimizer:
                raise ValueError("it is a scheduler of another optimizer")
        except Exception as error:
            instead = "return a scheduler of the given optimizer"
            raise _refused("build the torch scheduler", first_line(error), instead) from error
        self.name = type(self._scheduler).__name__
        if isinstance(self._scheduler, ReduceLROnPlateau):
            instead = "let the batch size follow it: Plateau('validation/loss', ...)"
            what = "read ReduceLROnPlateau as a function of time"
            raise _refused(what, "it follows a metric", instead)
        seen = [_numbers(optimizer)]
        with suppress(ScheduleError):  # one step may be more than it has
            seen.append(self._next(0))
        self._values = {
            cell: array("d", [now[cell] for now in seen])
            for cell, base in self._base.items()
            if cell[1] == _RATE or any(now[cell] != base for now in seen)
        }
        """What the scheduler sets, after each number of steps."""
        for cell in self._values:
            for step in range(len(seen)):
                self.factor(step, cell)

    def sets(self, number: int) -> frozenset[Column]:
        """Return what the scheduler sets in a group."""
        return frozenset(column for group, column in self._values if group == number)

    def factor(self, step: int, cell: Cell) -> float:
        """Return a value after `step` steps, relative to the initial one."""
        kept, base, name = self._values[cell], self._base[cell], cell[1][0]
        while step >= len(kept):
            for other, value in self._next(len(kept) - 1).items():
                if other in self._values:
                    self._values[other].append(value)
                elif value != self._base.get(other, value):
                    what = f"follow {self.name} beyond {len(kept) - 2} steps"
                    why = f"it begins to set {other[1][0]!r}, which is not scheduled"
                    raise _refused(what, why, "give that a schedule of its own, not this one's")
        if base == 0 != kept[step]:
            why = "a schedule multiplies the value that the optimizer is built with"
            name = self._rate if cell[1] == _RATE else name
            instead = f"build the optimizer with another {name}, such as {kept[step]:g}"
            raise _refused(f"follow {self.name} from {name}=0 to {kept[step]:g}", why, instead)
        return kept[step] / base if base else 1.0

    def _next(self, done: int) -> dict[Cell, float]:
        with warnings.catch_warnings():
            # This optimizer never steps, and SequentialLR uses what torch deprecates.
            unmeant = "(Detected call of `lr_|The epoch parameter in `)scheduler.step"
            warnings.filterwarnings("ignore", message=unmeant)
            try:
                self._scheduler.step()
            except Exception as error:
                what = f"step the torch scheduler more than {done} times"
                instead = "give it as many steps as the run has intervals"
                raise _refused(what, first_line(error), instead) from error
        return _numbers(self._optimizer)


def _refused(what: str, why: str, instead: str) -> ScheduleError:
    return ScheduleError.cannot(what, why=why, instead=instead)


def _numbers(optimizer: Optimizer) -> dict[Cell, float]:
    """Return every number in the groups of an optimizer."""
    found: dict[Cell, float] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            several = value if isinstance(value, tuple) else (value,)
            if key != "params" and all(type(one) in (int, float) for one in several):
                for index, one in enumerate(several):
                    found[number, (key, index if value is several else None)] = one
    return found


def from_torch(factory: Factory, every: TimeLike = "1ba") -> TorchSchedule:
    """Return a torch scheduler as a schedule: a pure function of time, in any unit.

    The scheduler is built on a copy of the optimizer's parameter groups, and stepped there as
    often as the time requires. So it can be read at any time, backwards too, and has no state to
    save. Each group gets the values that the scheduler sets for it. A scheduler that also sets
    momentum is passed for both: `{"lr": schedule, "momentum": schedule}`. For another
    hyper-parameter, such as `weight_decay`, the value takes the place of the learning rate.

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
        ScheduleError: `factory` is not a function, or `every` is not positive. When it meets an
            optimizer: the scheduler cannot be built, or sets more than is scheduled. When it is
            read: it cannot be stepped so often, or its values need an optimizer.
    """
    return TorchSchedule(factory, every=every)
