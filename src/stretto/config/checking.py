"""What `stretto plan` checks of a run's targets: they exist and take their arguments.

Nothing is called. Modules of the user are imported; the source of torch and stretto is read.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from inspect import Signature
from pathlib import Path
from typing import Any, NamedTuple

from stretto._location import read_plain
from stretto._optional import missing
from stretto.batching import as_rules
from stretto.config.plans import with_targets
from stretto.config.run import Optimizer, RunConfig
from stretto.config.targets import Function, Target, called, import_target, tuples
from stretto.config.yaml import Path as Keys
from stretto.config.yaml import show_path
from stretto.errors import ConfigError
from stretto.schedules.names import check_group, check_value_names, find_name, parse_name


def check_targets(config: RunConfig) -> Iterator[str]:
    """Check the targets of a run file; yield a line for what only training can tell.

    Raises:
        ConfigError: a target does not exist or takes other arguments, or the optimizer has no such
            hyper-parameter.
        MissingPackageError: a logger needs a package that is not installed.
    """
    notes: list[str] = []

    def check(section: Target, path: Keys) -> Target:
        with config.source.at(*path):
            notes.extend(_check(config, section, path))
        return section

    for one in fields(config):
        if one.name not in _IMPORTED:
            with_targets(getattr(config, one.name), (one.name,), check)
    yield from notes
    if config.data.is_endless:
        yield "the file states no number of samples, so no epoch ends in this plan"
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


def _check(config: RunConfig, section: Target, path: Keys) -> Iterator[str]:
    """Check that a target exists and takes its arguments; yield a line if it cannot be here."""
    try:
        found = describe_target(section.target)
    except ConfigError as error:
        absent = error.__cause__
        top = str(getattr(absent, "name", None)).partition(".")[0]
        if not isinstance(absent, ModuleNotFoundError) or importlib.util.find_spec(top):
            raise
        yield f"not checked: {show_path(path)}, since there is no module {top!r} here"
        return
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
    called(lambda: bind(*[None] * count, **given), section)


_IMPORTED = ("rule", "schedules", "values", "batch_size")
"""The keys whose targets a plan imports."""


def _check_names(config: RunConfig, section: Optimizer) -> Iterator[str]:
    """Check what is scheduled as the optimizer does, and what an optimizer of torch is given."""
    groups: list[dict[str, Any]] = [{"name": name} for name in ("rest", *section.groups)]
    is_torchs = section.target.startswith("torch.optim") and bool(importlib.util.find_spec("torch"))
    if is_torchs:
        signature = describe_target(section.target).signature
        assert signature is not None, "optimizers of torch are written in Python"
        defaults = {name: one.default for name, one in signature.parameters.items()}
        arguments = tuples(section.arguments)
        with config.source.at("optimizer"):
            called(lambda: check_values(section.target, defaults, arguments), section)
        given = defaults | arguments
        groups = [{**given, **group} for group in groups] if section.groups else [given]
    else:
        names = (*config.schedules, *as_rules(config.rule))
        others = {parse_name(text).key for text in names} - {*section.arguments, "lr"}
        if others:
            yield f"not checked: whether {section.target} has {', '.join(sorted(others))}"
    with config.source.at("values"):
        check_value_names(config.values, groups[0])
    for key, text in (
        *(("schedules", name) for name in config.schedules),
        *(("rule", name) for name in as_rules(config.rule) if name != "lr"),
    ):
        with config.source.at(key, text):
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


_READ = ("torch", "stretto")
"""Packages whose source is read."""


class Described(NamedTuple):
    """What is known of a target without calling it."""

    signature: Signature | None
    """None: a function in C need not tell."""
    is_class: bool


def describe_target(target: str) -> Described:
    """Return the signature of the object that `package.module:attribute` names.

    >>> list(describe_target("torch.optim:SGD").signature.parameters)[:4]
    ['params', 'lr', 'momentum', 'dampening']

    Raises:
        ConfigError: there is no such object, or its module fails when imported.
    """
    module, _, attribute = target.partition(":")
    if module.partition(".")[0] in _READ:
        found = _find(module, attribute)
        signature = None if found is None else _signature_of(found)
        if found is not None and signature is not None:
            return Described(signature, isinstance(found.node, ast.ClassDef))
    function = import_target(target)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None
    return Described(signature, isinstance(function, type))


class _Definition(NamedTuple):
    """A class or a function, and the module that defines it."""

    module: str
    node: ast.ClassDef | ast.FunctionDef


def _file(module: str) -> Path | None:
    """Return the source of a module. `find_spec` would import the packages around it."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in (Path(folder, *inner, "__init__.py"), Path(folder, *inner).with_suffix(".py")):
            if path.is_file():
                return path
    return None


