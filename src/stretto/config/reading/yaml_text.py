"""YAML text to plain values with the line of each: safe, strict and bounded for any text.

PyYAML composes the nodes; the values are made here, because YAML 1.1 has habits that
surprise in a run file: `1e3` is a text, `1:30` is 90, `on` is true and a date is an object.
Here a plain word is null, a boolean, a number or a text, as in YAML 1.2, and a key is always a
text. Tags are refused, so nothing in a file makes an object.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import yaml

from stretto.config.reading.source import Path
from stretto.config.reading.yaml_errors import broken_yaml
from stretto.errors import ConfigError, shown

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
        raise _refused(
            name,
            None,
            f"it has {size} bytes and a run file has at most {MAX_BYTES}",
            "write lists of values into code and name it with 'target:'",
        )
    try:
        node = _Composer(text, name).get_single_node()
    except ConfigError:
        raise
    except (ValueError, OverflowError):  # of int() and chr(), which PyYAML calls unguarded
        raise _refused(
            name,
            None,
            "an escape or a '%YAML' line holds a number that is too large",
            "write the character itself, and no '%YAML' line",
        ) from None
    except yaml.reader.ReaderError as error:
        raise _refused(
            name,
            f"at character {error.position + 1}",
            f"the character U+{int(error.character):04X} is not allowed in YAML",
            "write plain UTF-8 text",
        ) from None
    except yaml.MarkedYAMLError as error:
        raise broken_yaml(error, name) from None
    except yaml.YAMLError:
        raise _refused(name, None, "it is not YAML", "write 'key: value' lines") from None
    if node is None:
        raise _refused(name, None, "it is empty", "write at least 'max_duration: 2ep'")
    values = _Values(name)
    return Document(values.of(node, ()), values.lines)


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


class _Composer(yaml.SafeLoader):
    """Makes nodes of a text, and stops where one holds too much or would make an object."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name
        self.depth = 0
        self.count = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        self.count += 1
        _check_bounds(self.name, event.start_mark, self.depth, self.count)
        tag = getattr(event, "tag", None)
        if tag is not None:
            why = f"the tag {shown(tag)} would make an object"
            raise _refused(self.name, event.start_mark, why, "write the plain value")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


@dataclass(slots=True)
class _Values:
    """Makes plain values of nodes, aliases followed."""

    name: str
    lines: dict[Path, int] = field(default_factory=dict)
    count: int = 0

    def of(self, node: yaml.Node, path: Path) -> Value:
        self.count += 1
        _check_bounds(self.name, node.start_mark, len(path), self.count)
        if isinstance(node, yaml.ScalarNode):
            text = self._text(node)
            return text if node.style else parse_scalar(text)
        if isinstance(node, yaml.SequenceNode):
            return [self._inner(item, item, (*path, n)) for n, item in enumerate(node.value)]
        entries: dict[str, Value] = {}
        for key_node, item in node.value:
            key = self._key(key_node)
            if key in entries:
                first = self.lines[(*path, key)]
                why = f"the key {shown(key)} stands twice, first on line {first}"
                raise _refused(self.name, key_node.start_mark, why, "keep one of them")
            if ":" in key and _is_bare(key_node) and _is_bare(item) and item.value == "":
                # In braces, '{0ep:8}' is the key '0ep:8' without a value.
                instead = f"write {shown(key.replace(':', ': ', 1))}, with a space"
                why = f"{shown(key)} has no value"
                raise _refused(self.name, key_node.start_mark, why, instead)
            entries[key] = self._inner(key_node, item, (*path, key))
        return entries

    def _inner(self, at: yaml.Node, node: yaml.Node, path: Path) -> Value:
        self.lines[path] = at.start_mark.line + 1
        return self.of(node, path)

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            why = "a key is not plain text"
            raise _refused(self.name, node.start_mark, why, "write 'key: value'")
        if node.value == "<<" and not node.style:
            why = "'<<' merges are not read"
            raise _refused(self.name, node.start_mark, why, "write the keys out")
        return self._text(node)

    def _text(self, node: yaml.ScalarNode) -> str:
        text = str(node.value)
        if any("\ud800" <= character <= "\udfff" for character in text):
            why = "half of a surrogate pair is not a character"
            raise _refused(self.name, node.start_mark, why, "write the character itself")
        return text


def _is_bare(node: yaml.Node) -> bool:
    """Whether it is a word without quotes."""
    return isinstance(node, yaml.ScalarNode) and not node.style


def _check_bounds(name: str, mark: Any, depth: int, count: int) -> None:
    if depth > MAX_DEPTH:
        why = f"values nest deeper than {MAX_DEPTH}"
        raise _refused(name, mark, why, "write it with less nesting")
    if count > MAX_VALUES:
        why = f"it holds more than {MAX_VALUES} values"
        raise _refused(name, mark, why, "name code with 'target:'")


def _refused(name: str, mark: Any, why: str, instead: str) -> ConfigError:
    if mark is not None and not isinstance(mark, str):
        mark = f"line {mark.line + 1}, column {mark.column + 1} of {name}"
    return ConfigError.cannot(f"read {name}", why=why, instead=instead, where=mark)


def check_mapping(value: Value, name: str) -> dict[str, Any]:
    """Return `value` if it is a mapping, as a whole run file must be."""
    if isinstance(value, dict):
        return value
    raise ConfigError.cannot(
        f"use {name} as a run file",
        why=f"it holds {describe(value)} and not keys with values",
        instead="write lines such as 'max_duration: 2ep'",
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
