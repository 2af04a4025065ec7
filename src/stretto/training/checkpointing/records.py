"""Read records of a checkpoint; errors name the file and the key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stretto.errors import CheckpointError, StrettoError, shown

UNFIT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that Python raises for an invalid record."""
_MOST = 2**63


@contextmanager
def section(path: Path, name: str) -> Iterator[None]:
    """Add the checkpoint and the section of its records to errors raised inside.

    Raises:
        StrettoError: the error raised inside, with the place added.
        CheckpointError: the section is not from a run.
    """
    try:
        yield
    except StrettoError as error:
        raise error.recast(type(error), where=f"{name!r} in {path}") from error
    except UNFIT as error:
        raise CheckpointError.cannot(
            f"resume from {path}",
            why=f"{name!r} in its state.json is not that of a run "
            f"({type(error).__name__}: {error})",
            instead="resume from another checkpoint",
        ) from error


def unfit(path: Path, name: str, error: Exception) -> CheckpointError:
    """Return the error for an optimizer that fails in its first update after a resume."""
    return CheckpointError.cannot(
        f"update the weights with {name}",
        why=f"it cannot compute with its state from {path} ({type(error).__name__}: {error})",
        instead=f"resume with {name} built as it was then, or from another checkpoint",
    )


def number(record: Mapping[str, Any], key: str) -> float:
    """Return a number of a record; nan and inf are allowed.

    >>> number({"sum": 0.5}, "sum")
    0.5

    Raises:
        LookupError: it is missing.
        ValueError: it is not a number.
    """
    value = record[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, int) and abs(value) >= _MOST):
        raise ValueError(f"{key!r} is {shown(value)}, and not a number")
    return float(value)


def count(record: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    """Return a count of a record.

    >>> count({"splits": 2}, "splits")
    2

    Raises:
        LookupError: it is missing.
        ValueError: it is not an integer, or less than `least`.
    """
    value = record[key]
    if type(value) is not int or not least <= value < _MOST:
        raise ValueError(f"{key!r} is {shown(value)}, and not a count")
    return value