@cache
def _tree(module: str) -> ast.Module | None:
    path = _file(module)
    return None if path is None else ast.parse(read_plain(path))


def _find(module: str, name: str) -> _Definition | None:
    """Return the definition of a name, through the imports of the module."""
    tree = _tree(module)
    # The last one counts, as when Python runs it: those before may be overloads.
    for node in reversed(() if tree is None else tree.body):
        found = None
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return _Definition(module, node)
        if isinstance(node, ast.ImportFrom):
            path = _file(module)
            is_package = path is not None and path.name == "__init__.py"
            package = module if is_package else module.rpartition(".")[0]
            relative = "." * node.level + (node.module or "")
            source = importlib.util.resolve_name(relative, package)
            for one in node.names:
                if one.name == "*" or (one.asname or one.name) == name:
                    found = _find(source, name if one.name == "*" else one.name)
                if found is not None:
                    return found
    return None


def _init_of(node: ast.ClassDef) -> ast.FunctionDef | None:
    inits = [
        one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"
    ]
    return inits[-1] if inits else None


def _signature_of(found: _Definition) -> Signature | None:
    """Return the signature of a function, or of the `__init__` of a class; None if it is hidden."""
    if isinstance(found.node, ast.FunctionDef):
        return _signature_of_function(found.module, found.node)
    # A decorator such as `dataclass` writes an `__init__` that is not in the source.
    if any(ast.unparse(one) != "final" for one in found.node.decorator_list):
        return None
    init = _init_of(found.node)
    if init is not None:
        whole = _signature_of_function(found.module, init)
        return whole.replace(parameters=[*whole.parameters.values()][1:])
    if not found.node.bases:
        return Signature()
    base = ast.unparse(found.node.bases[0])
    inherited = _find(found.module, base)
    return None if inherited is None else _signature_of(inherited)


def _signature_of_function(module: str, function: ast.FunctionDef) -> Signature:
    """Return the signature of a function; a default that is computed is a text."""
    tree, stub, scope = _tree(module), copy.deepcopy(function), dict[str, Any]()
    constants = {
        ast.unparse(node.targets[0]): node.value
        for node in (() if tree is None else tree.body)
        if isinstance(node, ast.Assign)
    }

    def default(node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Tuple):
            return ast.Tuple([default(item) for item in node.elts], ast.Load())
        try:
            return ast.Constant(ast.literal_eval(constants.get(ast.unparse(node), node)))
        except ValueError:
            return ast.Constant(ast.unparse(node))

    stub.args.defaults = [default(node) for node in stub.args.defaults]
    stub.args.kw_defaults = [node and default(node) for node in stub.args.kw_defaults]
    stub.body, stub.decorator_list = [ast.Pass()], []
    source = ast.fix_missing_locations(ast.Module([stub], []))
    exec(compile(source, module, "exec", annotations.compiler_flag), scope)  # noqa: S102
    return inspect.signature(scope[function.name])


def run_guards(target: str, values: Mapping[str, Any]) -> None:
    """Run the `if ...: raise ...` statements of the `__init__` of a class of torch.

    So a plan refuses the values that this version of torch refuses, and does not import it.

    Raises:
        Exception: as the statements do.
    """
    module, _, name = target.partition(":")
    found = _find(module, name)
    while found is not None and isinstance(found.node, ast.ClassDef):
        init = _init_of(found.node)
        for guard in _raising([] if init is None else init.body):
            tree = ast.fix_missing_locations(ast.Module([guard], []))
            # A statement that needs more of torch than the arguments is left to training.
            with contextlib.suppress(NameError):
                exec(compile(tree, target, "exec"), {"Tensor": (), **values})  # noqa: S102
        base = found.node.bases[0] if found.node.bases else None
        found = _find(found.module, base.id) if isinstance(base, ast.Name) else None


def _raising(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return what is left of statements without all that neither tests nor raises."""
    kept: list[ast.stmt] = []
    for one in body:
        if isinstance(one, ast.Raise):
            kept.append(one)
        elif isinstance(one, ast.If):
            then, other = _raising(one.body), _raising(one.orelse)
            if then or other:
                kept.append(ast.If(one.test, then or [ast.Pass()], other))
    return kept
