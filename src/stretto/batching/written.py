"""How policies are written in mappings: a class declares its key, the rest is its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, final

from stretto.errors import BatchSizeError, shown

Path: TypeAlias = tuple[str | int, ...]
"""The keys and list indices that lead to a value."""
Class = TypeVar("Class", bound=type)


@final
@dataclass(frozen=True, slots=True)
class Way:
    """One form of a mapping: what it makes, and the key that names it."""

    make: Callable[..., Any]
    key: str
    argument: str | None
    """The argument that the key's value fills; None: the key only names the form."""

    def parameters(self) -> dict[str, inspect.Parameter]:
        """Return the parameter of each key.

        >>> [*WAYS["noise_scale"].parameters()][:3]
        ['start', 'maximum', 'minimum']
        """
        found = inspect.signature(self.make).parameters.values()
        return {self.key if one.name == self.argument else one.name: one for one in found}


WAYS: dict[str, Way] = {}
"""The forms of independent batch sizes except ramps, by key."""
RAMPS: dict[str, Way] = {}
"""The values of `ramp`."""
COUPLED: dict[str, Way] = {}
"""The forms of batch sizes coupled to a schedule."""
WRAPPERS: dict[str, Way] = {}
"""Further keys, which change the sizes."""
ORDER = ("power_of_two", "multiple_of", "hysteresis", "monotone", "at_least", "at_most")
"""The order in which wrappers apply, whatever the order of the keys; bounds come last."""


def written(
    table: dict[str, Way], name: str, argument: str | None = None
) -> Callable[[Class], Class]:
    """Declare the key of a class in a mapping, and the argument that the value of the key sets."""

    def declare(kind: Class) -> Class:
        table[name] = Way(kind, "ramp" if table is RAMPS else name, argument)
        return kind

    return declare


def flag(key: str, value: object) -> bool:
    """Return a value that is true or false.

    Raises:
        BatchSizeError: it is neither.
    """
    if isinstance(value, bool):
        return value
    raise BatchSizeError.cannot(
        f"use {shown(value)} as {key}",
        why="it is neither true nor false",
        instead="write true or false",
    )
