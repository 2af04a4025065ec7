"""YAML text to plain values with the line of each: safe, strict and bounded for any text.

PyYAML's safe loader does the parsing; the values are made here, because YAML 1.1 has habits that
surprise in a run file: `1e3` is a text, `1:30` is 90, `on` is true and a date is an object.
Here a plain word is null, a boolean, a number or a text, as in YAML 1.2, and a key is always a
text. Tags are refused, so nothing in a file makes an object.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard, final

import yaml

from stretto.config.reading.source import Path
from stretto.config.reading.yaml_errors import broken_yaml
from stretto.errors import ConfigError, cannot, shown

Value: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
"""What a run file holds."""

MAX_BYTES = 100_000
"""Longest run file, in bytes; the packaged ones have about a thousand."""
MAX_VALUES = 10_000
"""Most values in a run file, aliases followed: a billion laughs end at the ten thousandth."""
MAX_DEPTH = 30
"""Deepest nesting; a batch size in periods in a schedule reaches 8."""

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?(([0-9]+(_[0-9]+)*)?\.[0-9]+|[0-9]+(_[0-9]+)*\.?)([eE][-+]?[0-9]{1,3})?")
_LONGEST_NUMBER = 100


@final
@dataclass(frozen=True, slots=True)
class Document:
    """The value of a YAML text, and the line of each key and each item in it."""

    value: Value
    lines: dict[Path, int]


def parse_yaml(text: str, name: str) -> Document:
    """Return what the YAML `text` says.

    >>> parse_yaml("seed: 7", "run.yaml").value
    {'seed': 7}

    Args:
        text: the whole text.
        name: what messages call it.

    Raises:
        ConfigError: it is not YAML, or more than a run file may hold; the message says where.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise ConfigError(
            cannot(
                f"read {name}",
                why=f"it has {size} bytes and a run file has at most {MAX_BYTES}",
                instead="write lists of values into code and name it with 'target:'",
            )
        )
    try:
        return _Reader(name, yaml.parse(text, Loader=yaml.SafeLoader)).document()
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            cannot(
                f"read {name}",
                why=f"the character U+{int(error.character):04X} is not allowed in YAML",
                instead="write plain UTF-8 text",
                where=f"at character {error.position + 1}",
            )
        ) from None
    except yaml.MarkedYAMLError as error:
        raise broken_yaml(error, name) from None
    except yaml.YAMLError:
        raise ConfigError(
            cannot(f"read {name}", why="it is not YAML", instead="write 'key: value' lines")
        ) from None


