"""`Hyperparameters`: one call sets everything that is scheduled in an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from torch import Tensor
from torch.optim import Optimizer

from stretto._foreign import knows_foreign
from stretto.batching import Rule, RuleLike, as_rules
from stretto.batching.rules import moved
from stretto.errors import ScheduleError
from stretto.schedules import BoundSchedule, Product, Schedule, as_schedule
from stretto.schedules.names import (
    Name,
    check_group,
    find_name,
    group_name,
    most_specific,
    parse_name,
)
from stretto.schedules.schedule import Base, Column, product_of
from stretto.timing import Horizon, Timestamp


def joined(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return a single optimizer itself, or one with the parameter groups of several.

    >>> import torch
    >>> one, two = (torch.optim.SGD([torch.zeros(1)], lr=lr) for lr in (0.1, 0.2))
    >>> joined([one]) is one, [group["lr"] for group in joined([one, two]).param_groups]
    (True, [0.1, 0.2])
    """
    return optimizers[0] if len(optimizers) == 1 else Joined(optimizers)


@final
class Joined(Optimizer):
    """The parameter groups of several optimizers, in order; made by `joined`."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # Do not call super().__init__: it has no state of its own.
        self.optimizers = tuple(optimizers)
        self.defaults: dict[str, Any] = {}
        for one in optimizers:
            self.defaults |= one.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The present groups of all optimizers."""
        return [group for one in self.optimizers for group in one.param_groups]

    def __repr__(self) -> str:
        return f"joined({list(self.optimizers)!r})"


def read_schedules(optimizer: Optimizer, schedules: Mapping[str, Any]) -> dict[str, Schedule]:
    """Return the schedules of an optimizer, each as one, with that of the learning rate.

    Raises:
        ScheduleError: there is no such hyper-parameter or group.
    """
    found = {name: as_one_schedule(value) for name, value in schedules.items()}
    groups = optimizer.param_groups
    if not groups:
        if found:
            why, instead = "there are no optimizers", "pass optimizer=..., or leave schedules out"
            raise ScheduleError.bad("schedules", schedules, why, instead)
        return {}
    for name in found:
        find_name(name, groups[0])
        check_group(name, groups)
    # Set the learning rate even if nothing moves it: else a resumed run would keep the saved rate,
    # not the one that its optimizer is built with.
    return {"lr": as_schedule(1.0), **found} if "lr" in groups[0] else found


def as_one_schedule(value: Any) -> Schedule:
    """Return a schedule as it is given, or the product of several."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Product(*value)
    return as_schedule(value)


GroupValues = dict[str, Any]
"""The values of a parameter group, by key."""
INITIAL = "initial_"
"""Begins the keys of base values: `initial_lr`, as torch's schedulers call it."""


def restore_base_values(optimizer: Optimizer) -> None:
    """Write the base values, which scheduled groups have as `initial_lr` and so on, to their keys.

    They are part of the optimizer's `state_dict()`, as those of torch's schedulers are.
    """
    for group in optimizer.param_groups:
        for key in [key for key in group if f"{INITIAL}{key}" in group]:
            write(group, key, group[f"{INITIAL}{key}"])


def read_base_values(optimizer: Optimizer, given: Mapping[str, float]) -> list[GroupValues]:
    """Return the base values of each parameter group: `initial_lr` if it has that, else `lr`.

    Args:
        optimizer: the optimizer.
        given: base values by name, which take precedence: `{"lr": 0.1, "lr@head": 0.01}`.

    Raises:
        ScheduleError: the optimizer has no value of a given name.
    """
    found = []
    for number, group in enumerate(optimizer.param_groups):
        values = {key: plain(group.get(f"{INITIAL}{key}", group[key])) for key in group}
        for text, value in given.items():
            name = find_name(text, group)
            if name.group in (None, group_name(number, group)):
                values[name.key] = value
        found.append(values)
    return found


def set_base_values(
    optimizer: Optimizer, values: Sequence[GroupValues], names: Iterable[str]
) -> None:
    """Write the base values of what is scheduled to the groups of an optimizer.

    Raises:
        ScheduleError: the optimizer has another number of groups.
    """
    groups = optimizer.param_groups
    if len(groups) != len(values):
        why = f"the run was bound to {len(values)} parameter groups before"
        raise ScheduleError.bad("optimizer", optimizer, why, "pass one with the same groups")
    for group, base in zip(groups, values, strict=True):
        for key in {"lr", *(parse_name(text).of(group).key for text in names)} & group.keys():
            write(group, key, base[key])
            group[f"{INITIAL}{key}"] = base[key]


