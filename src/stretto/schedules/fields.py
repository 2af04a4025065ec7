"""`Timed`: the base of schedules and batch size policies, and the checks of their fields."""

from __future__ import annotations

import copy
import math
import operator
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    SupportsFloat,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from stretto._foreign import arguments_of, check_foreign, names_of
from stretto.errors import ScheduleError, StrettoError, nearest, shown
from stretto.timing import Time, TimeLike, TimeUnit
from stretto.timing.grammar import exact, is_number
from stretto.timing.time import Number, rounded


class Check(NamedTuple):
    """How a field with this annotation is checked and converted: `Annotated[float, Check(...)]`."""

    converted: Callable[[Any, str, type[StrettoError]], Any]
    """Returns the value of a field, from what was given, its name, and the error to raise."""


def number_field(text: str, is_valid: Callable[[float], bool]) -> Check:
    """Return the check of a field that is a number; `text` says which numbers are valid.

    >>> part = number_field("a number from 0 to 1", lambda value: 0 <= value <= 1)
    >>> part.converted(1, "x", ScheduleError)
    1.0
    """

    def converted(value: object, name: str, error: type[StrettoError]) -> float:
        found = _as_float(value) if is_number(value) else math.nan
        if not is_valid(found):
            raise error.bad(name, value, f"it is not {text}", "write such a number")
        return found + 0.0  # a negative zero becomes a plain one

    return Check(converted)


def checked_length(value: TimeLike, name: str, error: type[StrettoError] = ScheduleError) -> Time:
    """Return `value` as a length of time, which may be zero.

    Raises:
        StrettoError: it is negative.
        TimeError: it is not a time.
    """
    time = Time(value)
    if time.amount < 0:
        raise error.bad(name, str(time), "it is negative", f"write '{-time}'")
    return time


def checked_interval(value: TimeLike, name: str, error: type[StrettoError] = ScheduleError) -> Time:
    """Return `value` as a positive interval of time.

    Raises:
        StrettoError: it is not positive.
        TimeError: it is not a time.
    """
    time = Time(value)
    if time.amount <= 0:
        raise error.bad(
            name, str(time), "it is not longer than 0", f"write a time such as '1{time.unit}'"
        )
    return time


Factor: TypeAlias = Annotated[
    float, number_field("a finite number of at least 0", lambda value: 0 <= value < math.inf)
]
"""A field that is a finite number of at least 0."""
Positive: TypeAlias = Annotated[
    float, number_field("a finite number above 0", lambda value: 0 < value < math.inf)
]
"""A field that is a finite number above 0."""
Length: TypeAlias = Annotated[TimeLike, Check(checked_length)]
"""A field that is a time of at least 0; stored as a `Time`."""
Interval: TypeAlias = Annotated[TimeLike, Check(checked_interval)]
"""A field that is a time above 0; stored as a `Time`."""


class Timed(ABC):
    """A frozen value with times. In a dataclass, they are found among the fields."""

    __slots__ = ()
    error: ClassVar[type[StrettoError]]
    """What is raised for a ratio that times cannot be stretched by."""

    def __new__(cls, *_: Any, **named: Any) -> Self:
        """Make a value; refuse names of other libraries, such as `T_max`."""
        check_foreign(named, names_of(cls.__init__) if named else (), cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)

    def times(self) -> tuple[Time, ...]:
        """Return the times that have to be placed on one run."""
        return tuple(time for value in values_of(self).values() for time in times_of(value))

    def scaled(self, ratio: Number) -> Self:
        """Return the same with all times multiplied by `ratio`; scale the horizon, too.

        Fractions (`dur`, `%`) are unchanged, since they scale with the run. Batches, samples and
        tokens are rounded up to whole numbers, as in `Horizon.scaled`.

        >>> from stretto.schedules import MultiStep
        >>> MultiStep(["30ep", "75%"]).scaled(0.5).milestones
        (Time('15ep'), Time('0.75dur'))

        Raises:
            StrettoError: the ratio is not positive.
            TimeError: the ratio is not a finite number.
        """
        factor = exact(ratio)
        if factor <= 0:
            raise self.error.bad("ratio", ratio, "it is not positive", "write for example 0.5")
        return self.replaced(lambda value: stretched(value, factor))

    def replaced(self, change: Callable[[object], object]) -> Self:
        """Return the same with each value inside, at any depth of tuples, as `change` returns it.

        `change` returns the value itself for what stays.
        """
        found = {name: _replaced(value, change) for name, value in values_of(self).items()}
        if all(found[name] is value for name, value in values_of(self).items()):
            return self
        changed = copy.copy(self)
        fill(changed, **found)
        return changed

    def __repr__(self) -> str:
        written = ", ".join(_arguments(self)) if hasattr(self, "__dataclass_fields__") else "..."
        return f"{type(self).__name__}({written})"


