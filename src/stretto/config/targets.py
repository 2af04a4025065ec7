"""Objects of yours that a run file names."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, final

from stretto.errors import ConfigError, StrettoError, first_line, nearest, shown
from stretto.schedules.fields import Check

TARGET_PATTERN = r"^[^\W0-9]\w*(\.[^\W0-9]\w*)*:[^\W0-9]\w*(\.[^\W0-9]\w*)*$"


def read_target(value: object) -> str:
    """Return `value` if it has the form `package.module:attribute`.

    >>> read_target("torch.optim:AdamW")
    'torch.optim:AdamW'

    Raises:
        ConfigError: it has not.
    """
    if isinstance(value, str) and re.match(TARGET_PATTERN, value):
        return value
    example = "torch.optim:AdamW"
    if isinstance(value, str) and re.fullmatch(r"\w+(\.\w+)+", value):
        example = ":".join(value.rsplit(".", 1))
    raise ConfigError.cannot(
        f"use {shown(value)} as a target",
        why="it is not of the form 'package.module:attribute'",
        instead=f"write for example '{example}'",
    )


TargetText: TypeAlias = Annotated[str, Check(lambda value, *_: read_target(value))]
"""`package.module:attribute`."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A Python object: `target` names what makes it, all other keys are its arguments."""

    target: TargetText
    """`package.module:attribute`, imported when the run is built."""
    arguments: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True)
class Function(Target):
    """A function: `target` names it, or a class of which it is an instance.

    It is imported when it is called.

    >>> Function(target="operator:mul")(6, 7)
    42
    """

    def __call__(self, *positional: Any) -> Any:
        """Call the function with the arguments of the file and these."""
        return bound_target(self)(*positional)


@final
@dataclass(frozen=True, kw_only=True)
class Maker(Target):
    """A function or class that makes an object of what it is called with, such as an optimizer."""

    def __call__(self, *positional: Any) -> Any:
        """Return what it makes of the arguments of the file and these."""
        return call_target(self, *positional)


def import_target(target: str) -> Any:
    """Return the object that `package.module:attribute` names.

    >>> import_target("fractions:Fraction")(1, 3)
    Fraction(1, 3)

    Raises:
        ConfigError: there is no such module, it fails when imported, or has no such attribute.
    """
    name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(name)
    except Exception as error:  # the user's own code runs here and may raise anything
        raise ConfigError.cannot(
            f"import {target}",
            why=f"it raised {first_line(error)}",
            instead="check the name, or install what is missing; --traceback shows where",
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = nearest(part, dir(found))
            raise ConfigError.cannot(
                f"import {target}",
                why=f"{getattr(found, '__name__', found)} has no {part!r}",
                instead=_rename(name)
                or (f"did you mean {close!r}?" if close else f"write a name that {name} has"),
            )
        found = getattr(found, part)
    return found


def _rename(name: str) -> str | None:
    """Return what to do if a file of the working folder has the name of an installed module."""
    file = os.path.abspath(f"{name.partition('.')[0]}.py")  # noqa: PTH100  Path is a key here
    is_other = os.path.exists(file) and getattr(sys.modules.get(name), "__file__", "") != file  # noqa: PTH110
    return f"rename {file}: what is installed comes first" if is_other else None


def call_target(section: Target, *positional: Any, **extra: Any) -> Any:
    """Return what the target returns for `positional` and the section's arguments.

    Args:
        section: the target and its arguments.
        *positional: arguments that the run file does not write, such as parameters.
        **extra: more keyword arguments.

    Raises:
        ConfigError: it cannot be imported or called, or it raised.
    """
    function = import_target(section.target)
    return called(lambda: function(*positional, **section.arguments, **extra), section)


def bound_target(section: Target) -> Any:
    """Return the target as a function with the section's arguments bound to it.

    A class is called with the arguments and its instance is the function.

    Raises:
        ConfigError: it cannot be imported, is not a function, or takes other arguments.
    """
    function = import_target(section.target)
    if inspect.isclass(function):
        return call_target(section)
    if not section.arguments and callable(function):
        return function

    def bound() -> Any:
        with contextlib.suppress(ValueError):  # a function in C may have no signature
            inspect.signature(function).bind_partial(**section.arguments)
        return functools.partial(function, **section.arguments)

    return called(bound, section)


def tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as tuples: optimizers take `betas` as one, which YAML does not have."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }


def called(make: Callable[[], Any], section: Target) -> Any:
    """Return what `make` returns.

    Raises:
        ConfigError: it raised.
    """
    try:
        return make()
    except StrettoError:
        raise
    except Exception as error:  # the user's own code runs here and may raise anything
        raise ConfigError.cannot(
            f"build {section.target}",
            why=f"it raised {first_line(error)}",
            instead="change its arguments; --traceback shows where",
        ) from error


def accepts(function: Any, name: str) -> bool:
    """Return whether a parameter called `name` is in the signature of `function`.

    >>> accepts(sorted, "key"), accepts(sorted, "keys")
    (True, False)
    """
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
