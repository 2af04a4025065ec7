"""What `stretto plan` checks of a run's targets: they exist and take their arguments.

Nothing is called. Modules of the user are imported; the source of torch and stretto is read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from stretto._optional import missing
from stretto.config.run import Optimizer, RunConfig
from stretto.config.signatures import describe_target, run_guards
from stretto.config.targets import Function, Target, called, tuples
from stretto.config.yaml import Path as Keys
from stretto.config.yaml import show_path
from stretto.errors import ConfigError
from stretto.schedules.names import check_group, find_name, parse_name


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
    if is_dataclass(value) and not isinstance(value, type):
        inner = {one.name: getattr(value, one.name) for one in fields(value)}
    elif isinstance(value, (dict, list)):
        inner = dict(value if isinstance(value, dict) else enumerate(value))
    for key, one in inner.items():
        if path or key not in ("rule", "schedules", "batch_size"):
            yield from _targets(one, (*path, key))


def _check(config: RunConfig, section: Target, path: Keys) -> None:
    """Check that a target exists and takes its arguments."""
    found = describe_target(section.target, where=config.source.where((*path, "target")))
    if found.signature is None:
        return
    given = dict.fromkeys(section.arguments)
    if path == ("step",):
        own = [name for name in ("optimizer", "loss") if getattr(config, name)]
        own += ["loss"] if "loss" in found.signature.parameters else []  # of the model's class
        given |= dict.fromkeys(("model", *own))
    count = {"optimizer": 1, "parallel": 1 if config.mesh is None else 2}.get(str(path[0]), 0)
    # A function gets its other arguments in training; a class is called before.
    is_function = isinstance(section, Function) and not found.is_class
    bind = found.signature.bind_partial if is_function else found.signature.bind
    called(lambda: bind(*[None] * count, **given), section, config.source.where(path))


def _check_names(config: RunConfig, section: Optimizer) -> Iterator[str]:
    """Check what is scheduled as the optimizer does, and what an optimizer of torch is given."""
    groups: list[dict[str, Any]] = [{"name": name} for name in ("rest", *section.groups)]
    is_torchs = section.target.startswith("torch.optim")
    if is_torchs:
        where = config.source.where(("optimizer",))
        signature = describe_target(section.target, where=where).signature
        assert signature is not None, "optimizers of torch are written in Python"
        defaults = {name: one.default for name, one in signature.parameters.items()}
        arguments = tuples(section.arguments)
        called(lambda: check_values(section.target, defaults, arguments), section, where)
        given = defaults | arguments
        groups = [{**given, **group} for group in groups] if section.groups else [given]
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


def check_values(target: str, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse values of hyper-parameters that an optimizer of torch refuses.

    Raises:
        ConfigError: a value is of another kind than its default.
        Exception: as the source of the optimizer raises.
    """
    for name, value in given.items():
        default, kinds = defaults[name], (int, float)
        is_other = isinstance(default, kinds) and not isinstance(value, kinds)
        if isinstance(default, tuple):
            is_other = not isinstance(value, tuple) or len(value) != len(default)
        if is_other:
            why = "it is of another kind than the default"
            raise ConfigError.bad(name, value, why, f"write for example {default!r}")
    run_guards(target, {**defaults, **given})