def fill(value: object, /, **fields: object) -> None:
    """Set the fields of a frozen value while it is built."""
    for name, field in fields.items():
        object.__setattr__(value, name, field)


def check_fields(value: Any) -> None:
    """Check and convert each field of a dataclass that is annotated with a `Check` or `Literal`."""
    kind: type[Timed] = type(value)
    for name, (check, is_optional) in checks_of(kind).items():
        given = getattr(value, name)
        if not (given is None and is_optional):
            fill(value, **{name: check.converted(given, name, value.error)})


@cache
def checks_of(kind: type[Timed]) -> dict[str, tuple[Check, bool]]:
    """Return the check of each field that has one, and whether the field may be None."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for one in fields(kind):  # type: ignore[arg-type]
        hint = hints[one.name]
        kinds = (hint,) if hasattr(hint, "__metadata__") else (hint, *get_args(hint))
        marks = [mark for hint in kinds for mark in getattr(hint, "__metadata__", ())]
        if get_origin(hint) is Literal:
            marks = [_choice(get_args(hint))]
        check = next((mark for mark in marks if isinstance(mark, Check)), None)
        if check is not None:
            found[one.name] = check, type(None) in kinds
    return found


def _choice(choices: Sequence[str]) -> Check:
    return Check(lambda value, name, error: one_of(value, name, choices, error))


def one_of(
    value: object, name: str, choices: Sequence[str], error: type[StrettoError] = ScheduleError
) -> object:
    """Return `value` if it is one of `choices`.

    Raises:
        StrettoError: it is not.
    """
    if value not in choices:
        near = nearest(value, choices)
        instead = f"did you mean {near!r}?" if near else f"write {' or '.join(map(repr, choices))}"
        what = f"use {name}={shown(value)}"
        raise error.cannot(what, why="there is no such choice", instead=instead)
    return value


def values_of(value: object) -> dict[str, Any]:
    """Return the fields of a dataclass by name; anything else has none."""
    names = (one.name for one in fields(value)) if is_dataclass(value) else ()
    return {name: getattr(value, name) for name in names}


def times_of(value: object) -> Iterator[Time]:
    """Yield the times in a value, at any depth of tuples."""
    if isinstance(value, Time):
        yield value
    elif isinstance(value, Timed):
        yield from value.times()
    elif isinstance(value, tuple):
        for item in value:
            yield from times_of(item)


def stretched(value: object, ratio: Number) -> object:
    """Return a time or what has times, `ratio` times as long; anything else as it is."""
    if isinstance(value, Time) and value.unit is not TimeUnit.DURATION:
        return rounded(value.amount * exact(ratio), value.unit)
    return value.scaled(ratio) if isinstance(value, Timed) else value


def _replaced(value: object, change: Callable[[object], object]) -> object:
    if isinstance(value, tuple):
        items = tuple(_replaced(item, change) for item in value)
        return value if all(map(operator.is_, items, value)) else items
    return change(value)


def _arguments(value: object) -> Iterator[str]:
    """Return the constructor's arguments that differ from the defaults, as source."""
    for name, parameter in arguments_of(type(value)).items():
        given = getattr(value, name)
        written = repr(str(given)) if isinstance(given, Time) else name_of(given)
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield from map(repr, given)
        elif parameter.default is parameter.empty:
            yield written
        elif given != parameter.default:
            yield f"{name}={written}"


def name_of(value: object) -> str:
    """Return what a function or anything else is called in a message.

    >>> name_of(len), name_of(3)
    ('len', '3')
    """
    return getattr(value, "__qualname__", None) or repr(value)


def checked_factor(value: object, source: object) -> float:
    """Return the result of a user's function, if it is a factor.

    Raises:
        ScheduleError: it is not.
    """
    # The fast path for nearly all results; nan fails the comparison.
    if type(value) is float and 0.0 <= value < math.inf:
        return value
    # Another kind of number, such as a scalar of NumPy or torch.
    found = _as_float(value)
    if 0.0 <= found < math.inf:
        return found
    what, why = f"use {shown(value)} as a factor", "it is not a finite number of at least 0"
    instead = f"return a number such as 0.1 from {name_of(source)}"
    raise ScheduleError.cannot(what, why=why, instead=instead)


def _as_float(value: object) -> float:
    """Return the float nearest to a number; nan, which no range contains, if there is none."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan
