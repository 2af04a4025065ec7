"""Fields of run files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    Tag,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic_core import core_schema

from stretto.config.yaml import show_path
from stretto.errors import ConfigError, TimeError
from stretto.timing import Every, Time, read_wall_clock
from stretto.timing.conversion import check_run

TIME_PATTERN = (
    r"^\s*[0-9][0-9_]*(\.[0-9]+|/[0-9][0-9_]*)?([eE][+-]?[0-9]+)?"
    r"(%|[KMBT]?(ep|ba|sp|tok|dur|sec)|[dhms]([0-9dhm./]*[hms])?)\s*$"
)
"""What an editor can check of a time; the whole grammar is that of `Time`."""
TARGET_PATTERN = r"^[^\W0-9]\w*(\.[^\W0-9]\w*)*:[^\W0-9]\w*(\.[^\W0-9]\w*)*$"


class Part(BaseModel):
    """A mapping in a run file, read strictly and frozen; written out without what is not set."""

    model_config = ConfigDict(frozen=True, strict=True)

    settings: ClassVar[type | None] = None
    """The class whose fields are the keys; None: they are declared here."""

    @model_serializer(mode="wrap")
    def _without_what_is_not_set(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        fields = type(self).model_fields
        # An argument of a target may be null and mean it; a field is then left out.
        return {
            key: value for key, value in values.items() if value is not None or key not in fields
        }


class Section(Part):
    """A part of a run file without keys of its own invention.

    A key that is null counts as left out, in every section.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, values: Any) -> Any:
        is_closed = cls.model_config.get("extra") == "forbid"
        return without_nulls(values) if isinstance(values, dict) and is_closed else values


def without_nulls(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a mapping without its nulls, which mean left out."""
    return {key: value for key, value in mapping.items() if value is not None}


def read_target(value: object) -> str:
    """Return `value` if it has the form `package.module:attribute`.

    >>> read_target("torch.optim:AdamW")
    'torch.optim:AdamW'

    Raises:
        ConfigError: it has not.
    """
    if isinstance(value, str):
        module, colon, attribute = value.partition(":")
        parts = [*module.split("."), *attribute.split(".")]
        if colon and all(part.isidentifier() for part in parts):
            return value
        if re.fullmatch(r"\w+(\.\w+)+", value):
            module, _, attribute = value.rpartition(".")
            raise ConfigError.cannot(
                f"use {value!r} as a target",
                why="a colon must part the module from what is in it",
                instead=f"write '{module}:{attribute}'",
            )
    raise ConfigError.cannot(
        f"use {shown(value)} as a target",
        why="it is not of the form 'package.module:attribute'",
        instead="write for example 'torch.optim:AdamW'",
    )


def read_time(value: object) -> Time:
    """Return the time that a value of a run file says; a bare number says none.

    >>> read_time("10%")
    Time('0.1dur')

    Raises:
        TimeError: it is not a time; the message says what to write.
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
    """Return what picks the way in which a value is written, with the error for none of them."""
    return Discriminator(
        shape,
        custom_error_type="shape",
        custom_error_message=instead,  # a context would be a dict, which has no hash
    )


def shown(value: object) -> str:
    """Return a value of a run file as short text for a message.

    >>> shown([1, True, None])
    '[1, true, null]'
    """
    text = _plain(value)
    return text if len(text) <= 60 else text[:57] + "..."


def summary_of(kind: object) -> str:
    """Return the first line of a docstring.

    >>> summary_of(len)
    'Return the number of items in a container.'
    """
    return (kind.__doc__ or "").partition("\n")[0]


def _plain(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value[:20]))}]"
    if isinstance(value, dict):
        entries = (f"{show_path((key,))}: {_plain(item)}" for key, item in list(value.items())[:20])
        return f"{{{', '.join(entries)}}}"
    return repr(value)


def _time(check: Callable[[Time], Time], examples: list[str]) -> tuple[Any, ...]:
    def read(value: object) -> Time:
        return check(read_time(value))

    return (
        GetPydanticSchema(lambda _, __: core_schema.no_info_plain_validator_function(read)),
        PlainSerializer(str, return_type=str),
        WithJsonSchema({"x-ref": "Time", "examples": examples}),
    )


TargetText: TypeAlias = Annotated[
    str,
    BeforeValidator(read_target),
    Field(json_schema_extra={"pattern": TARGET_PATTERN}, examples=["torch.optim:AdamW"]),
]
"""`package.module:attribute`."""
Length: TypeAlias = Annotated[Time, *_time(lambda time: Every(time).interval, ["1ep", "10%"])]
"""A time that is longer than nothing."""
WallClock: TypeAlias = Annotated[Time, *_time(read_wall_clock, ["90s", "10m"])]
"""A time on the wall clock that is longer than nothing."""
RunLength: TypeAlias = Annotated[Time, *_time(check_run, ["2ep", "2Btok", "36h"])]
"""The length of a run."""

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


class Target(Part):
    """Something of Python's: `target` names it, all other keys are its arguments.

    >>> Target.model_validate({"target": "torch.optim:AdamW", "lr": 1e-3}).arguments
    {'lr': 0.001}
    """

    model_config = ConfigDict(extra="allow")

    target: TargetText
    """`package.module:attribute`, imported when the run is built."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments: every key that is not one of the section's own."""
        return dict(self.__pydantic_extra__ or {})
