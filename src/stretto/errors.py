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
An error carries its message as fields (`what`, `why`, `instead`, `where`), as in
`raise TimeError.cannot("read ...", why=..., instead=...)`.
As text they have one form:
**cannot <do what> <the value as given>: <why>; <what to write instead> (<where>)**.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self, TypeVar, final


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written.

    >>> str(Place("seed", file="run.yaml", line=3))
    'seed in run.yaml, line 3'
    """

    key: str
    """The key, argument or option; the file itself if the place is all of it."""
    file: str | None = None
    """The file's name, without its folder."""
    line: int | None = None
    """The line, from 1."""

    def __str__(self) -> str:
        line = "" if self.line is None else f", line {self.line}"
        return self.key if self.file is None else f"{self.key} in {self.file}{line}"


Error = TypeVar("Error", bound="StrettoError")


@final
@dataclass(frozen=True, slots=True)
class Message:
    """What an error says, in parts."""

    what: str
    """What was attempted, with the value as given."""
    why: str
    """The reason it cannot be done."""
    instead: str
    """What to write instead."""
    where: tuple[Place, ...] = ()
    """The places that the value came from, the innermost one first."""

    def __str__(self) -> str:
        places = "".join(f" ({place})" for place in self.where)
        # Each on its own: an address in one of them may end with the sign that follows it.
        what, why, instead = map(without_credentials, (self.what, self.why, self.instead))
        return f"cannot {what}: {why}; {instead}{places}"

    def at(self, where: Place | None) -> Message:
        """Return the message with one more place."""
        return self if where is None else replace(self, where=(*self.where, where))


def fact_text(name: str) -> str:
    """Return how a message names a fact of a horizon, which is a field of the data in a run.

    >>> fact_text("dataset_num_samples"), fact_text("tokens_per_sample")
    ('dataset_num_samples (num_samples of the data)', 'tokens_per_sample of the data')
    """
    of_data = name.removeprefix("dataset_")
    if name == "tokens_per_sample":
        return f"{name} of the data"
    return f"{name} ({of_data} of the data)" if of_data in ("num_samples", "num_tokens") else name


def samples_text(count: int) -> str:
    """Return a number of samples in words.

    >>> samples_text(1), samples_text(2048)
    ('1 sample', '2,048 samples')
    """
    return f"{count:,} sample{'' if count == 1 else 's'}"


_SECRETS = (
    # A password may have slashes, as keys of AWS do; `host:22/` is a port, and `container@account`
    # a place in Azure.
    re.compile(r"""(://)[^\s'"/?#@:]*:(?!\d+/)[^\s'"@]*@(?:[^\s'"/@]*@)*"""),
    re.compile(r"""(https?://)[^\s'"/?#@]*@"""),
    re.compile(r"""(://[^\s'"?#]*)[?#][^\s'"]*=[^\s'"]*"""),
    # Of connection strings and headers, such as `AccountKey=...;`.
    re.compile(
        r"""\b((?:account|api|access|secret)_?key=|passw(?:or)?d=|(?:\w+_)?secret=|"""
        r"""(?:(?:access|auth|hf)_)?token=|bearer )[^\s&;,'")\]}]{6,}""",
        re.IGNORECASE,
    ),
)


def without_credentials(text: str) -> str:
    """Return a text without passwords and keys; its addresses have no user and no query.

    >>> without_credentials("cannot reach s3://KEY:SECRET@bucket/run?sig=1a2b")
    'cannot reach s3://bucket/run'
    """
    for secret in _SECRETS:
        text = secret.sub(r"\1", text)
    return text


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of what it says, at most 200 characters.

    >>> first_line(ValueError("no such file"))
    'ValueError: no such file'
    """
    text = without_credentials(str(error).strip().partition("\n")[0])
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def cannot(what: str, *, why: str, instead: str, where: Place | str | None = None) -> Message:
    """Return the message of an error, in the one form that all of ours have.

    Args:
        what: what was attempted, with the value as given.
        why: the reason it cannot be done.
        instead: what to write instead.
        where: the argument, key or file it came from.

    >>> print(cannot("read '3epoch' as a time", why="unknown unit 'epoch'", instead="write '3ep'"))
    cannot read '3epoch' as a time: unknown unit 'epoch'; write '3ep'
    """
    place = Place(where) if isinstance(where, str) else where
    return Message(what, why, instead, () if place is None else (place,))


def nearest(word: object, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, if any.

    >>> nearest("max-Duratoin", ["max_duration", "model"])
    'max_duration'
    """
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    close = difflib.get_close_matches(str(word).lower().replace("-", "_"), folded, n=1)
    return folded[close[0]] if close else None


def shown(value: object) -> str:
    """Return how a value as given stands in a message: its repr, cut where it is long.

    >>> shown("3epoch"), len(shown("ab" * 500))
    ("'3epoch'", 80)
    """
    try:
        # A text is cut first: a file read by mistake may be very long.
        text = repr(without_credentials(value)[:80] if isinstance(value, str) else value)
    except ValueError:  # Python refuses to print an int of more than 4300 digits
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


class StrettoError(Exception):
    """The root of all errors that stretto raises on purpose.

    >>> from stretto import Time
    >>> try:
    ...     Time("3 weeks")
    ... except StrettoError as error:
    ...     type(error).__name__, error.message.why
    ('TimeError', 'there is a space inside')
    """

    def __init__(self, *messages: Message) -> None:
        super().__init__(*messages)

    @classmethod
    def cannot(cls, what: str, *, why: str, instead: str, where: Place | str | None = None) -> Self:
        """Return an error of this kind; the arguments are those of the function `cannot`."""
        return cls(cannot(what, why=why, instead=instead, where=where))

    @classmethod
    def bad(cls, name: str, value: object, why: str, instead: str) -> Self:
        """Return an error for one value that is wrong in itself.

        >>> print(BatchSizeError.bad("maximum", 0, "it is not positive", "write 1 or more"))
        cannot use maximum=0: it is not positive; write 1 or more
        """
        return cls(cannot(f"use {name}={shown(value)}", why=why, instead=instead))

    def __str__(self) -> str:
        return "\n".join(map(str, self.messages))

    @property
    def code(self) -> str:
        """The short name of this kind of error, a heading of the troubleshooting page.

        >>> TimeError().code, CheckpointError().code
        ('time', 'checkpoint')
        """
        return type(self).__name__.removesuffix("Error").lower()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All that is wrong: one message, or one for each mistake of a run file."""
        return self.args

    @property
    def message(self) -> Message:
        """The first of the messages."""
        return self.messages[0]

    def recast(self, kind: type[Error], *, where: Place | str | None = None) -> Error:
        """Return the same as an error of another kind, or with one more place around the others."""
        place = Place(where) if isinstance(where, str) else where
        # The error of somebody's callback may have been made of a text.
        return kind(*(one.at(place) if isinstance(one, Message) else one for one in self.args))


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


class PlanWarning(UserWarning):
    """A run that is allowed and probably a mistake; warned of once, when the run is built."""


class MissingPackageError(StrettoError, ImportError):
    """An optional package that is not installed."""

    def __init__(self, *messages: Message, name: str | None = None) -> None:
        super().__init__(*messages)
        self.name = name
