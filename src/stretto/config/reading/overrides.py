"""`key=value` on the command line: one value of the run file set anew."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from stretto.config.reading.source import Path, Source, show_path
from stretto.config.reading.yaml_text import MAX_DEPTH, Value, describe, parse_yaml
from stretto.errors import ConfigError

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
        raise _refused(text, "it has no '='", "write for example 'max_duration=1ep'")
    if any("\ud800" <= character <= "\udfff" for character in key):
        raise _refused(text, "its key is not UTF-8", "write it in UTF-8")
    parts = key.split(".")
    if not all(part.strip() == part and part for part in parts):
        raise _refused(text, "a part of its key is empty", "write for example 'optimizer.lr=1e-3'")
    if not rest.strip():
        raise _refused(
            text,
            "it has no value",
            f"write a value, or {_short(key) + '=null'!r} to go back to the default",
        )
    if len(parts) > MAX_DEPTH:
        raise _refused(
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
            raise _refused(
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
    raise _refused(
        text,
        f"{show_path(path)} is a list of {len(items)}",
        f"write a number from 0 to {len(items) - 1} after '{show_path(path)}.', such as 0"
        if items
        else f"set it as a whole, with '{show_path(path)}=...'",
    )


def _refused(text: str, why: str, instead: str) -> ConfigError:
    said = f"set {_short(text)!r}"
    return ConfigError.cannot(said, why=why, instead=instead, where="command line")


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
