"""Base values of the optimizers of a run, read once and then kept by the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from stretto.errors import ScheduleError
from stretto.optim.base_values import plain, restore_base_values, write
from stretto.optim.reading import group_name
from stretto.schedules.names import find_name, parse_name

GroupValues = dict[str, Any]
"""The values of a parameter group, by key."""


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
