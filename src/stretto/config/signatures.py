"""What a target takes: the signature of a class or function.

Those of torch and of stretto are read from the source, since importing torch takes seconds and a
plan takes milliseconds. What is not found that way is imported.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, NamedTuple

from stretto.config.targets import import_target
from stretto.errors import Place

_READ = ("torch", "stretto")
"""Packages whose source is read."""


class Described(NamedTuple):
    """What is known of a target without calling it."""

    signature: Signature | None
    """None: a function in C need not tell."""
    is_class: bool


def describe_target(target: str, *, where: Place | None = None) -> Described:
    """Return the signature of the object that `package.module:attribute` names.

    >>> print(describe_target("torch.optim:SGD").signature)
    (params, lr=0.001, momentum=0, dampening=0, weight_decay=0, nesterov=False, *, maximize=False, \
foreach=None, differentiable=False, fused=None)

    Raises:
        ConfigError: there is no such object, or its module fails when imported.
    """
    module, _, attribute = target.partition(":")
    if module.partition(".")[0] in _READ:
        found = _find(module, attribute)
        signature = None if found is None else _signature_of(found)
        if found is not None and signature is not None:
            return Described(signature, isinstance(found.node, ast.ClassDef))
    function = import_target(target, where=where)
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
    return None if path is None else ast.parse(path.read_bytes())


def _find(module: str, name: str) -> _Definition | None:
    """Return the definition of a name, through the imports of the module."""
    tree = _tree(module)
    # The last one counts, as when Python runs it: those before may be overloads.
    for node in reversed(() if tree is None else tree.body):
        found = None
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return _Definition(module, node)
        if isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            for one in node.names:
                if one.name == "*" or (one.asname or one.name) == name:
                    found = _find(source, name if one.name == "*" else one.name)
                if found is not None:
                    return found
    return None


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """Return the full name of the module that `from ... import` names."""
    path = _file(module)
    is_package = path is not None and path.name == "__init__.py"
    above = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return ".".join([*(above if node.level else ()), *([node.module] if node.module else ())])


def _signature_of(found: _Definition) -> Signature | None:
    """Return the signature of a function, or of the `__init__` of a class; None if it is hidden."""
    if isinstance(found.node, ast.FunctionDef):
        return Signature(list(_parameters(found, found.node)))
    # A decorator such as `dataclass` writes an `__init__` that is not in the source.
    if any(ast.unparse(one) != "final" for one in found.node.decorator_list):
        return None
    for node in reversed(found.node.body):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return Signature(list(_parameters(found, node))[1:])
    if not found.node.bases:
        return Signature()
    base = ast.unparse(found.node.bases[0])
    inherited = _find(found.module, base)
    return None if inherited is None else _signature_of(inherited)


def _parameters(found: _Definition, function: ast.FunctionDef) -> Iterator[Parameter]:
    """Yield the parameters with their defaults; one that is computed is a text."""
    given, tree = function.args, _tree(found.module)
    constants = {
        ast.unparse(node.targets[0]): node.value
        for node in (() if tree is None else tree.body)
        if isinstance(node, ast.Assign)
    }

    def default(node: ast.expr | None) -> Any:
        if node is None:
            return Parameter.empty
        if isinstance(node, ast.Tuple):
            return tuple(map(default, node.elts))
        try:
            return ast.literal_eval(constants.get(ast.unparse(node), node))
        except ValueError:
            return ast.unparse(node)

    positional = [*given.posonlyargs, *given.args]
    absent = [None] * (len(positional) - len(given.defaults))
    for one, node in zip(positional, [*absent, *given.defaults], strict=True):
        only = one in given.posonlyargs
        kind = Parameter.POSITIONAL_ONLY if only else Parameter.POSITIONAL_OR_KEYWORD
        yield Parameter(one.arg, kind, default=default(node))
    if given.vararg is not None:
        yield Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL)
    for one, node in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield Parameter(one.arg, Parameter.KEYWORD_ONLY, default=default(node))
    if given.kwarg is not None:
        yield Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD)


def run_guards(target: str, values: Mapping[str, Any]) -> None:
    """Run the `if ...: raise ...` statements of the `__init__` of a class of torch.

    So a plan refuses the values that this version of torch refuses, and does not import it.

    Raises:
        Exception: as the statements do.
    """
    module, _, name = target.partition(":")
    found = _find(module, name)
    while found is not None and isinstance(found.node, ast.ClassDef):
        inits = [
            one
            for one in found.node.body
            if isinstance(one, ast.FunctionDef) and one.name == "__init__"
        ]
        for guard in _raising(inits[-1].body if inits else []):
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