def parse_scalar(text: str) -> bool | int | float | str | None:
    """Return what a plain word of YAML says: null, a boolean, a number or itself.

    >>> [parse_scalar(word) for word in ("1_000", "1e-3", "on", "1:30", "true")]
    [1000, 0.001, 'on', '1:30', True]
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if len(text) <= _LONGEST_NUMBER:
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text) and not re.match(r"[-+]?0[0-9]", text):
            number = float(text)
            return number if math.isfinite(number) else text
    return text


@dataclass(slots=True)
class _Reader:
    """Builds plain values from the parser's events, one look ahead, nothing kept of the parser."""

    name: str
    events: Iterator[yaml.Event]
    lines: dict[Path, int] = field(default_factory=dict)
    anchors: dict[str, Value] = field(default_factory=dict)
    count: int = 0

    def document(self) -> Document:
        event = self._next()  # StreamStart
        event = self._next()
        if isinstance(event, yaml.StreamEndEvent):
            raise self._refused("it is empty", "write at least 'max_duration: 2ep'", event)
        value = self._value(self._next(), ())
        self._next()  # DocumentEnd
        event = self._next()
        if not isinstance(event, yaml.StreamEndEvent):
            raise self._refused(
                "a second document begins", "keep one run in a file, without '---'", event
            )
        return Document(value, self.lines)

    def _next(self) -> yaml.Event:
        try:
            return next(self.events)
        except (ValueError, OverflowError):  # of int() and chr(), which PyYAML calls unguarded
            raise ConfigError(
                cannot(
                    f"read {self.name}",
                    why="an escape or a '%YAML' line holds a number that is too large",
                    instead="write the character itself, and no '%YAML' line",
                )
            ) from None

    def _value(self, event: yaml.Event, path: Path) -> Value:
        self._count(1, event)
        if len(path) > MAX_DEPTH:
            raise self._refused(
                f"values nest deeper than {MAX_DEPTH}", "write it with less nesting", event
            )
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        assert isinstance(event, yaml.NodeEvent)
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise self._refused(
                f"the tag {shown(tag)} would make an object", "write the plain value", event
            )
        value = self._untagged(event, path)
        if event.anchor is not None:
            self.anchors[event.anchor] = value
        return value

    def _untagged(self, event: yaml.Event, path: Path) -> Value:
        if isinstance(event, yaml.ScalarEvent):
            text = self._text(event)
            return text if event.style else parse_scalar(text)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Value] = []
            while not isinstance(event := self._next(), yaml.SequenceEndEvent):
                inner = (*path, len(items))
                self.lines[inner] = _place(event)[0]
                items.append(self._value(event, inner))
            return items
        entries: dict[str, Value] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key = self._key(event)
            inner = (*path, key)
            if key in entries:
                raise self._refused(
                    f"the key {shown(key)} stands twice, first on line {self.lines[inner]}",
                    "keep one of them",
                    event,
                )
            self.lines[inner] = _place(event)[0]
            after = self._next()
            if ":" in key and _is_bare(event) and _is_bare(after) and after.value == "":
                # In braces, '{0ep:8}' is the key '0ep:8' without a value.
                first, _, second = key.partition(":")
                raise self._refused(
                    f"{shown(key)} has no value",
                    f"write {shown(f'{first}: {second}')}, with a space",
                    event,
                )
            entries[key] = self._value(after, inner)
        return entries

    def _key(self, event: yaml.Event) -> str:
        if not isinstance(event, yaml.ScalarEvent) or event.tag is not None:
            raise self._refused("a key is not plain text", "write 'key: value'", event)
        if event.value == "<<" and not event.style:
            raise self._refused("'<<' merges are not read", "write the keys out", event)
        return self._text(event)

    def _text(self, event: yaml.ScalarEvent) -> str:
        text = str(event.value)
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise self._refused(
                "half of a surrogate pair is not a character", "write the character itself", event
            )
        return text

    def _alias(self, event: yaml.AliasEvent) -> Value:
        if event.anchor not in self.anchors:
            raise self._refused(
                f"there is no finished '&{event.anchor}' before it", "write the value out", event
            )
        return self._copied(self.anchors[event.anchor], event)

    def _copied(self, value: Value, event: yaml.Event) -> Value:
        """A copy, counted, so that aliases of aliases can't grow without end."""
        self._count(1, event)
        if isinstance(value, list):
            return [self._copied(item, event) for item in value]
        if isinstance(value, dict):
            return {key: self._copied(item, event) for key, item in value.items()}
        return value

    def _count(self, more: int, event: yaml.Event) -> None:
        self.count += more
        if self.count > MAX_VALUES:
            raise self._refused(
                f"it holds more than {MAX_VALUES} values", "name code with 'target:'", event
            )

    def _refused(self, why: str, instead: str, event: yaml.Event) -> ConfigError:
        line, column = _place(event)
        where = f"line {line}, column {column} of {self.name}"
        return ConfigError(cannot(f"read {self.name}", why=why, instead=instead, where=where))


def _is_bare(event: yaml.Event) -> TypeGuard[yaml.ScalarEvent]:
    """Whether it is a word without quotes."""
    return isinstance(event, yaml.ScalarEvent) and not event.style


def _place(event: yaml.Event) -> tuple[int, int]:
    """The line and the column, from 1, at which an event begins."""
    mark = event.start_mark
    assert mark is not None, "the pure Python parser marks every event"
    return mark.line + 1, mark.column + 1


def check_mapping(value: Value, name: str) -> dict[str, Any]:
    """Return `value` if it is a mapping, as a whole run file must be."""
    if isinstance(value, dict):
        return value
    raise ConfigError(
        cannot(
            f"use {name} as a run file",
            why=f"it holds {describe(value)} and not keys with values",
            instead="write lines such as 'max_duration: 2ep'",
        )
    )


def describe(value: object) -> str:
    """Return what kind of value this is, in the words of a run file.

    >>> describe([1, 2])
    'a list'
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a number", float: "a number", str: "a text", list: "a list", dict: "a mapping"}
    return names.get(type(value), f"a {type(value).__name__}")
