"""What `stretto plan` checks of a run's targets: they are imported and not called."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import BaseModel

from stretto._optional import missing
from stretto.config.run import Optimizer, RunConfig
from stretto.config.targets import Target, accepts, called, import_target, tuples
from stretto.config.yaml import Path as Keys
from stretto.config.yaml import show_path
from stretto.errors import ConfigError
from stretto.schedules.fields import check_group, find_name, parse_name

_FUNCTIONS = {"loss", "predict", "metrics", "collate_fn", "loss_weight"}
"""Keys of functions, which get their other arguments in training; a class is called before."""


def check_targets(config: RunConfig) -> Iterator[str]:
    """Check the targets of a run file; yield a line for what only training can tell.

    Raises:
        ConfigError: a target does not exist or takes other arguments, or the optimizer has no such
            hyper-parameter.
        MissingPackageError: a logger needs a package that is not installed.
    """
    for path, section in _targets(config, ()):
        try:
            _check(config, section, path)
        except ConfigError as error:
            absent = error.__cause__
            top = str(getattr(absent, "name", None)).partition(".")[0]
            if not isinstance(absent, ModuleNotFoundError) or importlib.util.find_spec(top):
                raise
            yield f"not checked: {show_path(path)}, since there is no module {top!r} here"
    for name in config.log.loggers or ():
        if isinstance(name, str) and importlib.util.find_spec(name) is None:
            raise missing(name, name)
    if config.optimizer is not None:
        yield from _check_names(config, config.optimizer)
        if config.optimizer.groups:
            yield "not checked: whether each of optimizer.groups matches a parameter"
    if config.device is not None:
        yield f"not checked: whether there is a device {config.device!r}"
    if config.checkpoint is not None and config.checkpoint.upload is not None:
        yield "not checked: whether copies can be written to checkpoint.upload"
    if config.model is not None and config.step is None and config.loss is None:
        yield f"not checked: whether {config.model.target} has a loss"


def _targets(value: Any, path: Keys) -> Iterator[tuple[Keys, Target]]:
    """Yield the targets inside a value; those of sizes and schedules are imported by the plan."""
    if isinstance(value, Target):
        yield path, value
    inner: dict[Any, Any] = {}
    if isinstance(value, BaseModel):
        inner = dict(value)
    elif is_dataclass(value) and not isinstance(value, type):
        inner = {one.name: getattr(value, one.name) for one in fields(value)}
    elif isinstance(value, (dict, list)):
        inner = dict(value if isinstance(value, dict) else enumerate(value))
    for key, one in inner.items():
        if path or key not in ("rule", "schedules", "batch_size"):
            yield from _targets(one, (*path, key))


def _check(config: RunConfig, section: Target, path: Keys) -> None:
    """Import a target and check that it takes its arguments."""
    function = import_target(section.target, where=config.source.where((*path, "target")))
    given = dict.fromkeys(section.arguments)
    if path == ("step",):
        own = [name for name in ("optimizer", "loss") if getattr(config, name)]
        own += ["loss"] if accepts(function, "loss") else []  # that of the model's class
        given |= dict.fromkeys(("model", *own))
    count = {"optimizer": 1, "parallel": 1 if config.mesh is None else 2}.get(str(path[0]), 0)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C may have none
        return
    is_function = not _FUNCTIONS.isdisjoint(map(str, path)) and not isinstance(function, type)
    bind = signature.bind_partial if is_function else signature.bind
    called(lambda: bind(*[None] * count, **given), section, config.source.where(path))


def _check_names(config: RunConfig, section: Optimizer) -> Iterator[str]:
    """Check the names of schedules as the optimizer does."""
    groups: list[dict[str, Any]] = [{"name": name} for name in ("rest", *section.groups)]
    is_torchs = section.target.startswith("torch.optim")
    if is_torchs:
        groups = _groups(config, section)
    else:
        others = {parse_name(text).key for text in config.schedules} - {*section.arguments, "lr"}
        if others:
            yield f"not checked: whether {section.target} has {', '.join(sorted(others))}"
    for text in config.schedules:
        with config.source.at("schedules", text):
            if is_torchs:
                find_name(text, groups[0])
            if is_torchs or section.groups:  # another makes groups of its own
                check_group(text, groups)


def _groups(config: RunConfig, section: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer of torch, with a small parameter in each."""
    import torch

    def parameter() -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.zeros(2, 2))

    named = [("rest", {}), *((name, one.arguments) for name, one in section.groups.items())]
    groups = [{"params": [parameter()], "name": name, **tuples(own)} for name, own in named]
    given = groups if section.groups else [parameter()]
    make, where = import_target(section.target), config.source.where(("optimizer",))
    made: torch.optim.Optimizer = called(
        lambda: make(given, **tuples(section.arguments)), section, where
    )
    return made.param_groups
