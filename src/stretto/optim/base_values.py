"""Base values of hyper-parameters, however often an optimizer is scheduled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from stretto.errors import ScheduleError
from stretto.optim.reading import group_name
from stretto.schedules.names import find_name, parse_name

GroupKey: TypeAlias = tuple[int, str]
"""The number of a parameter group, and a key in it."""
GroupValues = dict[str, Any]
"""The values of a parameter group, by key."""


@final
class BaseValue:
    """The base value of a schedule, and the value that was last written."""

    __slots__ = ("value", "written")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.written = value


_SCHEDULED: WeakKeyDictionary[Optimizer, dict[GroupKey, BaseValue]] = WeakKeyDictionary()


def restore_base_values(optimizer: Optimizer) -> dict[GroupKey, BaseValue]:
    """Restore the base values of an optimizer and return their record.

    Torch stores `initial_lr` in the parameter group for this. Here the record belongs to the
    optimizer object. It covers every key, not only `lr`, and is not part of `state_dict()`. So
    checkpoints are unchanged, and a loaded state does not bring the base of another run. If a value
    differs from the last written one, you have set it, and it becomes the new base.

    Copies of the optimizer (`copy.deepcopy`, `pickle`) have no record.
    """
    optimizer = _unwrapped(optimizer)
    if optimizer not in _SCHEDULED:
        _SCHEDULED[optimizer] = {}
        # A loaded value was written by a schedule, so it is not a base value.
        with suppress(AttributeError):  # not an optimizer of torch, so it has no hooks
            optimizer.register_load_state_dict_post_hook(_note_loaded)
    record = _SCHEDULED[optimizer]
    for place, base in list(record.items()):
        group, key = _group(optimizer, place)
        if key not in group or not _is_equal(group[key], base.written):
            del record[place]
        else:
            write(group, key, base.value)
            base.written = base.value
    return record


def read_base_values(optimizer: Optimizer, given: Mapping[str, float]) -> list[GroupValues]:
    """Return the base values of each parameter group.

    The base of a learning rate is its `initial_lr`, which torch's schedulers and `set_base_values`
    write and checkpoints keep; else `lr`.

    Args:
        optimizer: the optimizer.
        given: base values by name, which take precedence: `{"lr": 0.1, "lr@head": 0.01}`.

    Raises:
        ScheduleError: the optimizer has no value of a given name.
    """
    restore_base_values(optimizer)  # what a schedule of an earlier run has written
    found = []
    for number, group in enumerate(optimizer.param_groups):
        values = {key: plain(value) for key, value in group.items() if key != "params"}
        if "lr" in values:
            values["lr"] = plain(values.get("initial_lr", values["lr"]))
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
        raise ScheduleError.cannot(
            f"schedule an optimizer with {len(groups)} parameter groups",
            why=f"the run was bound to one with {len(values)} before",
            instead="pass an optimizer with the same groups, or prepare a new run",
        )
    for group, base in zip(groups, values, strict=True):
        for key in {"lr", *(parse_name(text).of(group).key for text in names)} & group.keys():
            write(group, key, base[key])
        if "lr" in base:
            group["initial_lr"] = base["lr"]


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
        return tuple(float(item) for item in value)
    return float(value) if isinstance(value, Tensor) else value


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside wrappers such as Accelerate's and Lightning's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _note_loaded(optimizer: Optimizer) -> None:
    for place, base in _SCHEDULED.get(optimizer, {}).items():
        group, key = _group(optimizer, place)
        base.written = plain(group.get(key))


def _group(optimizer: Optimizer, place: GroupKey) -> tuple[dict[str, Any], str]:
    number, key = place
    groups = optimizer.param_groups
    return (groups[number] if number < len(groups) else {}), key


def _is_equal(value: Any, written: Any) -> bool:
    if isinstance(value, tuple) and isinstance(written, tuple):
        return len(value) == len(written) and all(map(_is_equal, value, written))
    return bool(value == written)
