"""`Hyperparameters`: one call sets everything that is scheduled in an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch import Tensor
from torch.optim import Optimizer

from stretto.batching import LearningRateRule, NoRule, RuleLike, as_rule, check_pairs
from stretto.errors import ScheduleError
from stretto.optim.base_values import BaseValue, plain, restore_base_values, write
from stretto.optim.joined import each_of
from stretto.optim.reading import group_name, read_schedules
from stretto.schedules import BoundSchedule, Product, Schedule, as_schedule
from stretto.schedules.names import parse_name
from stretto.schedules.schedule import product_of
from stretto.timing import Horizon, Timestamp


@final
@dataclass(frozen=True, slots=True)
class _Setting:
    """One value in one parameter group: its base, times its factors, times the rule's."""

    number: int
    key: str
    base: BaseValue
    factors: tuple[BoundSchedule, ...]
    """One; of what has several values (`betas`), one for each."""
    follows_rule: bool

    def at(self, timestamp: Timestamp, rule: float) -> Any:
        """Return the value at a time."""
        value = self.base.value
        if isinstance(value, tuple):
            return tuple([one * at(timestamp) for one, at in zip(value, self.factors, strict=True)])
        factor = self.factors[0](timestamp)
        return value * factor * rule if self.follows_rule else value * factor


class _Factor(NamedTuple):
    """A schedule, and the same bound to the run."""

    schedule: Schedule
    bound: BoundSchedule


@final
@dataclass(frozen=True, slots=True)
class _Column:
    """The place of a named value, and its schedule."""

    number: int
    key: str
    index: int | None
    factor: _Factor


@final
class Hyperparameters:
    """Sets an optimizer's hyper-parameters for a time: base value times the schedules' factors.

    The base is what the optimizer was built with. It is read here, so build this before an
    optimizer's saved state is loaded. Nothing is multiplied in place: a value is a function of the
    time and the batch size.

    Building it again for the same optimizer (a retry, another run) starts from the same base: what
    schedules have written is taken back first, in every group and for every key. A value that you
    set yourself in between is the new base.

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
            multiply. A name is a key of the parameter groups: `"lr"`, `"weight_decay"`,
            `"momentum"`. `"betas"` multiplies each of the betas, `"betas.0"` only the first;
            `"momentum"` is that first one where an optimizer has betas and no momentum (Adam), as
            in torch's `OneCycleLR`. `"lr@embeddings"` is only for the group that has
            `name="embeddings"`, `"lr@1"` only for the second group, and multiplies what `"lr"`
            says for all.
        horizon: the run.
        rule: how learning rates follow the batch size: `{"sqrt": 256}`, `LinearRule(256)`, a
            function `size -> factor`; None: not at all.
        bound: those schedules that `prepare` has bound to the run; the others are bound here.

    Raises:
        ScheduleError: there is no such hyper-parameter or group, a schedule does not fit the run,
            or they are not given by name.
        BatchSizeError: the rule cannot be read; or there is a rule, and a schedule that goes by
            the batch size already.
        ConversionError: a time needs a fact that is not known.
    """

    __slots__ = ("_columns", "_only", "_settings", "base", "optimizer", "rule")

    def __init__(
        self,
        optimizer: Optimizer,
        schedules: Mapping[str, Any],
        horizon: Horizon,
        *,
        rule: RuleLike | None = None,
        bound: Mapping[str, BoundSchedule] | None = None,
    ) -> None:
        factors = read_schedules(optimizer, schedules)
        self.rule: LearningRateRule = NoRule() if rule is None else as_rule(rule)
        """How learning rates follow the batch size."""
        # Its groups are looked up each time: loading a state puts new ones in their place.
        self.optimizer = optimizer
        """What is written to."""
        groups = optimizer.param_groups
        _part_tensors(groups)
        check_pairs(factors, rule=self.rule)
        known = bound or {}
        each = {
            name: _Factor(factor, known[name] if name in known else factor.bind(horizon))
            for name, factor in factors.items()
        }
        followed = [_of_group(each, number, group) for number, group in enumerate(groups)]
        # The initial values of each group, and its number in its own optimizer.
        bases = [
            (number, record)
            for one in each_of(optimizer)
            for record in [restore_base_values(one)]
            for number in range(len(one.param_groups))
        ]
        self._settings = [
            _Setting(
                number,
                key,
                record.setdefault((own, key), BaseValue(plain(group[key]))),
                tuple(_product(factors).bound for factors in by_index.values()),
                follows_rule=key == "lr",
            )
            for number, (group, (own, record)) in enumerate(zip(groups, bases, strict=True))
            for key, by_index in followed[number].items()
        ]
        self._columns = {name: _column(name, followed, groups) for name in each}
        self.base = self.values()
        """The initial values of the optimizer, by name."""
        # Setting it is one multiplication: the common case, twice as fast by itself.
        first = self._settings[0] if len(self._settings) == 1 else None
        is_plain = first is not None and isinstance(groups[first.number][first.key], (int, float))
        self._only = first if is_plain and isinstance(self.rule, NoRule) else None

    @property
    def schedules(self) -> dict[str, Schedule]:
        """What the learning rate and all that is scheduled follow, multiplied: for a plan."""
        return {name: column.factor.schedule for name, column in self._columns.items()}

    @property
    def bound(self) -> Mapping[str, tuple[Schedule, BoundSchedule]]:
        """The same, each with what it is when bound to the run."""
        return {name: column.factor for name, column in self._columns.items()}

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
            value = only.base.value * only.factors[0](timestamp)
            self.optimizer.param_groups[only.number][only.key] = only.base.written = value
            return
        rule = 1.0
        if not isinstance(self.rule, NoRule):
            if batch_size is None:
                raise ScheduleError.cannot(
                    "apply a learning rate rule",
                    why="the batch size was not given",
                    instead="write apply(step.timestamp, step.batch_size)",
                )
            rule = self.rule(batch_size)
        for setting in self._settings:
            setting.base.written = value = setting.at(timestamp, rule)
            write(self.optimizer.param_groups[setting.number], setting.key, value)

    def row(self) -> list[float]:
        """Return the present values without names, in the order of `values`."""
        found, groups = [], self.optimizer.param_groups
        for column in self._columns.values():
            value = groups[column.number][column.key]
            found.append(float(value if column.index is None else value[column.index]))
        return found

    def values(self) -> dict[str, float]:
        """Return the present values: the learning rate and all scheduled ones.

        A name without a group shows the first group's value; of `betas`, the first.
        """
        return dict(zip(self._columns, self.row(), strict=True))


