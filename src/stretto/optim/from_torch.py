"""`from_torch`: use any torch scheduler as a schedule."""

from __future__ import annotations

import inspect
import math
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stretto.batching.plateau import Metric
from stretto.errors import ScheduleError, first_line
from stretto.optim.hyperparameters import INITIAL, plain
from stretto.schedules import BoundSchedule, Schedule
from stretto.schedules.fields import Interval, check_fields, fill
from stretto.schedules.schedule import Base, Column
from stretto.schedules.scope import Scope, over_common_denominator
from stretto.timing import Time, TimeLike, Timestamp

Factory = Callable[[Optimizer], Any]
Groups: TypeAlias = Sequence[Mapping[str, Any]]
Measured: TypeAlias = Sequence[float] | None
"""The metric in each evaluation so far; None: nothing is followed."""
Cell: TypeAlias = tuple[int, Column]
"""A value: the number of its parameter group, and its column there."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class TorchSchedule(Schedule):
    """A torch scheduler as a function of time; made by `from_torch`."""

    factory: Factory
    every: Interval | None = None
    """The time of a step; None: a batch, or with a monitor an evaluation."""
    monitor: Metric | None = None
    """The metric that each step of the scheduler takes, at an evaluation; None: none."""
    _read: Callable[[Any], float] | None = field(default=None, compare=False, kw_only=True)
    """Returns the factor after so many steps, or now; None: no optimizer is known."""

    def __post_init__(self) -> None:
        if self.monitor is None and self.every is None:
            fill(self, every="1ba")
        check_fields(self)
        if self.monitor is not None and self.every is not None:
            why = "evaluations step a scheduler that follows a metric"
            raise ScheduleError.bad("every", str(self.every), why, "leave one of the two out")
        factory: object = self.factory
        if not callable(factory):  # a scheduler itself is not
            instead = "pass a function optimizer -> scheduler"
            raise ScheduleError.bad("factory", factory, "it is not a function", instead)

    def on(self, base: Base) -> Schedule:
        """Return the schedule that steps the scheduler on a copy of these groups.

        Raises:
            ScheduleError: the scheduler cannot be built; or it also sets a value that is not
                scheduled.
        """
        steps, cell = _steps(self, base), (base.number, base.column)
        sets = steps.sets(base.number)
        if base.column not in sets:  # its learning rate stands for the value
            steps, cell = _steps(self, base, base.column), (base.number, _RATE)
        elif base.column == _RATE and sets - base.scheduled:
            key, index = min(sets - base.scheduled, key=str)
            name = "momentum" if key == "betas" and index == 0 else key
            both = f"{{'lr': schedule, {name!r}: schedule}} with one schedule = from_torch(...)"
            instead = f"write {both}, or cycle_momentum=False in OneCycleLR and CyclicLR"
            raise _refused(f"follow {steps.name} for 'lr' alone", f"it sets {name!r}, too", instead)
        if self.monitor is not None:
            return replace(self, _read=lambda _: steps.factor(len(base.measured), cell))
        return replace(self, _read=lambda step: steps.factor(step, cell))

    def metrics(self) -> frozenset[str]:
        """Return the metric that it follows, or none."""
        return frozenset() if self.monitor is None else frozenset({self.monitor})

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over `scope` as a function of the timestamp.

        Raises:
            ScheduleError: the scheduler cannot be stepped.
        """
        if self.monitor is not None and self._read is not None:
            return self._read
        every = Time(self.every or "1ba")
        own = scope.along(every.unit)
        scale, start, interval = over_common_denominator(own.start, own.length(every))
        read = own.axis.read
        factor = self._read or _relative(self.factory)

        def value(timestamp: Timestamp) -> float:
            passed = max(0, read(timestamp) * scale - start)
            return factor(passed // interval if interval else 0)

        return value

    def __str__(self) -> str:
        when = f"every {self.every}" if self.monitor is None else f"with {self.monitor!r}"
        return f"a torch scheduler stepped {when}"


_RATE: Column = ("lr", None)


def _steps(schedule: TorchSchedule, base: Base, column: Column = _RATE) -> _Steps:
    """Return the values of a scheduler, which all schedules of an optimizer share.

    The value in `column` takes the place of the learning rate of its group.
    """
    key = id(schedule.factory), schedule.monitor, column  # one of a run file has no hash
    if key not in base.made:
        groups = [dict(group) for group in base.groups]
        for group in groups:
            value = group.get(column[0], group["lr"])
            group["lr"] = value[column[1] or 0] if isinstance(value, tuple) else value
        measured = None if schedule.monitor is None else base.measured
        base.made[key] = _Steps(schedule.factory, groups, column[0], measured)
    found: _Steps = base.made[key]
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

    def __init__(self, groups: Groups) -> None:
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
        self, factory: Factory, groups: Groups, rate: str = "lr", measured: Measured = None
    ) -> None:
        optimizer = self._optimizer = _Shadow(groups)
        self._rate = rate  # what the learning rate stands for
        self._measured = measured  # what each step takes; None: nothing
        self._base = _numbers(optimizer)
        self._values = {cell: array("d") for cell in self._base if cell[1] == _RATE}
        """What the scheduler sets, after each number of steps."""
        self._count = 0
        try:
            self._scheduler = factory(optimizer)
            takes = inspect.signature(self._scheduler.step).parameters.values()
            follows = any(
                one.default is one.empty and one.kind < one.VAR_POSITIONAL for one in takes
            )
            is_torchs = isinstance(self._scheduler, LRScheduler)
            if is_torchs and self._scheduler.optimizer is not optimizer:
                raise ValueError("it is a scheduler of another optimizer")
        except Exception as error:
            instead = "return a scheduler of the given optimizer"
            raise _refused("build the torch scheduler", first_line(error), instead) from error
        self.name = type(self._scheduler).__name__
        if follows is (measured is None):
            why, instead = "its step() takes no metric", "leave monitor out"
            if follows:
                why = "it follows a metric, which is measured during the run"
                instead = (
                    "write monitor='validation/loss', for 'lr' or another value of an optimizer"
                )
            raise _refused(f"step {self.name}", why, instead)
        self._record()
        if follows:
            return
        try:
            self._step()
        except ScheduleError:
            return  # one step may be more than it has
        self._record()

    def sets(self, number: int) -> frozenset[Column]:
        """Return what the scheduler sets in a group."""
        return frozenset(column for group, column in self._values if group == number)

    def factor(self, step: int, cell: Cell) -> float:
        """Return a value after `step` steps, relative to the initial one."""
        while step >= self._count:
            self._step()
            self._record()
        base = self._base[cell]
        return self._values[cell][step] / base if base else 1.0

    def _record(self) -> None:
        """Keep the present values; what is set from the first step on counts as scheduled."""
        for cell, value in _numbers(self._optimizer).items():
            base, (key, _) = self._base.get(cell, value), cell[1]
            if cell not in self._values and value != base:
                if self._count > (self._measured is None):
                    what = f"follow {self.name} beyond {self._count - 1} steps"
                    why = f"it begins to set {key!r}, which is not scheduled"
                    raise _refused(what, why, "give that a schedule of its own, not this one's")
                self._values[cell] = array("d", [base] * self._count)
            if cell not in self._values:
                continue
            if base == 0 != value:
                why = "a schedule multiplies the value that the optimizer is built with"
                name = self._rate if cell[1] == _RATE else key
                instead = f"build the optimizer with another {name}, such as {value:g}"
                raise _refused(f"follow {self.name} from {name}=0 to {value:g}", why, instead)
            self._values[cell].append(value)
        self._count += 1

    def _step(self) -> None:
        with warnings.catch_warnings():
            # This optimizer never steps, and SequentialLR uses what torch deprecates.
            unmeant = "(Detected call of `lr_|The epoch parameter in `)scheduler.step"
            warnings.filterwarnings("ignore", message=unmeant)
            try:
                taken = () if self._measured is None else (self._measured[self._count - 1],)
                self._scheduler.step(*taken)
            except Exception as error:
                what = f"step the torch scheduler more than {self._count - 1} times"
                instead = "give it as many steps as the run has intervals"
                raise _refused(what, first_line(error), instead) from error


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


def from_torch(
    factory: Factory, every: TimeLike | None = None, *, monitor: str | None = None
) -> TorchSchedule:
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

    A scheduler that follows a metric, `from_torch(ReduceLROnPlateau, monitor="validation/loss")`,
    is stepped by each evaluation of the run that measures it, as `Plateau` is for the batch size.
    Checkpoints keep what was measured, and a plan leaves its values out. A loop of your own passes
    the metric: `run.finish(signals=Signals(metric=...))`, or after it, `run.loader.note_metric`.

    Args:
        factory: makes a scheduler for a given optimizer.
        every: the time of one `step()`; by default, `1ba`.
        monitor: the metric that `step()` takes: an evaluation and what it measures.

    Raises:
        ScheduleError: `factory` is not a function, `every` is not positive, or there is a monitor,
            too. When it meets an optimizer: the scheduler cannot be built, or sets more than is
            scheduled, or follows a metric and has no monitor. When it is read: it cannot be stepped
            so often, or its values need an optimizer.
    """
    return TorchSchedule(factory, every=every, monitor=monitor)
