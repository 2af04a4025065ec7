"""YAML text to plain values with the line of each.

PyYAML parses with words of YAML 1.2: YAML 1.1 reads `1e3` as text, `1:30` as 90, `on` as true and a
date as an object. A key is always a text. Tags are refused, so nothing in a file makes an object.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, final

import yaml

from stretto.errors import ConfigError, Place, StrettoError, shown

Path: TypeAlias = tuple[str | int, ...]
"""The keys and list indices that lead to a value."""


def show_path(path: Path) -> str:
    """Return a path as it is written in an override; indices as `.0`, for shells read `[0]`.

    >>> show_path(("schedules", "lr", "Periods", 0, 1))
    'schedules.lr.Periods.0.1'
    """
    # A key may contain control characters of a terminal.
    parts = (str(part) for part in path)
    return ".".join(part if part.isprintable() else repr(part)[1:-1] for part in parts)


@final
@dataclass(frozen=True, slots=True)
class Source:
    """The name of a run file, and the line of each of its values.

    All sources are equal, so that two files with the same values are.

    >>> print(Source("run.yaml", {("seed",): 3}).where(("seed",)))
    seed in run.yaml, line 3
    """

    name: str = field(default="the run file", compare=False)
    """The file's name, without its folder."""
    lines: Mapping[Path, int] = field(default_factory=dict, compare=False)
    """The line, from 1, of each key and each item of a list."""
    overridden: frozenset[Path] = field(default=frozenset(), compare=False)
    """The paths that the command line has set."""

    def where(self, path: Path) -> Place:
        """Return where the value at `path` comes from, or where it should be."""
        if not path:
            return Place(self.name)
        for end in range(len(path), 0, -1):
            if path[:end] in self.overridden:
                return Place(f"{show_path(path)} on the command line")
            if path[:end] in self.lines:
                return Place(show_path(path), self.name, self.lines[path[:end]])
        return Place(show_path(path), self.name)

    @contextmanager
    def at(self, *path: str | int) -> Iterator[None]:
        """Add `path` to errors of ours raised within, unless they have a place.

        Raises:
            ConfigError: in place of any other error of ours.
        """
        try:
            yield
        except StrettoError as error:
            if isinstance(error, ConfigError) and all(one.where for one in error.messages):
                raise
            raise error.recast(ConfigError, where=self.where(path)) from error


NO_SOURCE = Source()
"""A run file that was not read from anywhere."""


Value: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
"""A value in a run file."""

MAX_BYTES = 100_000
"""Longest run file, in bytes; the packaged ones have about a thousand."""
MAX_VALUES = 10_000
"""Most values in a run file, aliases followed: a billion laughs end at the ten thousandth."""
MAX_DEPTH = 30
"""Deepest nesting; batch sizes in periods reach 8."""


_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_WORDS: dict[str, tuple[str, Callable[[str], Value]]] = {
    "null": (r"~|null|Null|NULL|", lambda _: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)", int),
    "float": (
        rf"(?![-+]?0[0-9])[-+]?(?:(?:{_DIGITS})?\.[0-9]+|{_DIGITS}\.?)(?:[eE][-+]?[0-9]{{1,3}})?",
        # One beyond all floats stays a text.
        lambda text: float(text) if math.isfinite(float(text)) else text,
    ),
}
"""The form and the reader of each kind of plain word; any other is a text."""
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Reads plain words as YAML 1.2 does; refuses tags."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  as in PyYAML

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            raise _error(event, f"the tag {shown(event.tag)} would make an object")  # type: ignore[attr-defined]
        return super().compose_node(parent, index)


