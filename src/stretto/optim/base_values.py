"""What an optimizer was built with, however often it is scheduled."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

GroupKey: TypeAlias = tuple[int, str]
"""The number of a parameter group, and a key in it."""


@final
class BaseValue:
    """A value that a schedule multiplies, and what was last written in its place."""

    __slots__ = ("value", "written")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.written = value


_SCHEDULED: WeakKeyDictionary[Optimizer, dict[GroupKey, BaseValue]] = WeakKeyDictionary()


def restore_base_values(optimizer: Optimizer) -> dict[GroupKey, BaseValue]:
    """Undo what schedules have written to an optimizer, and return the record of it.

    Torch keeps an `initial_lr` in the parameter group for this. Here the record belongs to the
    optimizer object instead: it holds for every key and not only for `lr`, it is no part of
    `state_dict()` (so checkpoints stay as they are, old states load, and a loaded state does not
    bring another run's base along), and it is compared with what stands in the group. A value that
    is not the one last written was set by you, and is the base from then on.

    The record does not go with a copy of the optimizer (`copy.deepcopy`, `pickle`).
    """
    optimizer = _unwrapped(optimizer)
    if optimizer not in _SCHEDULED:
        _SCHEDULED[optimizer] = {}
        # What is loaded was once written by a schedule, so it is no base either.
        with suppress(AttributeError):  # not an optimizer of torch: it has no hooks
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


def write(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a value of a parameter group; a compiled or captured step reads the tensors in it."""
    current = group[key]
    if isinstance(current, Tensor):
        current.fill_(value)
    elif isinstance(current, tuple) and isinstance(current[0], Tensor):
        for tensor, number in zip(current, value, strict=True):
            tensor.fill_(number)
    else:
        group[key] = value


def plain(value: Any) -> Any:
    """Return a value apart from tensors, which are written in place."""
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
