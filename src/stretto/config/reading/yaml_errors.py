"""What PyYAML says of a text that is not YAML, in our own words."""

from __future__ import annotations

import yaml

from stretto.errors import ConfigError

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