class Dumper(yaml.SafeDumper):
    """Quotes a text that the loader would read as another kind of value."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  as in PyYAML

    def ignore_aliases(self, data: Any) -> bool:
        """Write no aliases."""
        del data
        return True


for _kind in (_Loader, Dumper):
    for _name, (_form, _) in _WORDS.items():
        _kind.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_form})\Z"), None)


def parse_yaml(text: str, name: str) -> tuple[Value, Source]:
    """Return the value of a YAML text, and where each value in it was written.

    >>> parse_yaml("seed: 7", "run.yaml")[0]
    {'seed': 7}

    Args:
        text: the whole text.
        name: its name in messages.

    Raises:
        ConfigError: it is not YAML, or it is too large.
    """
    lines: dict[Path, int] = {}
    where, instead = None, ""
    try:
        if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise yaml.YAMLError(f"a run file has at most {MAX_BYTES} bytes")
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            raise yaml.YAMLError("it is empty")
        return _value(node, (), lines), Source(name, lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1} of {name}" if mark else name
        why, _, instead = (error.problem or "it is not YAML").partition("; ")
    except RecursionError:
        why = f"values nest deeper than {MAX_DEPTH}"
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # int() and chr() in PyYAML
        why = " ".join(str(error).split())
    raise ConfigError.cannot(
        f"read {name}",
        why=why,
        instead=instead
        or "write 'key: value' lines, indented alike, and texts with special signs in quotes",
        where=where,
    )


def _value(node: yaml.Node, path: Path, lines: dict[Path, int]) -> Value:
    """Return the value of a node, and note the line of each key and item."""
    if len(lines) > MAX_VALUES:
        raise _error(node, f"it has more than {MAX_VALUES} values")
    if len(path) > MAX_DEPTH:
        raise _error(node, f"values nest deeper than {MAX_DEPTH}")
    if isinstance(node, yaml.ScalarNode):
        kind = node.tag.removeprefix(_TAG)
        return _WORDS[kind][1](_text(node)) if kind in _WORDS else _text(node)
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            lines[*path, number] = item.start_mark.line + 1
        return [_value(item, (*path, number), lines) for number, item in enumerate(node.value)]
    entries: dict[str, Value] = {}
    for at, item in node.value:
        key = _text(at)
        if key == "<<" and not at.style:
            raise _error(at, "'<<' merges are not read; write the keys out")
        if key in entries:
            first = f"first on line {lines[*path, key]}; keep one of them"
            raise _error(at, f"the key {shown(key)} is there twice, {first}")
        if ":" in key and not at.style and item.value == "" and not item.style:
            # In braces, '{0ep:8}' is the key '0ep:8' without a value.
            better = shown(key.replace(":", ": ", 1))
            raise _error(at, f"{shown(key)} has no value; write {better}, with a space")
        lines[*path, key] = at.start_mark.line + 1
        entries[key] = _value(item, (*path, key), lines)
    return entries


def _text(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _error(node, "a key is not plain text; write 'key: value'")
    if any("\ud800" <= character <= "\udfff" for character in node.value):
        raise _error(node, "half of a surrogate pair is not a character")
    return str(node.value)


def _error(at: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


_INDEX = re.compile(r"[0-9]{1,9}")
"""A number that picks the item of a list; a longer one is a key like any other."""


def apply_overrides(
    values: Value, source: Source, overrides: Sequence[str]
) -> tuple[Value, Source]:
    """Return the values of a run file with `overrides` set, in their order, and their source.

    A key is a path with dots, where a number picks the item of a list, or belongs to a name such as
    `betas.0`; the value is read as YAML; `key=null` takes the key away, so that its default counts.

    >>> values, _ = apply_overrides({"seed": 1}, Source(), ["optimizer.lr=1e-3", "seed=null"])
    >>> values
    {'optimizer': {'lr': 0.001}}

    Raises:
        ConfigError: an override is not `key=value`, or leads through something that has no keys.
    """
    values = copy.deepcopy(values)
    lines, overridden = dict(source.lines), set(source.overridden)
    for text in overrides:
        path = _set(values, *parse_override(text), text)
        # The lines of the old value would mislead.
        for known in [known for known in lines if known[: len(path)] == path]:
            del lines[known]
        overridden.add(path)
    return values, Source(source.name, lines, frozenset(overridden))


def parse_override(text: str) -> tuple[Path, Value]:
    """Return the path and the value of one `key=value`.

    >>> parse_override("schedules.lr.Periods.0.0=10%")
    (('schedules', 'lr', 'Periods', 0, 0), '10%')

    Raises:
        ConfigError: it is not of that form.
    """
    key, equals, rest = text.partition("=")
    parts = key.split(".")
    is_key = key.isprintable() and all(part.strip() == part != "" for part in parts)
    if not equals or not rest.strip() or not is_key:
        raise _no_override(text, "it is not of the form key=value", "max_duration=1ep or seed=null")
    if len(parts) > MAX_DEPTH:
        raise _no_override(text, f"its key has {len(parts)} parts", "optimizer.lr=1e-3")
    path = tuple(int(part) if _INDEX.fullmatch(part) else part for part in parts)
    return path, parse_yaml(rest, repr(f"{shown(key)}=..."))[0]


def _set(values: Value, path: Path, value: Value, text: str) -> Path:
    """Set the value at a path; return the path with the keys as they are in the mappings."""
    inner: Any = values
    rest, found = path, tuple[str | int, ...]()
    while rest:
        above, key = show_path(found), cast(Any, rest[0])
        if not isinstance(inner, (dict, list)):
            raise _no_override(text, f"{above} has no keys", f"{above}=...")
        if isinstance(inner, list) and not (isinstance(key, int) and key < len(inner)):
            raise _no_override(text, f"{above} is a list of {len(inner)}", f"{above}.0=...")
        parts = 1
        if isinstance(inner, dict):
            parts = _parts_of_key(inner, rest)
            key = show_path(rest[:parts])
        rest, found = rest[parts:], (*found, key)
        if rest:
            if isinstance(inner, dict) and inner.get(key) is None:
                inner[key] = {}
            inner = inner[key]
        elif value is None and isinstance(inner, dict):
            inner.pop(key, None)
        else:
            inner[key] = value
    return found


def _parts_of_key(inner: Mapping[Any, Any], rest: Path) -> int:
    """Return how many parts of a path are one key of a mapping, such as `betas.0` in schedules."""
    for parts in range(len(rest), 1, -1):
        if show_path(rest[:parts]) in inner:
            return parts
    is_index = len(rest) > 1 and re.fullmatch(r"[0-9]+(@.*)?", str(rest[1])) is not None
    return 2 if is_index and not isinstance(inner.get(str(rest[0])), (dict, list)) else 1


def _no_override(text: str, why: str, example: str) -> ConfigError:
    instead = f"write for example {example}"
    return ConfigError.cannot(f"set {shown(text)}", why=why, instead=instead, where="command line")
