"""Sample and token counts that a data set provides, by their usual names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from stretto.errors import DataError, shown
from stretto.timing.number import checked_whole, whole


def own_count(data: Any, *names: str) -> int | None:
    """Return a count of a data set: an attribute, or a method without arguments.

    >>> class Text:
    ...     def get_num_tokens(self):
    ...         return 900
    >>> own_count(Text(), "num_tokens", "get_num_tokens")
    900

    Raises:
        DataError: a method returns neither an integer of at least 1 nor None.
    """
    for name in names:
        value: Any = getattr(data, name, None)
        if _takes(value, 0):
            value = value()
            if value is not None:
                what = f"use {shown(value)}, which {type(data).__name__}.{name}() returns"
                instead = "return how many there are, or None if that is not known"
                return checked_whole(value, DataError, what, instead)
        number = whole(value)
        if number is not None and number > 0:
            return number
    return None


def own_counter(data: Any, *names: str) -> Callable[[Any], int] | None:
    """Return a data set's method, by one of several names, that counts in a batch.

    >>> class Text:
    ...     def get_batch_size(self, batch):
    ...         return len(batch)
    >>> own_counter(Text(), "get_batch_size")([1, 2])
    2
    """
    methods = (getattr(data, name, None) for name in names)
    return next((method for method in methods if _takes(method, 1)), None)


def _takes(method: object, count: int) -> bool:
    """Return whether something is a method of so many arguments; an optional `batch` counts."""
    if not callable(method):
        return False
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind not in several
    }
    return count in {len(needed), len(needed | ({"batch"} & parameters.keys()))}
