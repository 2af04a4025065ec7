"""YAML text to plain values with the line of each: safe, strict and bounded for any text.

PyYAML composes the nodes. The values are made here, because YAML 1.1 reads `1e3` as text, `1:30` as
90, `on` as true and a date as an object. Here a plain word is null, a boolean, a number or a text,
as in YAML 1.2, and a key is always a text. Tags are refused, so nothing in a file makes an object.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import yaml

from stretto.config.source import Path, Source, show_path
from stretto.errors import ConfigError, shown

_PROBLEMS = {
    "but found another document": (
        "a second document begins",
        "keep one run in a file, without '---'",
    ),
    "found undefined alias": ("there is no such '&' name before it", "write the value out"),
    "found duplicate anchor": ("the same '&' name stands twice", "write the values out"),
    "mapping values are not allowed here": (
        "a second ':' stands where a value should be",
        "put the text in quotes, or the inner 'key: value' on its own indented line",
    ),
    "cannot start any token": (
        "a value or a key begins with a character that YAML keeps for itself",
        "indent with spaces, and put texts that begin with @, %, ` or a tab in quotes",
    ),
    "could not find expected ':'": (
        "a line is neither 'key: value' nor part of one",
        "write 'key: value', with a space after the colon",
    ),
    "expected <block end>": (
        "the indentation does not fit the lines above",
        "give keys of one level the same indentation",
    ),
    "expected the node content": (
        "a value is missing",
        "write one, or close the '{', '[' or quote before it",
    ),
    "found unknown escape character": (
        "a backslash in double quotes begins an escape that YAML does not have",
        "use single quotes",
    ),
    "expected '<document start>'": (
        "the file goes on after its value has ended",
        "write 'key: value' lines, and quote what begins with '&', '*' or '!'",
    ),
    "expected alphabetic or numeric character": (
        "a value begins with '&' or '*' and names no anchor",
        "put it in quotes",
    ),
    "expected ',' or": ("a '{' or '[' is not closed", "close it, with ',' between the entries"),
    "found unexpected end of stream": ("a quote is not closed", "close it on the same line"),
}


def broken_yaml(error: yaml.MarkedYAMLError, name: str) -> ConfigError:
    """Return PyYAML's error in our own words."""
    problem = error.problem or "it is not YAML"
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1} of {name}" if mark else name
    for said, (why, instead) in _PROBLEMS.items():
        if said in problem:
            return ConfigError.cannot(f"read {name}", why=why, instead=instead, where=where)
    return ConfigError.cannot(
        f"read {name}",
        why=f"it is not YAML: {problem}",
        instead="look at the quotes, colons and indentation there",
        where=where,
    )


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


_INDEX = re.compile(r"[0-9]{1,9}")
"""A number that picks the item of a list; a longer one is a key like any other."""


def apply_overrides(
    values: dict[str, Any], source: Source, overrides: Sequence[str]
) -> tuple[dict[str, Any], Source]:
    """Return the values of a run file with `overrides` set, in their order, and their source.

    A key is a path with dots, where a number picks the item of a list; the value is read as YAML;
    `key=null` takes the key away, so that its default counts.

    >>> values, _ = apply_overrides({"seed": 1}, Source(), ["optimizer.lr=1e-3", "seed=null"])
    >>> values
    {'optimizer': {'lr': 0.001}}

    Raises:
        ConfigError: an override is not `key=value`, or leads through something that has no keys.
    """
    values = copy.deepcopy(values)
    lines = dict(source.lines)
    overridden = set(source.overridden)
    for text in overrides:
        path, value = parse_override(text)
        _set(values, path, value, text)
        # What stood there is gone, so its lines would mislead.
        for known in [known for known in lines if known[: len(path)] == path]:
            del lines[known]
        overridden.add(path)
    return values, Source(source.name, lines, frozenset(overridden))


def parse_override(text: str) -> tuple[Path, Value]:
    """Return the path and the value of one `key=value`.

    >>> parse_override("schedules.lr.periods.0.duration=10%")
    (('schedules', 'lr', 'periods', 0, 'duration'), '10%')

    Raises:
        ConfigError: it is not of that form.
    """
    key, equals, rest = text.partition("=")
    if not equals:
        raise _no_override(text, "it has no '='", "write for example 'max_duration=1ep'")
    if any("\ud800" <= character <= "\udfff" for character in key):
        raise _no_override(text, "its key is not UTF-8", "write it in UTF-8")
    parts = key.split(".")
    if not all(part.strip() == part and part for part in parts):
        raise _no_override(
            text, "a part of its key is empty", "write for example 'optimizer.lr=1e-3'"
        )
    if not rest.strip():
        raise _no_override(
            text,
            "it has no value",
            f"write a value, or {_short(key) + '=null'!r} to go back to the default",
        )
    if len(parts) > MAX_DEPTH:
        raise _no_override(
            text, f"its key has {len(parts)} parts", f"write at most {MAX_DEPTH}, parted by dots"
        )
    path = tuple(int(part) if _INDEX.fullmatch(part) else part for part in parts)
    return path, parse_yaml(rest, repr(f"{_short(key)}=...")).value


def _set(values: dict[str, Any], path: Path, value: Value, text: str) -> None:
    inner: Any = values
    for depth, part in enumerate(path):
        is_last = depth == len(path) - 1
        if isinstance(inner, list):
            place = _index(inner, part, path[:depth], text)
        elif isinstance(inner, dict):
            place = str(part)
        else:
            raise _no_override(
                text,
                f"{show_path(path[:depth])} is {describe(inner)}, which has no keys",
                f"set it as a whole, with '{show_path(path[:depth])}=...'",
            )
        if not is_last:
            if isinstance(inner, dict) and inner.get(place) is None:
                inner[place] = {}
            inner = inner[place]
        elif value is None and isinstance(inner, dict):
            inner.pop(place, None)
        else:
            inner[place] = value


def _index(items: list[Any], part: str | int, path: Path, text: str) -> Any:
    if isinstance(part, int) and part < len(items):
        return part
    raise _no_override(
        text,
        f"{show_path(path)} is a list of {len(items)}",
        f"write a number from 0 to {len(items) - 1} after '{show_path(path)}.', such as 0"
        if items
        else f"set it as a whole, with '{show_path(path)}=...'",
    )


def _no_override(text: str, why: str, instead: str) -> ConfigError:
    said = f"set {_short(text)!r}"
    return ConfigError.cannot(said, why=why, instead=instead, where="command line")


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
