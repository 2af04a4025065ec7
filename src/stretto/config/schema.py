"""The JSON schema of run files."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection
from typing import Any, final, get_args

from pydantic.json_schema import GenerateJsonSchema

from stretto.batching import SizeFunction
from stretto.batching.policy import COUPLED, ORDER, RAMPS, WAYS, WRAPPERS, Way
from stretto.config.fields import TIME_PATTERN, Part, summary_of
from stretto.config.run import RunConfig
from stretto.config.settings import CHECKING
from stretto.config.values import KINDS, FileWords
from stretto.schedules import DecayShape
from stretto.timing import Time

_SIZE = {"type": "integer", "minimum": 1}
_TIME = {"$ref": "#/$defs/Time"}
_STEPS = {"type": "string", "examples": ["0tok:768 250Btok:1536"]}
_FLAG = {"type": "boolean"}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "int": _SIZE,
    "Size": _SIZE,
    "int | Literal['auto']": {"anyOf": [_SIZE, {"const": "auto"}]},
    "float": {"type": "number"},
    "float | Continuous": {"anyOf": [{"type": "number"}, {"const": "continuous"}]},
    "Factor": {"type": "number", "minimum": 0},
    "Positive": {"type": "number", "exclusiveMinimum": 0},
    "Number": {"type": "number"},
    "bool": _FLAG,
    "str": {"type": "string"},
    "TimeLike": _TIME,
    "Interval": _TIME,
    "Length": _TIME,
    "Sequence[TimeLike]": {"type": "array", "items": _TIME, "minItems": 1},
    "DecayShape": {"enum": [*get_args(DecayShape)]},
    "Equal": {"enum": ["time", "batches"]},
    "Rounding": {"enum": ["down", "up"]},
    "Literal['min', 'max']": {"enum": ["min", "max"]},
    "Sequence[int]": {"type": "array", "items": _SIZE, "minItems": 2},
    "StepsLike": {"anyOf": [_STEPS, {"$ref": "#/$defs/StepsMapping"}]},
    "PolicyLike": {"$ref": "#/$defs/BatchSize"},
    "Sizes": {"$ref": "#/$defs/BatchSize"},
    "Periods": {"type": "array", "items": {"$ref": "#/$defs/PeriodOfSizes"}, "minItems": 1},
    "IncreaseCallable": {"$ref": "#/$defs/Target"},
}
"""What is written for the annotation of an argument."""
_DURATION = {"anyOf": [{"const": "rest"}, _TIME], "description": "How long it is, or `rest`."}
_EVEN = _FLAG | {
    "description": "Only multiples of world_size * micro_batch_size, so that all ranks run full "
    "micro-batches."
}


def batch_size_schemas() -> dict[str, dict[str, Any]]:
    """Return the definitions that `#/$defs/BatchSize` needs, that one included."""
    wrappers = {key: _wrapper(WRAPPERS[key]) for key in ORDER} | {"even": _EVEN}
    ways = [
        *WAYS.values(),
        *RAMPS.values(),
        Way(FileWords(CHECKING).rampup, "rampup", "final_size"),
    ]
    alone = {_title(way): _way(way, wrappers) for way in ways}
    alone["TargetSizes"] = _target(wrappers)
    coupled = {_title(way): _way(way, {"even": _EVEN}, {"decay"}) for way in COUPLED.values()}
    periods = [_in_period(one) for one in alone.values()]
    steps = {
        "description": "A size from each of some times on.",
        "type": "object",
        "minProperties": 1,
        "propertyNames": _TIME,
        "additionalProperties": _SIZE,
    }
    refs = [{"$ref": f"#/$defs/{name}"} for name in ("StepsMapping", *alone, *coupled)]
    return {
        **alone,
        **coupled,
        "StepsMapping": steps,
        "PeriodOfSizes": {"anyOf": periods},
        "BatchSize": {"anyOf": [_SIZE, _STEPS, *refs]},
    }


def schedule_schemas() -> dict[str, dict[str, Any]]:
    """Return the definitions that make up `Schedule`: each kind by the name of its class."""
    kinds = {one.__name__: _object(Way(one, "", ""), {}) for one in KINDS.values()}
    periods = {"type": "array", "items": {"$ref": "#/$defs/PeriodOfSchedule"}, "minItems": 1}
    names = {name: {"$ref": f"#/$defs/{one.__name__}"} for name, one in KINDS.items()}
    written: dict[str, Any] = {
        "description": "One of the schedules that stretto has, by its name.",
        "type": "object",
        "properties": {**names, "periods": periods},
        "oneOf": [{"required": [name]} for name in (*KINDS, "periods")],
        "additionalProperties": False,
    }
    function: dict[str, Any] = {
        "description": "A function of yours; the other keys are its arguments.",
        "type": "object",
        "properties": {"target": {"$ref": "#/$defs/TargetText", "description": "Its name."}},
        "required": ["target"],
    }
    both = {"WrittenCurve": written, "CustomCurve": function}
    in_period = [_in_period(one) for one in both.values()]
    one: list[Any] = [
        {"type": "number", "minimum": 0},
        *({"$ref": f"#/$defs/{name}"} for name in both),
    ]
    several = {"type": "array", "items": {"anyOf": one}, "minItems": 1}
    return {
        **kinds,
        **both,
        "PeriodOfSchedule": {"anyOf": in_period},
        "Schedule": {"anyOf": [*one, several]},
    }


def _title(way: Way) -> str:
    name = way.make.__name__
    return name[0].upper() + name[1:]


def _property(parameter: inspect.Parameter, text: str | None) -> dict[str, Any]:
    kind = str(parameter.annotation).removesuffix(" | None").replace('"', "'")
    found = dict(_SCHEMAS[kind])
    if parameter.default not in (parameter.empty, None):
        default = parameter.default
        found["default"] = str(default) if isinstance(default, Time) else default
    return found | ({"description": text} if text else {})


def _way(way: Way, beside: dict[str, Any], without: Collection[str] = ()) -> Any:
    found = _object(way, beside, without)
    if way.argument is None:
        kind = next(name for name, one in RAMPS.items() if one is way)
        ramp = {"ramp": {"const": kind, "description": "Which ramp."}}
        found |= {
            "properties": ramp | found["properties"],
            "required": ["ramp", *found["required"]],
        }
    elif way.key not in found["required"]:
        found["required"].append(way.key)
    return found


def _object(way: Way, beside: dict[str, Any], without: Collection[str] = ()) -> Any:
    texts = argument_texts(way.make)
    own = {key: one for key, one in way.parameters().items() if one.name not in without}
    properties = {key: _property(one, texts.get(one.name)) for key, one in own.items()}
    return {
        "description": summary_of(way.make),
        "type": "object",
        "properties": properties | beside,
        "required": [key for key, one in own.items() if one.default is one.empty],
        "additionalProperties": False,
    }


def _wrapper(way: Way) -> dict[str, Any]:
    if way.argument is None:
        return _FLAG | {"description": summary_of(way.make)}
    parameter = inspect.signature(way.make).parameters[way.argument]
    found = _property(parameter, summary_of(way.make))
    found.pop("default", None)
    return found


def _target(beside: dict[str, Any]) -> dict[str, Any]:
    texts, known = argument_texts(SizeFunction), Way(SizeFunction, "", "").parameters()
    own = {name: _property(known[name], texts[name]) for name in ("every", "planned")}
    target = {
        "$ref": "#/$defs/TargetText",
        "description": "`package.module:function`, or a class of policies; keys that are not "
        "listed here are its arguments.",
    }
    text = "A function of yours, `function(timestamp, current) -> size`, or a policy of yours."
    properties = {"target": target, **own, **beside}
    return {"description": text, "type": "object", "properties": properties, "required": ["target"]}


def _in_period(way: dict[str, Any]) -> dict[str, Any]:
    return way | {
        "properties": {"duration": _DURATION, **way["properties"]},
        "required": ["duration", *way.get("required", ())],
    }


def argument_texts(kind: object) -> dict[str, str]:
    """Return what a docstring says of each argument.

    >>> from stretto.batching import StagedRamp
    >>> argument_texts(StagedRamp)["sizes"]
    'two or more sizes in ascending order.'
    """
    section = (inspect.getdoc(kind) or "").partition("Args:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def run_file_schema() -> dict[str, Any]:
    """Return the JSON Schema of run files.

    What needs the whole file or Python (that a warm-up fits, that a target exists) is beyond a
    schema. A null, which counts as left out, is not among what it lets an editor suggest.

    >>> run_file_schema()["required"]
    ['max_duration', 'data', 'batch_size']
    """
    schema = RunConfig.model_json_schema(schema_generator=_Generator)
    sections = {section.__name__: section for section in _inner_sections(Part)}
    parts = schema["$defs"]
    for name, part in [("RunConfig", schema), *parts.items()]:
        _describe(part, sections[name].settings or sections[name])
    # Exactly one of these says what kind of schedule it is.
    target = parts["Target"]["properties"]["target"]
    parts.update({"TargetText": target, **batch_size_schemas(), **schedule_schemas()})
    schema["properties"]["batch_size"]["$ref"] = "#/$defs/BatchSize"
    schema["properties"]["schedules"]["additionalProperties"] = {"$ref": "#/$defs/Schedule"}
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
        "description": "What a training run is. Times have a unit, as in docs/run-file.md.",
    }


def field_texts(section: type) -> dict[str, str]:
    """Return the text that stands under each field of a section, those of its bases included.

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
    """Leave out titles and nulls, which say nothing, and write the pattern of times once."""
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
    if kept.get("pattern") == TIME_PATTERN and kept.get("type") == "string":
        del kept["pattern"], kept["type"]
        kept = {"$ref": "#/$defs/Time", **kept}
    choices = kept.get("anyOf")
    if isinstance(choices, list) and {"type": "null"} in choices:
        choices = [choice for choice in choices if choice != {"type": "null"}]
        kept["anyOf"] = choices
        if len(choices) == 1:
            del kept["anyOf"]
            kept = {**choices[0], **kept}
    return kept


def _inner_sections(root: type[Part]) -> list[type[Part]]:
    return [inner for child in root.__subclasses__() for inner in (child, *_inner_sections(child))]
