"""Schedules as they are given, by hyper-parameter, checked against an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from stretto.errors import ScheduleError, shown
from stretto.schedules import Product, Schedule, as_schedule
from stretto.schedules.names import find_name


def read_schedules(optimizer: Optimizer, schedules: Mapping[str, Any]) -> dict[str, Schedule]:
    """Return the schedules of an optimizer, each as one, with that of the learning rate.

    Raises:
        ScheduleError: there is no such hyper-parameter or group, or they are not given by name.
    """
    check_names(schedules)
    found = {name: as_one_schedule(value) for name, value in schedules.items()}
    groups = optimizer.param_groups
    for name in found:
        _check(name, groups)
    # Set even where nothing moves it: else a resumed run would keep the rate it was saved with,
    # whatever its optimizer is now built with and its plan says.
    return {"lr": as_schedule(1.0), **found} if "lr" in groups[0] else found


def check_names(schedules: Any) -> None:
    """Refuse schedules that are not given by the name of what they set.

    Raises:
        ScheduleError: they are not.
    """
    if not isinstance(schedules, Mapping):
        raise ScheduleError.cannot(
            f"read {shown(schedules)} as schedules",
            why="it does not say what each is for",
            instead="write {'lr': ...}",
        )


def as_one_schedule(value: Any) -> Schedule:
    """Return a schedule as it is given, or the product of several."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Product(*value)
    return as_schedule(value)


def _check(text: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a name that no parameter group has."""
    name = find_name(text, groups[0])
    names = [group_name(number, other) for number, other in enumerate(groups)]
    if name.group is not None and name.group not in names:
        raise ScheduleError.cannot(
            f"schedule {text!r}",
            why=f"the optimizer has no such parameter group (it has {', '.join(names)})",
            instead=f"write '{name.key}@{names[0]}', or give the group that name",
        )


def group_name(number: int, group: Mapping[str, Any]) -> str:
    """Return the name of a parameter group; of one without a name, its number."""
    return str(group.get("name", number))
