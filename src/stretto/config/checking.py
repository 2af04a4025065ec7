"""What `stretto plan` checks of a run's targets, without building them.

A target is imported only if its source, which is read and not run, does not show that it takes its
arguments: to import torch takes several times as long as a plan.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from stretto._optional import missing
from stretto.config.run import Optimizer, RunConfig
from stretto.config.targets import Target, called, import_target, tuples
from stretto.config.yaml import Path as Keys
from stretto.config.yaml import show_path
from stretto.errors import ScheduleError
from stretto.schedules.fields import find_name, parse_name

_FUNCTIONS = {"loss", "predict", "metrics", "collate_fn", "loss_weight"}
"""Keys of functions, which get their other arguments in training; a class is called before."""


def check_targets(config: RunConfig) -> Iterator[str]:
    """Check the targets of a run file; yield a line for what only training can tell.

    Raises:
        ConfigError: a target does not exist or takes other arguments, or the optimizer has no such
            hyper-parameter.
        MissingPackageError: a logger needs a package that is not installed.
    """
    model = ("model", *(name for name in ("optimizer", "loss") if getattr(config, name)))
    positional = {"optimizer": 1, "parallel": 1 if config.mesh is None else 2}
    for path, section in _targets(config, ()):
        named = (*section.arguments, *(model if path == ("step",) else ()))
        is_function = not _FUNCTIONS.isdisjoint(map(str, path))
        count = positional.get(str(path[0]), 0)
        top = section.target.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(top) is None:
            yield f"not checked: {show_path(path)}, since there is no module {top!r} here"
            continue
        found = _arguments(section.target)
        if found is None or not _takes(found, count, named, is_function=is_function):
            _check(config, section, path, count, named, is_function=is_function)
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


def _source(module: str) -> ast.Module | None:
    """Return the syntax of a module that is not imported."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*inner)
    files = (path.with_suffix(".py"), path / "__init__.py") if inner else (Path(spec.origin),)
    found = next((file for file in files if file.is_file()), None)
    return None if found is None else ast.parse(found.read_bytes())


def _arguments(target: str) -> ast.arguments | None:
    """Return the arguments of a target as its source has them; None: that does not show them."""
    module, _, attribute = target.partition(":")
    with suppress(ValueError, SyntaxError, OSError):
        for _ in range(4):  # modules that import it from each other
            source = _source(module)
            for node in [] if source is None else source.body:
                if isinstance(node, ast.FunctionDef) and node.name == attribute:
                    return None if node.decorator_list else node.args
                if isinstance(node, ast.ClassDef) and node.name == attribute:
                    own = [one for one in node.body if isinstance(one, ast.FunctionDef)]
                    found = next((one.args for one in own if one.name == "__init__"), None)
                    if found is not None:
                        found.args = found.args[1:]
                    return found
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = {one.asname or one.name: one.name for one in node.names}
                    if attribute in names:
                        module, attribute = node.module, names[attribute]
                        break
            else:
                return None
    return None


def _takes(found: ast.arguments, count: int, named: tuple[str, ...], *, is_function: bool) -> bool:
    """Return whether arguments certainly can be given; `count` of them are given by position."""
    if found.vararg or found.kwarg:
        return False
    known = [*found.posonlyargs, *found.args]
    keywords = zip(found.kwonlyargs, found.kw_defaults, strict=True)
    needed = [one.arg for one in known[count : len(known) - len(found.defaults)]]
    needed += [one.arg for one, default in keywords if default is None]
    names = {one.arg for one in (*known[count:], *found.kwonlyargs)}
    return names.issuperset(named) and (is_function or set(named).issuperset(needed))


def _check(
    config: RunConfig,
    section: Target,
    path: Keys,
    count: int,
    named: tuple[str, ...],
    *,
    is_function: bool,
) -> None:
    """Import a target and check that it takes its arguments."""
    function = import_target(section.target, where=config.source.where((*path, "target")))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C may have none
        return
    is_partial = is_function and not isinstance(function, type)
    bind = signature.bind_partial if is_partial else signature.bind
    given = dict.fromkeys(named)
    called(lambda: bind(*[None] * count, **given), section, config.source.where(path))


def _check_names(config: RunConfig, section: Optimizer) -> Iterator[str]:
    """Check the names of schedules as the optimizer does."""
    if not section.target.startswith("torch.optim"):
        others = {parse_name(text).key for text in config.schedules} - {*section.arguments, "lr"}
        if others:
            yield f"not checked: whether {section.target} has {', '.join(sorted(others))}"
        return
    settings = _defaults(section.target) | section.arguments
    try:
        if not all(map(_is_plain, section.arguments.values())):
            raise ScheduleError
        for text in config.schedules:
            find_name(text, tuples(settings))
    except ScheduleError:
        import torch

        make = import_target(section.target)
        parameters = [torch.nn.Parameter(torch.zeros(2, 2))]
        where = config.source.where(("optimizer",))
        made = called(lambda: make(parameters, **tuples(section.arguments)), section, where)
        for text in config.schedules:
            with config.source.at("schedules", text):
                find_name(text, made.param_groups[0])


def _defaults(target: str) -> dict[str, Any]:
    """Return the defaults of an optimizer, as far as its source shows them."""
    found = _arguments(target)
    settings: dict[str, Any] = {}
    if found is not None:
        known = [*found.posonlyargs, *found.args][-len(found.defaults) :]
        pairs: list[tuple[ast.arg, ast.expr | None]] = [*zip(known, found.defaults, strict=True)]
        pairs += [*zip(found.kwonlyargs, found.kw_defaults, strict=True)]
        for one, value in pairs:
            with suppress(ValueError, SyntaxError):
                settings[one.arg] = ast.literal_eval("?" if value is None else value)  # no literal
    return settings


def _is_plain(value: Any) -> bool:
    """Return whether a value is surely one that torch's optimizers take."""
    each = value if isinstance(value, list) else [value]
    return all(type(one) in (int, float) and 0 <= one < 1 for one in each)
