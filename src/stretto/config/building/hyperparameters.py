"""What a run file says of the optimizer's values, as far as it can be told without torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from stretto.config.reading.source import Path, Source
from stretto.config.run import RunConfig
from stretto.config.values.settings import Optimizer
from stretto.config.values.targets import import_target
from stretto.errors import ConfigError, Place, shown
from stretto.schedules import Constant, Product, Schedule
from stretto.schedules.names import Name, check_index, find_name, parse_name

_SINGLE = ("lr", "momentum", "weight_decay")
"""What is one number in each of torch's optimizers that has it."""


def base_values(config: RunConfig) -> dict[str, float]:
    """Return what the schedules multiply: the optimizer's own values, stated or its defaults.

    Raises:
        ConfigError: the optimizer must be asked for a default and cannot be imported, or it has
            no such value.
    """
    optimizer = config.optimizer
    if optimizer is None:
        return {}
    found = {}
    for text in dict.fromkeys(("lr", *config.schedules)):
        name, value = _value(optimizer, text, config.source)
        if isinstance(value, (list, tuple)):
            # Of several the first stands for all, as in a run's ledger.
            value = dict(enumerate(value)).get(name.index or 0)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[text] = float(value)
    return found


def effective(schedules: Mapping[str, Schedule], config: RunConfig) -> dict[str, Schedule]:
    """Return what each value follows: `lr@group` is multiplied by `lr`, as in an optimizer.

    An optimizer has a learning rate also where nothing moves it.

    Raises:
        ConfigError: the optimizer must be asked for a default and cannot be imported.
    """
    optimizer = config.optimizer
    if optimizer is not None or config.rule is not None:
        schedules = {"lr": Constant(), **schedules}
    names = {
        text: parse_name(text) if optimizer is None else _value(optimizer, text, config.source)[0]
        for text in schedules
    }
    found = {}
    for text, schedule in schedules.items():
        others = [
            schedules[other]
            for other, name in names.items()
            if other != text and _reaches(name, names[text])
        ]
        found[text] = Product(*others, schedule) if others else schedule
    return found


def _reaches(name: Name, other: Name) -> bool:
    """Whether a schedule called `name` also moves the value that `other` is shown as."""
    return (
        name.key == other.key
        and name.group in (None, other.group)
        and name.index in (None, other.index or 0)
    )


def check_optimizer(config: RunConfig) -> None:
    """Refuse values and schedules that the optimizer cannot have, without building it.

    Torch's own optimizers are known to make their parameter groups of their arguments; another
    target is asked for less.

    Raises:
        ConfigError: a value that is scheduled is no number, or there is no such value or group.
    """
    optimizer = config.optimizer
    if optimizer is None:
        return
    names = {text: parse_name(text) for text in config.schedules}
    for text, name in names.items():
        _check_group(optimizer, text, name, config.source.where(("schedules", text)))
    found = {text: _value(optimizer, text, config.source) for text in names}
    for text, (name, value) in found.items():
        if name.index is not None and value is not None:
            with config.source.at("schedules", text):
                check_index(text, name, value)
    keys = {*_SINGLE, "betas", *(name.key for name, _ in found.values())}
    for path, settings in _settings(optimizer):
        for key in sorted(keys & settings.keys()):
            _check_number(optimizer, (*path, key), settings[key], config.source)


def _check_group(optimizer: Optimizer, text: str, name: Name, where: Place) -> None:
    known = [*optimizer.groups, "rest"] if optimizer.groups else ["0"]
    is_known = bool(optimizer.groups) or _is_torchs(optimizer)
    if is_known and name.group is not None and name.group not in known:
        raise ConfigError.cannot(
            f"schedule {text!r}",
            why=f"the optimizer has no such parameter group (it has {', '.join(known)})",
            instead="write the name of one of them, or add it to optimizer.groups",
            where=where,
        )


def _check_number(optimizer: Optimizer, path: Path, value: object, source: Source) -> None:
    items = value if isinstance(value, list) and value and path[-1] not in _SINGLE else [value]
    for item in items:
        is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
        is_finite = is_number and math.isfinite(item)  # type: ignore[arg-type]
        is_right = is_finite and (item >= 0 or not _is_torchs(optimizer))  # type: ignore[operator]
        # What another optimizer makes of a text or a mapping is its own affair.
        if not is_right and (is_number or _is_torchs(optimizer)):
            raise ConfigError.cannot(
                f"use {shown(value)} as {'.'.join(map(str, path))}",
                why="it is not a finite number of at least 0",
                instead="write a number such as 3.0e-4",
                where=source.where(path),
            )


def _settings(optimizer: Optimizer) -> Iterator[tuple[Path, dict[str, Any]]]:
    yield ("optimizer",), optimizer.arguments
    for name, group in optimizer.groups.items():
        yield ("optimizer", "groups", name), group.options


def _value(optimizer: Optimizer, text: str, source: Source) -> tuple[Name, object]:
    """The value that a schedule multiplies: stated, or the default in the optimizer's signature."""
    name = parse_name(text)
    group = optimizer.groups.get(name.group or "")
    stated = {**optimizer.arguments, **({} if group is None else group.options)}
    if stated.get(name.key) is not None:
        return name, stated[name.key]
    settings = _defaults(optimizer, source) | {
        key: tuple(value) if isinstance(value, list) else value for key, value in stated.items()
    }
    if _is_torchs(optimizer):
        with source.at("schedules", text):
            name = find_name(text, settings)
    else:
        name = name.of(settings)
    return name, settings.get(name.key)


def _defaults(optimizer: Optimizer, source: Source) -> dict[str, object]:
    function = import_target(optimizer.target, where=source.where(("optimizer", "target")))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}  # written in C without a signature
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _is_torchs(optimizer: Optimizer) -> bool:
    module = optimizer.target.partition(":")[0]
    return module == "torch.optim" or module.startswith("torch.optim.")
