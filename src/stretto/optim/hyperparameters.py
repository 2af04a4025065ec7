"""`Hyperparameters`: one call sets everything that is scheduled in an optimizer."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from stretto.batching import LearningRateRule, NoRule, RuleLike, as_rule, check_pairs
from stretto.errors import ScheduleError, cannot, shown
from stretto.schedules import BoundSchedule, Product, Schedule, as_schedule
from stretto.timing import Horizon, Timestamp


@final
@dataclass(frozen=True, slots=True)
class _Setting:
    """One value in one parameter group: its base, times a factor, times the rule's."""

    number: int
    key: str
    base: Any
    factor: BoundSchedule
    follows_rule: bool


@final
class Hyperparameters:
    """Sets an optimizer's hyper-parameters for a time: base value times the schedules' factors.

    The base is what the optimizer was built with; it is read once, here, so build this before an
    optimizer's saved state is loaded. Nothing is multiplied in place and nothing is remembered:
    a value is a function of the time and the batch size.

    >>> import torch
    >>> from stretto.schedules import Linear
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> hyperparameters = Hyperparameters(optimizer, {"lr": Linear(1, 0)}, Horizon("10ba"))
    >>> hyperparameters.apply(Timestamp(batch=5))
    >>> optimizer.param_groups[0]["lr"]
    0.25

    Args:
        optimizer: its parameter groups are written to.
        schedules: by name, a schedule (or a number, or a callable of the timer) or several that
            multiply. A name is a key of the parameter groups (`"lr"`, `"weight_decay"`,
            `"momentum"`, `"betas"`, which sets each of them); `"lr@embeddings"` is only for the
            group that has `name="embeddings"`, `"lr@1"` only for the second group, and multiplies
            what `"lr"` says for all.
        horizon: the run.
        rule: how learning rates follow the batch size: `{"sqrt": 256}`, `LinearRule(256)`, a
            function `size -> factor`; None: not at all.

    Raises:
        ScheduleError: there is no such hyper-parameter or group, a schedule does not fit the run,
            or they are not given by name.
        BatchSizeError: the rule cannot be read; or there is a rule, and a schedule that goes by
            the batch size already.
        ConversionError: a time needs a fact that is not known.
    """

    __slots__ = ("_base", "_columns", "_only", "_optimizer", "_rule", "_schedules", "_settings")

    def __init__(
        self,
        optimizer: Optimizer,
        schedules: Mapping[str, Any],
        horizon: Horizon,
        *,
        rule: RuleLike | None = None,
    ) -> None:
        _check_kinds(schedules)
        self._rule = NoRule() if rule is None else as_rule(rule)
        # Its groups are looked up each time: loading a state puts new ones in their place.
        self._optimizer = optimizer
        groups = optimizer.param_groups
        _part_tensors(groups)
        factors = {name: _one(value) for name, value in schedules.items()}
        check_pairs(factors, rule=self._rule)
        for name in factors:
            _check(name, groups)
        if "lr" in groups[0]:
            # Set even where nothing moves it: else a resumed run would keep the rate it was saved
            # with, whatever its optimizer is now built with and its plan says.
            factors = {"lr": as_schedule(1.0), **factors}
        self._settings = [
            _setting(number, group[key], key, factor.bind(horizon))
            for number, group in enumerate(groups)
            for key, factor in _of_group(factors, number, group).items()
        ]
        self._columns = _columns(factors, groups)
        self._schedules = {
            name: _of_group(factors, number, groups[number])[key]
            for name, (number, key) in self._columns.items()
        }
        self._base = {
            name: _number(groups[number][key]) for name, (number, key) in self._columns.items()
        }
        alone = self._settings[0] if len(self._settings) == 1 else None
        self._only = alone if alone is not None and _is_plain(alone, groups, self._rule) else None

    @property
    def schedules(self) -> dict[str, Schedule]:
        """What the learning rate and all that is scheduled follow, multiplied: for a plan."""
        return dict(self._schedules)

    @property
    def base(self) -> dict[str, float]:
        """What the optimizer was built with, by name."""
        return dict(self._base)

    @property
    def rule(self) -> LearningRateRule:
        """How learning rates answer to the batch size."""
        return self._rule

    def apply(self, timestamp: Timestamp, batch_size: int | None = None) -> None:
        """Set every scheduled value for the batch that starts at `timestamp`.

        Args:
            timestamp: the clock before the batch.
            batch_size: the size that the policy decided for it; a learning rate rule needs it.

        Raises:
            ScheduleError: there is a rule and no batch size.
        """
        only = self._only
        if only is not None:
            groups = self._optimizer.param_groups
            groups[only.number][only.key] = only.base * only.factor(timestamp)
            return
        rule = 1.0
        if not isinstance(self._rule, NoRule):
            rule = self._rule(_given(batch_size))
        for setting in self._settings:
            group = self._optimizer.param_groups[setting.number]
            _set(group, setting, setting.factor(timestamp), rule if setting.follows_rule else 1.0)

    def values(self) -> dict[str, float]:
        """Return the values in force: the learning rate, and whatever else is scheduled.

        A name without a group shows the first group's value; of `betas`, the first.
        """
        groups = self._optimizer.param_groups
        return {name: _number(groups[number][key]) for name, (number, key) in self._columns.items()}


