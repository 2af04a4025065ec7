"""Objects that a run file names."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from stretto.config.fields import Target
from stretto.config.yaml import NO_SOURCE, Path, Source
from stretto.errors import ConfigError, Message, Place, StrettoError, cannot, first_line, nearest


def import_target(target: str, *, where: Place | None = None) -> Any:
    """Return the object that `package.module:attribute` names.

    >>> import_target("fractions:Fraction")(1, 3)
    Fraction(1, 3)

    Raises:
        ConfigError: there is no such module, it fails when imported, or has no such attribute.
    """
    name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(name)
    except StrettoError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(_no_module(target, name, error, where)) from error
    except Exception as error:  # the user's own code runs here and may raise anything
        raise ConfigError.cannot(
            f"import {target}",
            why=f"its module raised {first_line(error)}",
            instead=f"mend {name}, or see where with --traceback",
            where=where,
        ) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            close = nearest(part, dir(found))
            raise ConfigError.cannot(
                f"import {target}",
                why=f"{getattr(found, '__name__', found)} has no {part!r}",
                instead=f"did you mean '{target[: -len(part)]}{close}'?"
                if close and target.endswith(part)
                else f"write a name that {name} has",
                where=where,
            ) from None
    return found


def call_target(
    section: Target,
    *positional: Any,
    source: Source | None = NO_SOURCE,
    path: Path = (),
    **extra: Any,
) -> Any:
    """Return what the target returns for `positional` and the section's arguments.

    Args:
        section: the target and its arguments.
        *positional: arguments that the run file does not write, such as parameters.
        source: where the section was written.
        path: its path in the run file.
        **extra: more keyword arguments.

    Raises:
        ConfigError: it cannot be imported or called, or it raised.
    """
    where = None if source is None else source.where(path)
    function = import_target(section.target, where=_of_target(source, path))
    arguments = {**section.arguments, **extra}
    check_arguments(function, section.target, positional, arguments, where=where)
    try:
        return function(*positional, **arguments)
    except StrettoError as error:
        raise error.recast(ConfigError, where=where) from error
    except Exception as error:  # the user's own code runs here and may raise anything
        raise ConfigError.cannot(
            f"build {section.target}",
            why=f"it raised {first_line(error)}",
            instead="change its arguments, or see where with --traceback",
            where=where,
        ) from error


def bound_target(section: Target, *, source: Source | None = NO_SOURCE, path: Path = ()) -> Any:
    """Return the target as a function with the section's arguments bound to it.

    A class is called with the arguments and its instance is the function.

    Raises:
        ConfigError: it cannot be imported, is not a function, or takes other arguments.
    """
    where = None if source is None else source.where(path)
    function = import_target(section.target, where=_of_target(source, path))
    if inspect.isclass(function):
        return call_target(section, source=source, path=path)
    if not callable(function):
        raise ConfigError.cannot(
            f"use {section.target} as a function",
            why=f"it is a {type(function).__name__}",
            instead="name a function or a class",
            where=_of_target(source, path),
        )
    arguments = section.arguments
    if not arguments:
        return function
    known = _parameters(function)
    unknown = [name for name in arguments if known is not None and name not in known]
    if unknown:
        raise _unknown_argument(section.target, unknown[0], known or (), where)
    return functools.partial(function, **arguments)


def check_arguments(
    function: Any,
    target: str,
    positional: tuple[Any, ...],
    arguments: dict[str, Any],
    *,
    where: Place | None,
) -> None:
    """Refuse arguments that the signature of `function` does not have, before it is called.

    Raises:
        ConfigError: it does not take them, or needs others.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C without a signature: the call itself will tell
    known = _parameters(function)
    for name in arguments:
        if known is not None and name not in known:
            raise _unknown_argument(target, name, known, where)
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        raise ConfigError.cannot(
            f"call {target}",
            why=str(error),
            instead=f"write its arguments beside 'target': {_listed(known or ())}",
            where=where,
        ) from None


def accepts(function: Any, name: str) -> bool:
    """Return whether a parameter called `name` stands in the signature of `function`.

    >>> accepts(sorted, "key"), accepts(sorted, "keys")
    (True, False)
    """
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _parameters(function: Any) -> tuple[str, ...] | None:
    """The names that `function` takes as keywords; None where it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )


def _unknown_argument(
    target: str, name: str, known: Iterable[str], where: Place | None
) -> ConfigError:
    close = nearest(name, known)
    return ConfigError.cannot(
        f"call {target}",
        why=f"it takes no {name!r}",
        instead=f"did you mean '{close}'?" if close else f"it takes {_listed(known)}",
        where=where,
    )


def _of_target(source: Source | None, path: Path) -> Place | None:
    return None if source is None else source.where((*path, "target"))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _no_module(target: str, name: str, error: ModuleNotFoundError, where: Place | None) -> Message:
    missing = error.name or name
    if name == missing or name.startswith(f"{missing}."):
        why = f"there is no module {missing!r}"
        instead = "check the spelling, install it, or start stretto in the folder it is in"
    else:
        why = f"{name} imports {missing!r}, which is not installed"
        instead = f"install {missing}"
    return cannot(f"import {target}", why=why, instead=instead, where=where)
