"""Fields of run files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    ModelWrapValidatorHandler,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from stretto._foreign import FOREIGN
from stretto.config.yaml import Path
from stretto.errors import ConfigError, StrettoError, TimeError, nearest, shown
from stretto.timing import Every, Time, read_wall_clock
from stretto.timing.time import read_run

TIME_PATTERN = (
    r"^\s*[0-9][0-9_]*(\.[0-9]+|/[0-9][0-9_]*)?([eE][+-]?[0-9]+)?"
    r"(%|[KMBT]?(ep|ba|sp|tok|dur|sec)|[dhms]([0-9dhm./]*[hms])?)\s*$"
)
"""What an editor can check of a time; the whole grammar is that of `Time`."""


class Section(BaseModel):
    """A mapping in a run file: read strictly, frozen, and written without unset keys.

    A null key counts as absent. All mistakes are reported together.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, values: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(values, cls):
            return values
        keys = ", ".join(cls.model_fields)
        if not isinstance(values, dict):
            instead = f"write some of the keys {keys}"
            raise ConfigError.cannot(
                f"use {shown(values)}", why="it is not a mapping", instead=instead
            )
        is_closed = cls.model_config.get("extra") == "forbid"
        given = without_nulls(values) if is_closed else values
        unknown = [key for key in given if is_closed and key not in cls.model_fields]
        meant = {key: nearest(key, cls.model_fields) for key in unknown}
        found = [_details((key,), _no_such_key(key, near, keys)) for key, near in meant.items()]
        found += [
            _details((), _omitted(name, field))
            for name, field in cls.model_fields.items()
            if field.is_required() and given.get(name) is None and name not in meant.values()
        ]
        try:
            section = read({key: value for key, value in given.items() if key not in meant})
        except ValidationError as error:
            found += _again(error)
        if found:
            raise ValidationError.from_exception_data(cls.__name__, found)
        return section

    @property
    def arguments(self) -> dict[str, Any]:
        """The keys that are not fields: keyword arguments of a function."""
        return dict(self.__pydantic_extra__ or {})

    @model_serializer(mode="wrap")
    def _without_what_is_not_set(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        # None is a real value for an argument of a target, but an unset field.
        return {
            key: value
            for key, value in write(self).items()
            if value is not None or key not in fields
        }


def _no_such_key(key: str, meant: str | None, keys: str) -> ConfigError:
    instead = f"did you mean '{meant}'?" if meant else f"the keys here are {keys}"
    return ConfigError.cannot(
        f"use the key {key!r}",
        why="there is no such key here",
        instead=FOREIGN[key][-1] if key in FOREIGN else instead,
    )


def _omitted(name: str, field: FieldInfo) -> ConfigError:
    example = field.examples[0] if field.examples else "..."
    instead = f"write for example '{name}: {example}'"
    return ConfigError.cannot(f"omit {name!r}", why="it has no default", instead=instead)


def _details(path: Path, error: StrettoError) -> InitErrorDetails:
    return InitErrorDetails(type="value_error", loc=path, input=None, ctx={"error": error})


def _again(error: ValidationError) -> list[InitErrorDetails]:
    """Return the details of an error, to raise them again; absent keys are reported already."""
    found: list[Any] = [one for one in error.errors(include_url=False) if one["type"] != "missing"]
    for one in found:
        if one["type"] != "value_error":
            one["type"] = PydanticCustomError(one["type"], one["msg"], one.get("ctx"))
    return found


@contextmanager
def refused_at(*path: str) -> Iterator[None]:
    """Let pydantic list an error of ours raised within at the path that it comes from."""
    try:
        yield
    except StrettoError as error:
        raise ValidationError.from_exception_data("value", [_details(path, error)]) from error


def without_nulls(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a mapping without its nulls, which count as absent."""
    return {key: value for key, value in mapping.items() if value is not None}


def read_time(value: object) -> Time:
    """Return the time in a value of a run file; it must have a unit.

    >>> read_time("10%")
    Time('0.1dur')

    Raises:
        TimeError: it is not a time.
    """
    if isinstance(value, Time):
        return value
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return Time(str(value))
    raise TimeError.cannot(
        f"read {shown(value)} as a time",
        why="it is not a text",
        instead="write a number with a unit such as '90ep', '1_000sp', '10%' or '1h30m'",
    )


def shape_of(shape: Callable[[Any], str | None], instead: str) -> Discriminator:
    """Return a discriminator of the forms of a value, with the error for an unknown form."""
    return Discriminator(shape, custom_error_type="shape", custom_error_message=instead)


def summary_of(kind: object) -> str:
    """Return the first line of a docstring.

    >>> summary_of(len)
    'Return the number of items in a container.'
    """
    return (kind.__doc__ or "").partition("\n")[0]


def read_as(kind: Any) -> GetPydanticSchema:
    """Read a value as `kind`, in an `Annotated` type that a type checker understands."""
    return GetPydanticSchema(lambda _, handler: handler(kind))


def reference(name: str) -> WithJsonSchema:
    """Return the schema of a value that `$defs` describes under that name."""
    return WithJsonSchema({"x-ref": name})


def _time(read: Callable[[Any], Time], *examples: str) -> Any:
    return (
        PlainValidator(read),
        PlainSerializer(str, return_type=str),
        reference("Time"),
        Field(examples=list(examples)),
    )


Interval: TypeAlias = Annotated[
    Time, *_time(lambda value: Every(read_time(value)).interval, "1ep", "10%")
]
"""A time that is longer than nothing."""
WallClock: TypeAlias = Annotated[
    Time, *_time(lambda value: read_wall_clock(read_time(value)), "90s", "10m")
]
"""A time on the wall clock that is longer than nothing."""
RunLength: TypeAlias = Annotated[Time, *_time(read_run, "2ep", "2Btok", "36h")]
"""The length of a run."""
AnyTime: TypeAlias = Annotated[
    Any, PlainValidator(read_time), PlainSerializer(str), reference("Time")
]
"""A time that the class it is for checks further."""

Count: TypeAlias = Annotated[int, Field(ge=1, strict=True)]
"""A whole number of at least 1."""
CountOrAuto: TypeAlias = Annotated[
    Annotated[Count, Tag("<count>")] | Annotated[Literal["auto"], Tag("<auto>")],
    shape_of(
        lambda value: "<count>" if not isinstance(value, str) else {"auto": "<auto>"}.get(value),
        "write a number such as 8, or auto",
    ),
]
"""A whole number of at least 1, or `auto`."""
Natural: TypeAlias = Annotated[int, Field(ge=0, strict=True)]
"""A whole number of at least 0."""