def write(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a value of a parameter group; tensors are filled in place, for compiled steps."""
    current = group[key]
    if isinstance(current, Tensor):
        current.fill_(value)
    elif isinstance(current, tuple) and isinstance(current[0], Tensor):
        for tensor, number in zip(current, value, strict=True):
            tensor.fill_(number)
    else:
        group[key] = value


def plain(value: Any) -> Any:
    """Return a value without tensors, which are overwritten in place."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))  # Adafactor's eps may hold None
    return float(value) if isinstance(value, Tensor) else value


_Factor: TypeAlias = tuple[Schedule, BoundSchedule]
"""A schedule, and the same bound to the run."""


class _Value(NamedTuple):
    """One number in one parameter group: its base, times its factor, as its rule moves that."""

    number: int
    key: str
    item: int | None
    """Its index if the key has several values, such as `betas`."""
    base: float
    factor: _Factor
    rule: Rule | None

    def at(self, timestamp: Timestamp, size: int) -> float:
        """Return the value at a time, for batches of a size."""
        return moved(self.rule, self.base * self.factor[1](timestamp), size)


@final
class Hyperparameters:
    """Sets an optimizer's hyper-parameters for a time: base value times the schedules' factors.

    The base is what the optimizer was built with. It is read here, so build this before an
    optimizer's saved state is loaded. Nothing is multiplied in place: a value is a function of the
    time and the batch size.

    The base values stay in the parameter groups as `initial_lr`, `initial_weight_decay` and so on.
    So building it again for the same optimizer (a retry, another run) starts from the same base.
    To change it, set `initial_lr`.

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
            function `size -> factor`; or values by name, of which the one that says most counts:
            `{"lr": LinearRule(256), "lr@head": SquareRootRule(256)}`; None: not at all.
        bound: those schedules that `prepare` has bound to the run; the others are bound here.
        measured: what evaluations have measured, for schedules that follow a metric; it grows.

    Raises:
        ScheduleError: there is no such hyper-parameter or group, or a schedule does not fit the
            run.
        BatchSizeError: the rule cannot be read; or there is a rule, and a schedule that goes by
            the batch size already.
        ConversionError: a time needs a fact that is not known.
    """

    @knows_foreign
    def __init__(
        self,
        optimizer: Optimizer,
        schedules: Mapping[str, Any],
        horizon: Horizon,
        *,
        rule: RuleLike | None = None,
        bound: Mapping[str, BoundSchedule] | None = None,
        measured: Sequence[float] = (),
    ) -> None:
        self._measured = measured
        self._rules = as_rules(rule)
        followed = {**dict.fromkeys(self._rules, 1.0), **schedules}
        self._schedules = read_schedules(optimizer, followed)
        # Its groups are looked up each time: loading a state puts new ones in their place.
        self.optimizer = optimizer
        """What is written to."""
        restore_base_values(optimizer)
        _part_tensors(optimizer.param_groups)
        self._values: list[list[_Value]] = []
        self._initial: dict[int, GroupValues] = {}
        self.follow(horizon, bound or {})
        self.base = self.values()
        """The initial values of the optimizer, by name."""

    def follow(self, horizon: Horizon, bound: Mapping[str, BoundSchedule]) -> None:
        """Follow the same schedules, bound to the run anew; the base values stay."""
        groups, made = self.optimizer.param_groups, dict[Any, Any]()
        # What all starts from: after a resume, the groups have scheduled values. A group is known
        # by its first weight, since others may come before it.
        initial = [
            self._initial.setdefault(
                id(next(iter(group["params"]), number)),
                {key: plain(group.get(f"{INITIAL}{key}", group[key])) for key in group},
            )
            for number, group in enumerate(groups)
        ]
        each = {
            name: (schedule, bound[name] if name in bound else schedule.bind(horizon))
            for name, schedule in self._schedules.items()
        }
        self._values = []
        for number, group in enumerate(groups):
            found = _columns_of(each, number, group)
            scheduled = frozenset(column for column, factors in found.items() if factors)
            by_key: dict[str, list[_Value]] = {}
            for (key, index), factors in found.items():
                base = Base(initial, number, (key, index), scheduled, made, self._measured)
                factor = _product([_on(base, one, horizon) for one in factors])
                value = initial[number][key]
                group.setdefault(f"{INITIAL}{key}", value)
                value = value if index is None else value[index]
                name = Name(key, index, group_name(number, group))
                rule = most_specific(self._rules, name, group)
                by_key.setdefault(key, []).append(_Value(number, key, index, value, factor, rule))
            self._values += by_key.values()
        self._named = {name: self._value_of(name) for name in each}
        # Setting it is one multiplication: the common case, twice as fast by itself.
        first = self._values[0][0] if sum(map(len, self._values)) == 1 else None
        is_plain = first is not None and isinstance(groups[first.number][first.key], (int, float))
        self._only = first if is_plain and not self._rules else None

    def _value_of(self, text: str) -> _Value:
        """Return the value that a name stands for: the first of several."""
        groups, wanted = self.optimizer.param_groups, parse_name(text).group
        numbers = {group_name(number, group): number for number, group in enumerate(groups)}
        number = 0 if wanted is None else numbers[wanted]
        name = parse_name(text).of(groups[number])
        return next(
            value
            for values in self._values
            for value in values
            if value[:2] == (number, name.key) and name.index in (None, value.item)
        )

    @property
    def schedules(self) -> dict[str, Schedule]:
        """What the learning rate and all that is scheduled follow, multiplied: for a plan."""
        return {name: value.factor[0] for name, value in self._named.items()}

    @property
    def bound(self) -> Mapping[str, tuple[Schedule, BoundSchedule]]:
        """The same, each with what it is when bound to the run."""
        return {name: value.factor for name, value in self._named.items()}

    @property
    def rules(self) -> dict[str, Rule]:
        """How values follow the batch size, by the names of those that do: for a plan."""
        each = {name: value.rule for name, value in self._named.items()}
        return {name: rule for name, rule in each.items() if rule is not None}

    def apply(self, timestamp: Timestamp, batch_size: int | None = None) -> None:
        """Set every scheduled value for the batch that starts at `timestamp`.

        Args:
            timestamp: the clock before the batch.
            batch_size: the size that the policy decided for it; a rule needs it.

        Raises:
            ScheduleError: there is a rule and no batch size.
        """
        only = self._only
        if only is not None:
            value = only.base * only.factor[1](timestamp)
            self.optimizer.param_groups[only.number][only.key] = value
            return
        if batch_size is None and self._rules:
            why, instead = "a rule needs it", "pass step.batch_size"
            raise ScheduleError.bad("batch_size", None, why, instead)
        for values in self._values:
            first, *_ = values
            found = [one.at(timestamp, batch_size or 0) for one in values]
            group = self.optimizer.param_groups[first.number]
            write(group, first.key, found[0] if first.item is None else tuple(found))

    def row(self) -> list[float]:
        """Return the present values without names, in the order of `values`."""
        found, groups = [], self.optimizer.param_groups
        for number, key, index, *_ in self._named.values():
            value = groups[number][key]
            found.append(float(value if index is None else value[index]))
        return found

    def values(self) -> dict[str, float]:
        """Return the present values: the learning rate and all scheduled ones.

        A name without a group shows the first group's value; of `betas`, the first.
        """
        return dict(zip(self._named, self.row(), strict=True))


def _part_tensors(groups: Sequence[dict[str, Any]]) -> None:
    """Give each group its own tensors: torch hands all of them the one that it was given."""
    seen: set[int] = set()
    for group in groups:
        for key, value in group.items():
            if isinstance(value, Tensor) and id(value) in seen:
                group[key] = value.clone()
        seen.update(id(value) for value in group.values() if isinstance(value, Tensor))


def _columns_of(
    factors: Mapping[str, _Factor], number: int, group: Mapping[str, Any]
) -> dict[Column, list[_Factor]]:
    """Return what each value of one group follows: the factors for all, and the group's own."""
    found: dict[Column, list[_Factor]] = {}
    for text, factor in factors.items():
        name = parse_name(text).of(group)
        if name.group in (None, group_name(number, group)):
            value = group[name.key]
            for index in range(len(value)) if isinstance(value, tuple) else (None,):
                column = found.setdefault((name.key, index), [])
                if name.index in (None, index):
                    column.append(factor)
    return found


def _on(base: Base, factor: _Factor, horizon: Horizon) -> _Factor:
    """Return the factor of one value, bound again if it depends on that."""
    schedule = factor[0].on(base)
    return factor if schedule is factor[0] else (schedule, schedule.bind(horizon))


def _product(factors: Sequence[_Factor]) -> _Factor:
    if len(factors) == 1:
        return factors[0]
    schedules = [schedule for schedule, _ in factors]
    product = Product(*schedules) if schedules else as_schedule(1.0)
    return product, product_of([bound for _, bound in factors])