def _part_tensors(groups: Sequence[dict[str, Any]]) -> None:
    """Give each group its own tensors: torch hands all of them the one that it was given."""
    seen: set[int] = set()
    for group in groups:
        for key, value in group.items():
            if isinstance(value, Tensor) and id(value) in seen:
                group[key] = value.clone()
        seen.update(id(value) for value in group.values() if isinstance(value, Tensor))


def _of_group(
    factors: Mapping[str, _Factor], number: int, group: Mapping[str, Any]
) -> dict[str, dict[int | None, list[_Factor]]]:
    """What each key of one group follows, by index: that for all, and the group's own."""
    found: dict[str, dict[int | None, list[_Factor]]] = {}
    for text, factor in factors.items():
        name = parse_name(text).of(group)
        if name.group in (None, group_name(number, group)):
            value = group[name.key]
            indices = range(len(value)) if isinstance(value, tuple) else (None,)
            for index in indices:
                each = found.setdefault(name.key, {}).setdefault(index, [])
                if name.index in (None, index):
                    each.append(factor)
    return found


def _product(factors: Sequence[_Factor]) -> _Factor:
    if not factors:
        return _Factor(as_schedule(1.0), product_of(()))
    if len(factors) == 1:
        return factors[0]
    return _Factor(
        Product(*(one.schedule for one in factors)), product_of([one.bound for one in factors])
    )


def _column(
    text: str,
    followed: Sequence[Mapping[str, Mapping[int | None, list[_Factor]]]],
    groups: Sequence[Mapping[str, Any]],
) -> _Column:
    numbers = {group_name(number, group): number for number, group in enumerate(groups)}
    wanted = parse_name(text).group
    number = 0 if wanted is None else numbers[wanted]
    name = parse_name(text).of(groups[number])
    factors = followed[number][name.key]
    # The first of several values represents them all.
    index = next(iter(factors)) if name.index is None else name.index
    return _Column(number, name.key, index, _product(factors[index]))
