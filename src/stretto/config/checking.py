"""What `stretto plan` checks of a run's targets: they exist and take their arguments.

Nothing is called. Modules of the user are imported; the source of torch and stretto is read.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from stretto._optional import missing
from stretto.config.run import Optimizer, RunConfig
from stretto.config.signatures import describe_target
from stretto.config.targets import Target, called, tuples
from stretto.config.yaml import Path as Keys
from stretto.config.yaml import show_path
from stretto.errors import ConfigError
from stretto.schedules.names import check_group, find_name, parse_name

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
    is_function = not _FUNCTIONS.isdisjoint(map(str, path)) and not found.is_class
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
        try:
            check_values(section.target, defaults, tuples(section.arguments))
        except ConfigError as error:
            raise error.recast(ConfigError, where=where) from error
        given = defaults | tuples(section.arguments)
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


_NOT_NEGATIVE = ("lr", "weight_decay", "momentum", "momentum_decay", "lr_decay", "alpha", "eps")
_LIMITS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys((*_NOT_NEGATIVE, "initial_accumulator_value"), (0, math.inf)),
    "rho": (0, 1),
    "d": (1, math.inf),
    "beta2_decay": (-math.inf, 0),
}
"""The least and the largest value of the hyper-parameters that torch checks."""


def check_values(target: str, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse values of hyper-parameters that an optimizer of torch refuses.

    They are known here, since to ask torch is to import it.

    Raises:
        ConfigError: a value is no number, or outside its range; or two exclude each other.
    """
    values = {**defaults, **given}
    for name, value in given.items():
        low, high = _LIMITS.get(name, (-math.inf, math.inf))
        above = target.endswith("SparseAdam") and name in ("lr", "eps")
        why = None
        if isinstance(defaults[name], (int, float)) and not isinstance(value, (int, float)):
            why = "it is not a number"
        elif isinstance(defaults[name], tuple):
            why = _why_not_several(name, value, len(defaults[name]))
        elif isinstance(value, (int, float)) and not (
            low <= value <= high and (value > low or not above)
        ):
            why = f"it is not {'above' if above else 'from'} {low} to {high}"
        if why is not None:
            raise ConfigError.bad(name, value, why, f"write for example {defaults[name]!r}")
    is_nesterov = target.endswith(":SGD") and values["nesterov"]
    if is_nesterov and (values["momentum"] <= 0 or values["dampening"]):
        why = "it needs a momentum above 0, and no dampening"
        raise ConfigError.bad("nesterov", value=True, why=why, instead="write momentum: 0.9")
    for other in ("foreach", "differentiable"):
        if values.get("fused") and values.get(other):
            why, instead = "it excludes 'fused'", "leave one of them out"
            raise ConfigError.bad(other, value=True, why=why, instead=instead)


def _why_not_several(name: str, value: object, count: int) -> str | None:
    """Return what is wrong with several values in one, such as betas."""
    several = value if isinstance(value, tuple) else ()
    numbers = [one for one in several if isinstance(one, (int, float))]
    if len(several) != count or len(numbers) + several.count(None) * (name == "eps") != count:
        return f"it is not a list of {count} numbers"
    if name == "betas" and not all(isinstance(one, float) and 0 <= one < 1 for one in numbers):
        return "they are not fractions from 0.0 to 1.0, without 1.0"
    if name == "etas" and not 0 < numbers[0] < 1 < numbers[1]:
        return "one is not between 0 and 1, and the other above 1"
    if name == "eps" and min(numbers, default=0) < 0:
        return "they are not at least 0"
    return None
