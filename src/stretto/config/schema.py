"""The JSON schema of run files."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any, final

from pydantic.json_schema import GenerateJsonSchema

from stretto.config.fields import TIME_PATTERN, Section
from stretto.config.forms import COUPLED, adapter
from stretto.config.run import RunConfig
from stretto.settings import Checkpointing, Loading, Stepping
from stretto.timing import Time

_DURATION = {
    "anyOf": [{"const": "rest"}, {"$ref": "#/$defs/Time"}],
    "description": "How long it is, or `rest`.",
}


_COUPLED = [one.__name__ for one in COUPLED.values()]


def run_file_schema() -> dict[str, Any]:
    """Return the JSON Schema of run files.

    What needs the whole file or Python (that a warm-up fits, that a target exists) is beyond a
    schema. Nulls, which count as absent, are not among the suggestions.

    >>> run_file_schema()["required"]
    ['max_duration', 'data', 'batch_size']
    """
    schema = RunConfig.model_json_schema(schema_generator=_Generator)
    described = [*_inner_sections(Section), Loading, Stepping, Checkpointing]
    sections = {section.__name__: section for section in described}
    parts = schema["$defs"]
    for name, part in [("RunConfig", schema), *parts.items()]:
        _describe(part, sections[name])
    for name in ("BatchSize", "Schedule"):
        parts.update(_forms(name, parts))
    schema = _tidy(schema)
    schema["$defs"]["Time"] = {
        "description": "An amount and a unit: 90ep, 500ba, 1_000sp, 2Btok, 0.1dur, 10%, 1h30m.",
        "type": "string",
        "pattern": TIME_PATTERN,
    }
    return {
        "$schema": _Generator.schema_dialect,
        **schema,
        "title": "stretto run file",
        "description": "What a training run is. Times have a unit, as in docs/guides/time.md.",
    }


def _forms(name: str, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions of the forms of an adapter, and of periods of it."""
    found = adapter(name).json_schema(schema_generator=_Generator)
    own = {key: one for key, one in found.pop("$defs").items() if key not in parts}
    several = found.get("oneOf") or found["anyOf"]
    inside = [
        {**parts, **own}[key]
        for one in several
        if (key := one.get("$ref", "").rpartition("/")[2]) and key not in _COUPLED
    ]
    periods = [
        one
        | {
            "properties": {"duration": _DURATION, **one["properties"]},
            "required": ["duration", *one.get("required", ())],
        }
        for one in inside
    ]
    return {**own, name: {"anyOf": several}, f"PeriodOf{name}": {"anyOf": periods}}


def field_texts(section: type) -> dict[str, str]:
    """Return the docstring of each field of a section and its bases.

    pydantic can collect them too, but does so at every start: 0.2 s for all our sections.
    """
    texts: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not base.__module__.startswith("stretto."):
            continue
        try:
            source = inspect.getsource(base)
        except OSError:
            continue  # made from a schedule's signature, and described there
        definition = ast.parse(textwrap.dedent(source)).body[0]
        assert isinstance(definition, ast.ClassDef), "the source of a class is a class"
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    return texts


@final
class _Generator(GenerateJsonSchema):
    """Writes times that are defaults as text."""

    def encode_default(self, dft: Any) -> Any:
        return str(dft) if isinstance(dft, Time) else super().encode_default(dft)


def _describe(part: dict[str, Any], section: type) -> None:
    for name, text in field_texts(section).items():
        if name in part.get("properties", {}):
            part["properties"][name].setdefault("description", text)


def _tidy(part: Any) -> Any:
    """Remove titles and nulls, and resolve references."""
    if isinstance(part, list):
        return [_tidy(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {
        key: _tidy(value)
        for key, value in part.items()
        # A property may itself be called title; only a text is one.
        if not (key == "title" and isinstance(value, str))
        and not (key == "default" and (value is None or isinstance(value, dict)))
    }
    if "x-ref" in kept:
        kept = {"$ref": f"#/$defs/{kept.pop('x-ref')}", **kept}
    choices = kept.get("anyOf")
    if isinstance(choices, list) and {"type": "null"} in choices:
        choices = [choice for choice in choices if choice != {"type": "null"}]
        kept["anyOf"] = choices
        if len(choices) == 1:
            del kept["anyOf"]
            kept = {**choices[0], **kept}
    return kept


def _inner_sections(root: type[Section]) -> list[type[Section]]:
    return [inner for child in root.__subclasses__() for inner in (child, *_inner_sections(child))]
