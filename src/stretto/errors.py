"""Every error that stretto raises on purpose.

```
StrettoError
├── TimeError            (ValueError)    a text or number that is not a time
├── UnitError            (TypeError)     two times of different units meet where one unit is needed
├── ConversionError      (ValueError)    a fact that the conversion needs is missing
├── ScheduleError        (ValueError)    a schedule that cannot be evaluated on this run
├── BatchSizeError       (ValueError)    a batch size, a policy or a split that cannot be
├── PlanError            (ValueError)    a run that would fail at a later stage
├── DataError            (ValueError)    data that cannot be counted, cut or ordered
├── ConfigError          (ValueError)    a run file that says something else than it should
├── CheckpointError      (RuntimeError)  a checkpoint that is broken or belongs to another run
├── FitError             (RuntimeError)  no batch fits, or what one needs cannot be told
├── TrainingError        (RuntimeError)  a run that cannot go on
└── MissingPackageError  (ImportError)   an optional package that is not installed
```

Each leaf is also the builtin that a caller would expect, so `except ValueError` keeps working.
Messages have one form, made by `cannot`:
**cannot <do what> <the value as given>: <why>; <what to write instead> (<where>)**.
"""

from __future__ import annotations


def cannot(what: str, *, why: str, instead: str, where: str | None = None) -> str:
    """Return an error message in the one form that all of ours have.

    Args:
        what: what was attempted, with the value as given.
        why: the reason it cannot be done.
        instead: what to write instead.
        where: the argument, key or file it came from.

    >>> cannot("read '3epoch' as a time", why="unknown unit 'epoch'", instead="write '3ep'")
    "cannot read '3epoch' as a time: unknown unit 'epoch'; write '3ep'"
    """
    place = f" ({where})" if where else ""
    return f"cannot {what}: {why}; {instead}{place}"


def shown(value: object) -> str:
    """Return how a value as given stands in a message: its repr, cut where it is long.

    >>> shown("3epoch"), len(shown("ab" * 500))
    ("'3epoch'", 80)
    """
    try:
        # A text is cut first: a file read by mistake may be very long.
        text = repr(value[:80] if isinstance(value, str) else value)
    except ValueError:  # Python refuses to print an int of more than 4300 digits
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


class StrettoError(Exception):
    """The root of all errors that stretto raises on purpose.

    >>> from stretto import Time
    >>> try:
    ...     Time("3 weeks")
    ... except StrettoError as error:
    ...     type(error).__name__
    'TimeError'
    """


class TimeError(StrettoError, ValueError):
    """A text or number that is not a time."""


class UnitError(StrettoError, TypeError):
    """Times of different units meet where one unit is needed."""


class ConversionError(StrettoError, ValueError):
    """A conversion needs a fact that is not known."""


class ScheduleError(StrettoError, ValueError):
    """A schedule that cannot be evaluated on this run."""


class BatchSizeError(StrettoError, ValueError):
    """A batch size, a batch size policy or a split that cannot be."""


class PlanError(StrettoError, ValueError):
    """A run that would fail at a later stage."""


class DataError(StrettoError, ValueError):
    """Data that cannot be counted, cut or put in order."""


class ConfigError(StrettoError, ValueError):
    """A run file that says something else than it should."""


class CheckpointError(StrettoError, RuntimeError):
    """A checkpoint that is broken or belongs to another run."""


class FitError(StrettoError, RuntimeError):
    """No batch size fits into memory, or what one needs of it cannot be told."""


class TrainingError(StrettoError, RuntimeError):
    """A run that cannot go on."""


class MissingPackageError(StrettoError, ImportError):
    """An optional package that is not installed."""