def _part_tensors(groups: Sequence[dict[str, Any]]) -> None:
    """Give each group its own tensors: torch hands all of them the one that it was given."""
    seen: set[int] = set()
    for group in groups:
        for key, value in group.items():
            if isinstance(value, Tensor) and id(value) in seen:
                group[key] = value.clone()
        seen.update(id(value) for value in group.values() if isinstance(value, Tensor))


def _one(value: Any) -> Schedule:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Product(*value)
    return as_schedule(value)


def _check_kinds(schedules: Any) -> None:
    if not isinstance(schedules, Mapping):
        raise ScheduleError(
            cannot(
                f"read {shown(schedules)} as schedules",
                why="it does not say what each is for",
                instead="write {'lr': ...}",
            )
        )


def _check(name: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a name that no parameter group has."""
    key, _, group = name.partition("@")
    keys = [
        key for key in groups[0] if key not in ("params", "name") and _is_settable(groups[0], key)
    ]
    if key not in keys:
        close = difflib.get_close_matches(key, keys, 1, 0.4)
        close = ["lr"] if key.lower() in ("learning_rate", "learningrate") else close
        raise ScheduleError(
            cannot(
                f"schedule {name!r}",
                why=f"the optimizer has no such number (it has {', '.join(keys)})",
                instead=f"write {close[0]!r}" if close else "write one of those",
            )
        )
    names = [_name(number, other) for number, other in enumerate(groups)]
    if group and group not in names:
        raise ScheduleError(
            cannot(
                f"schedule {name!r}",
                why=f"the optimizer has no such parameter group (it has {', '.join(names)})",
                instead=f"write '{key}@{names[0]}', or give the group that name",
            )
        )


def _is_settable(group: Mapping[str, Any], key: str) -> bool:
    value = group[key]
    if isinstance(value, tuple):
        return all(isinstance(item, (int, float, Tensor)) for item in value)
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def _name(number: int, group: Mapping[str, Any]) -> str:
    return str(group.get("name", number))


def _of_group(
    factors: Mapping[str, Schedule], number: int, group: Mapping[str, Any]
) -> dict[str, Schedule]:
    """What each key of one group follows: the schedule for all, times the group's own."""
    found: dict[str, list[Schedule]] = {}
    for name, factor in factors.items():
        key, _, wanted = name.partition("@")
        if not wanted or wanted == _name(number, group):
            found.setdefault(key, []).append(factor)
    return {key: each[0] if len(each) == 1 else Product(*each) for key, each in found.items()}


def _setting(number: int, base: Any, key: str, factor: BoundSchedule) -> _Setting:
    if isinstance(base, Tensor):
        base = float(base)
    elif isinstance(base, tuple):
        base = tuple(float(item) for item in base)
    return _Setting(number, key, base, factor, key == "lr")


def _set(group: dict[str, Any], setting: _Setting, factor: float, rule: float) -> None:
    if isinstance(setting.base, tuple):
        group[setting.key] = tuple(base * factor for base in setting.base)
        return
    value = setting.base * factor * rule
    current = group[setting.key]
    if isinstance(current, Tensor):
        current.fill_(value)  # a compiled or captured step reads this very tensor
    else:
        group[setting.key] = value


def _is_plain(
    setting: _Setting, groups: Sequence[Mapping[str, Any]], rule: LearningRateRule
) -> bool:
    """Whether setting it is one multiplication: the common case, twice as fast by itself."""
    current = groups[setting.number][setting.key]
    return isinstance(current, (int, float)) and isinstance(rule, NoRule)


def _columns(
    factors: Mapping[str, Schedule], groups: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[int, str]]:
    """Where the value of each name stands: the number of a group and a key in it."""
    numbers = {_name(number, group): number for number, group in enumerate(groups)}
    columns = {"lr": (0, "lr")} if "lr" in groups[0] else {}
    for name in factors:
        key, _, group = name.partition("@")
        columns[name] = (numbers[group] if group else 0, key)
    return columns


def _number(value: Any) -> float:
    if isinstance(value, tuple):
        value = value[0]
    return float(value)


def _given(batch_size: int | None) -> int:
    if batch_size is None:
        raise ScheduleError(
            cannot(
                "apply a learning rate rule",
                why="the batch size was not given",
                instead="write apply(step.timestamp, step.batch_size)",
            )
        )
    return batch_size
