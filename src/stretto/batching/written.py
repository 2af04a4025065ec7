"""How policies are written in mappings: each class declares its key, the rest is its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, final

Path: TypeAlias = tuple[str | int, ...]
"""The keys and list indices that lead to a value."""
Class = TypeVar("Class", bound=type)


@final
@dataclass(frozen=True, slots=True)
class Way:
    """A way to write something as a mapping: what it makes, and the key that names it."""

    make: Callable[..., Any]
    key: str
    argument: str | None
    """The argument whose value stands behind the key; None: the key says only which way it is."""

    def parameters(self) -> dict[str, inspect.Parameter]:
        """Return the parameter of each key.

        >>> [*WAYS["noise_scale"].parameters()][:3]
        ['start', 'maximum', 'noise_scale']
        """
        found = inspect.signature(self.make).parameters.values()
        return {self.key if one.name == self.argument else one.name: one for one in found}


WAYS: dict[str, Way] = {}
"""The ways to write batch sizes that stand for themselves, except ramps, by key."""
RAMPS: dict[str, Way] = {}
"""What `ramp` may be."""
COUPLED: dict[str, Way] = {}
"""The ways to write batch sizes together with a schedule."""
WRAPPERS: dict[str, Way] = {}
"""What may stand beside a way, to change its sizes."""
ORDER = ("power_of_two", "multiple_of", "hysteresis", "monotone", "at_least", "at_most")
"""In which order wrappers apply, whatever the order of the keys: bounds are the last."""


def written(
    table: dict[str, Way], name: str, argument: str | None = None
) -> Callable[[Class], Class]:
    """Declare how a class is written: its key and the argument that the key stands for."""

    def declare(kind: Class) -> Class:
        table[name] = Way(kind, "ramp" if table is RAMPS else name, argument)
        return kind

    return declare
