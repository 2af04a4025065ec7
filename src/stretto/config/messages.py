"""Errors of run files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from stretto._foreign import FOREIGN
from stretto.config.fields import Section, shown
from stretto.config.yaml import Path, Source, as_key, show_path
from stretto.errors import ConfigError, Message, StrettoError, cannot, nearest

MAX_ERRORS = 20
"""Most errors that one message lists."""


def explain(error: ValidationError, root: type[BaseModel], source: Source) -> ConfigError:
    """Return all that pydantic found, one message each, in the order of the file.

    Args:
        error: what validating a run file raised.
        root: the section that was validated.
        source: where its values were written.
    """
    found = error.errors(include_url=False)
    meant = {(details["loc"][:-1], _meant(details, root)) for details in found}
    messages = [
        _message(details, root, source)
        for details in found
        if not (details["type"] == "missing" and (details["loc"][:-1], details["loc"][-1]) in meant)
    ]
    distinct = list(dict.fromkeys(messages))
    more = len(distinct) - MAX_ERRORS
    explained = ConfigError(*distinct[:MAX_ERRORS])
    if more > 0:
        explained.add_note(f"and {more} more")
    return explained


def _message(details: ErrorDetails, root: type[BaseModel], source: Source) -> Message:
    loc, kind, context = details["loc"], details["type"], details.get("ctx", {})
    path = _path(loc)
    where = source.where(path)
    if kind == "value_error":
        error: StrettoError = context["error"]
        return error.message.recast(where, as_key)
    if kind == "missing":
        return _missing(loc, root, source)
    if kind == "extra_forbidden":
        inside = f" in {show_path(path[:-1])}" if len(path) > 1 else ""
        section, meant = _section_at(root, loc[:-1]), _meant(details, root)
        known = ", ".join(section.model_fields if section else ())
        return cannot(
            f"use the key {path[-1]!r}",
            why=f"there is no such key{inside}",
            instead=_instead(str(path[-1]), meant, known),
            where=where,
        )
    if kind == "shape":
        why, instead = "it is none of the things that can stand here", details["msg"]
    elif kind in ("model_type", "model_attributes_type"):
        section = _section_at(root, loc)
        keys = list(section.model_fields) if section else []
        why, instead = _REASONS["dict_type"]
        if keys:
            listed = ", ".join(keys)
            instead = f"write keys with values, such as {{{keys[0]}: ...}} (its keys are {listed})"
    else:
        why, instead = _reason(kind, context, details["input"])
    name = show_path(path) if path else source.name
    return cannot(f"use {shown(details['input'])} as {name}", why=why, instead=instead, where=where)


def _reason(kind: str, context: Mapping[str, Any], value: object) -> tuple[str, str]:
    """Why pydantic refused a value, and what to write."""
    if kind == "literal_error":
        choices = str(context["expected"])
        meant = nearest(str(value), choices.replace("'", "").replace(" or ", ", ").split(", "))
        return (
            "there is no such choice",
            f"did you mean '{meant}'?" if meant else f"write {choices}",
        )
    if kind == "greater_than_equal":
        return f"it is less than {context['ge']:g}", f"write a number of at least {context['ge']:g}"
    if kind == "greater_than":
        return f"it is not above {context['gt']:g}", f"write a number above {context['gt']:g}"
    if kind == "less_than":
        return f"it is not less than {context['lt']}", "write a smaller number"
    if kind == "bool_type" and str(value).lower() in ("on", "yes", "off", "no"):
        meant = "true" if str(value).lower() in ("on", "yes") else "false"
        return "it is a text here, as in YAML 1.2", f"write {meant}"
    return _REASONS.get(kind, ("it is not what can stand here", "see docs/run-file.md"))


_REASONS = {
    "int_type": ("it is not a whole number", "write one such as 64"),
    "int_from_float": ("it is not a whole number", "write one such as 64"),
    "float_type": ("it is not a number", "write one such as 0.1"),
    "finite_number": ("it is not finite", "write a number such as 0.1"),
    "bool_type": ("it is neither true nor false", "write true or false"),
    "string_type": ("it is not a text", "put it in quotes"),
    "list_type": ("it is not a list", "write items in brackets, or one '- item' per line"),
    "too_short": ("it is empty", "write items in brackets, or one '- item' per line"),
    "dict_type": ("it is not a mapping", "write keys with values, such as {key: value}"),
    "string_pattern_mismatch": (
        "it holds something else than letters, digits, '.', '_' and '-'",
        "write a name such as 'validation'",
    ),
}


_EXAMPLES: dict[object, str] = {int: "64", float: "0.1"}


def _missing(loc: tuple[str | int, ...], root: type[BaseModel], source: Source) -> Message:
    path, name = _path(loc), str(loc[-1])
    section = _section_at(root, loc[:-1])
    field = section.model_fields.get(name) if section else None
    example = _example(field) if field else None
    written = f"'{name}: {example}'" if example else f"the key '{name}'"
    whole = show_path(path[:-1]) or source.name
    return cannot(
        f"use {whole}",
        why=f"it has no '{name}'",
        instead=f"write for example {written}" if example else f"add {written}",
        where=source.where(path[:-1]),
    )


def _example(field: FieldInfo) -> str | None:
    schemas = [getattr(item, "json_schema", None) for item in field.metadata]
    several = [one.get("examples") for one in schemas if isinstance(one, dict)]
    examples = next(filter(None, [field.examples, *several]), None)
    return str(examples[0]) if examples else _EXAMPLES.get(field.annotation)


def _meant(details: ErrorDetails, root: type[BaseModel]) -> str | None:
    """The key that an unknown one was probably meant to be."""
    if details["type"] != "extra_forbidden":
        return None
    section = _section_at(root, details["loc"][:-1])
    written = details["loc"][-1]
    return nearest(str(written), section.model_fields) if section else None


def _path(loc: tuple[str | int, ...]) -> Path:
    """The path in the file: pydantic's, without the names of shapes and of keys' own errors."""
    return tuple(part for part in loc if not _is_tag(part) and part != "[key]")


def _is_tag(part: str | int) -> bool:
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


def _section_at(root: type[BaseModel], loc: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The section that pydantic's location leads to."""
    here: Any = root
    for part in loc:
        if _is_tag(part):
            here = next((s for s in _sections(Section) if f"<{s.__name__}>" == part), None)
            continue
        section = _first_section(here)
        if section is not None and part in section.model_fields:
            here = section.model_fields[str(part)].annotation
    return _first_section(here)


def _sections(section: type[BaseModel]) -> Iterable[type[BaseModel]]:
    for inner in section.__subclasses__():
        yield inner
        yield from _sections(inner)


def _first_section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _first_section(inner)
        if found is not None:
            return found
    return None


def _instead(key: str, meant: str | None, known: str) -> str:
    if key in FOREIGN:
        return f"write {FOREIGN[key]}"
    return f"did you mean '{meant}'?" if meant else f"the keys here are {known}"
