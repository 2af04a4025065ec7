"""Kinds of values in a run file: each reads a value, and describes itself as JSON Schema.

They are made from type hints. A schedule or a batch size is written as in Python:
`{Cosine: {warmup: 5%}}` is `Cosine(warmup="5%")`. Classes check their own values; here are keys,
types and places.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import timedelta
from functools import cache, cached_property
from inspect import Parameter
from typing import Annotated, Any, Literal, Union, final, get_args, get_origin, get_type_hints

from stretto import batching, schedules
from stretto._foreign import FOREIGN, OLD_WORDS
from stretto.batching import BatchSizePolicy, Pair, as_policy, as_rule
from stretto.batching.split import RULES, RuleLike
from stretto.batching.steps import PolicyLike
from stretto.config.targets import TARGET_PATTERN, Target
from stretto.config.yaml import Path, Source
from stretto.errors import ConfigError, Message, StrettoError, nearest, shown
from stretto.schedules import Schedule, ScheduleLike, as_schedule
from stretto.schedules.fields import Check
from stretto.timing import Time, Trigger
from stretto.timing.time import Number

MAX_ERRORS = 20
"""Most errors that one message lists."""


@final
class Mistakes:
    """All that is wrong in a run file, each with its place."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.messages: list[Message] = []

    def read(self, kind: Kind, value: object, path: Path) -> Any:
        """Return what a value describes; note what is wrong with it, and return None then."""
        try:
            if not kind.fits(value):
                raise refused(value, kind.text)
            return kind.read(value, path, self)
        except StrettoError as error:
            self.add(error, path)
        return None

    def add(self, error: StrettoError, path: Path) -> None:
        """Note an error at a place, unless it has one."""
        where = self.source.where(path)
        self.messages += [one if one.where else one.recast(where, None) for one in error.messages]

    def check(self) -> None:
        """Raise one error for all mistakes.

        Raises:
            ConfigError: there are some.
        """
        found = list(dict.fromkeys(self.messages))
        if found:
            error = ConfigError(*found[:MAX_ERRORS])
            if len(found) > MAX_ERRORS:
                error.add_note(f"and {len(found) - MAX_ERRORS} more")
            raise error


def refused(value: object, text: str) -> ConfigError:
    """Return the error for a value of another kind."""
    return ConfigError.cannot(
        f"use {shown(value)}", why="it is not valid here", instead=f"write {text}"
    )


class Kind(ABC):
    """A kind of values."""

    text: str
    """What to write, for messages."""

    @abstractmethod
    def fits(self, value: object) -> bool:
        """Return whether a value has the form of this kind."""

    @abstractmethod
    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        """Return what a value of that form describes.

        Raises:
            StrettoError: it is wrong; what is wrong inside it goes to `mistakes`.
        """

    @abstractmethod
    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON schema; what has a name goes to `parts`."""


_PLAIN: Mapping[Any, tuple[str, str]] = {
    int: ("a whole number", "integer"),
    float: ("a number", "number"),
    str: ("a text", "string"),
    bool: ("true or false", "boolean"),
}


@final
class Plain(Kind):
    """A number, a text, true or false."""

    def __init__(self, of: type) -> None:
        self.of = of
        self.text, self._name = _PLAIN[of]

    def fits(self, value: object) -> bool:
        return type(value) is self.of or (self.of is float and type(value) is int)

    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        return value

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        return {"type": self._name}


@final
class Anything(Kind):
    """A value that the class it is for checks; or a target."""

    text = "a value, or {target: 'package.module:name'}"

    def fits(self, value: object) -> bool:
        return True

    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        is_target = isinstance(value, dict) and "target" in value
        return mistakes.read(section_of(Target), value, path) if is_target else value

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        return {}


@final
class Choice(Kind):
    """One of several texts."""

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = choices
        self.text = " or ".join(map(repr, choices))

    def fits(self, value: object) -> bool:
        return isinstance(value, str)

    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        if value in self.choices:
            return value
        near = nearest(value, self.choices)
        instead = f"did you mean {near!r}?" if near else f"write {self.text}"
        raise ConfigError.cannot(
            f"use {shown(value)}", why="there is no such choice", instead=instead
        )

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        return {"enum": list(self.choices)}


@final
class Moment(Kind):
    """A time: a number with a unit."""

    def __init__(self, check: Check | None = None, *, may_rest: bool = False) -> None:
        self.check, self.may_rest = check, may_rest
        self.text = "a time such as 90ep, 1_000sp, 10% or 1h30m" + ", or rest" * may_rest

    def fits(self, value: object) -> bool:
        return isinstance(value, (str, int, float))

    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        if self.may_rest and (value == "rest" or str(value) == "-1"):  # which is answered later
            return value
        text = str(value)
        return Time(text) if self.check is None else self.check.converted(text, *_name(path))

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        time = {"$ref": "#/$defs/Time"}
        return {"anyOf": [{"const": "rest"}, time]} if self.may_rest else time


def _name(path: Path) -> tuple[str, type[StrettoError]]:
    return str(path[-1]) if path else "", ConfigError


@final
class Checked(Kind):
    """A value with a check, from an annotation."""

    def __init__(self, kind: Kind, check: Check) -> None:
        self.kind, self.check, self.text = kind, check, kind.text

    def fits(self, value: object) -> bool:
        return self.kind.fits(value)

    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        before = len(mistakes.messages)
        found = self.kind.read(value, path, mistakes)
        if len(mistakes.messages) > before:
            return None
        return self.check.converted(found, *_name(path))

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        return self.kind.schema(parts)


@final
class Several(Kind):
    """A list; a mapping alone may stand for a list of one."""

    def __init__(self, item: Kind) -> None:
        self.item, self.text = item, f"a list: each {item.text}"

    def fits(self, value: object) -> bool:
        return isinstance(value, list) or self._is_one(value)

    def _is_one(self, value: object) -> bool:
        return isinstance(self.item, Section) and isinstance(value, dict)

    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        if self._is_one(value):
            return [mistakes.read(self.item, value, path)]
        return [mistakes.read(self.item, one, (*path, at)) for at, one in enumerate(value)]

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        item = self.item.schema(parts)
        several = {"type": "array", "items": item}
        return {"anyOf": [item, several]} if isinstance(self.item, Section) else several


@final
class Row(Kind):
    """A list of so many values, each of its own kind."""

    def __init__(self, items: Sequence[Kind]) -> None:
        self.items = items
        self.text = f"[{', '.join(one.text for one in items)}]"

    def fits(self, value: object) -> bool:
        return isinstance(value, list) and len(value) == len(self.items)

    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        pairs = enumerate(zip(self.items, value, strict=True))
        return [mistakes.read(kind, one, (*path, at)) for at, (kind, one) in pairs]

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        items = [one.schema(parts) for one in self.items]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}


@final
class Entries(Kind):
    """A mapping from names to values of one kind; null counts as absent."""

    def __init__(self, key: Kind, value: Kind) -> None:
        self.key, self.value = key, value
        self.text = f"a mapping from names: each {value.text}"

    def fits(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        return {
            mistakes.read(self.key, name, (*path, name)): mistakes.read(
                self.value, one, (*path, name)
            )
            for name, one in value.items()
            if one is not None
        }

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.value.schema(parts)}


@final
class Either(Kind):
    """One of several kinds, the first that has the form of the value."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.kinds = kinds
        self.text = " or ".join(one.text for one in kinds)

    def fits(self, value: object) -> bool:
        return any(one.fits(value) for one in self.kinds)

    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        kind = next(one for one in self.kinds if one.fits(value))
        return kind.read(value, path, mistakes)

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        return {"anyOf": [one.schema(parts) for one in self.kinds]}


@final
class Section(Kind):
    """A mapping of the arguments of a class or a function.

    If it has an argument `arguments`, that takes all other keys. A null counts as absent, except
    among those.
    """

    text = "a mapping"

    def __init__(self, make: Callable[..., Any], without: Collection[str] = ()) -> None:
        self.make = make
        self._without = without
        if make is Target:
            self.text = "{target: 'package.module:name'}"

    @cached_property
    def parameters(self) -> Mapping[str, tuple[Kind, Parameter]]:
        """The kind of each argument."""
        make: Any = self.make
        has_own = isinstance(make, type) and "__init__" in vars(make)
        generated = is_dataclass(make) and make.__dataclass_params__.init  # type: ignore[attr-defined]
        hints = get_type_hints(
            make.__init__ if has_own and not generated else make, include_extras=True
        )
        found = {}
        for name, one in inspect.signature(make).parameters.items():
            if name in ("arguments", *self._without) or hints[name] is Source:
                continue
            kind = kind_of(hints[name])
            found[name] = Several(kind) if one.kind is Parameter.VAR_POSITIONAL else kind, one
        return found

    @property
    def required(self) -> list[str]:
        """The arguments without a default."""
        return [
            name
            for name, (_, one) in self.parameters.items()
            if one.default is Parameter.empty and one.kind is not Parameter.VAR_POSITIONAL
        ]

    @cached_property
    def is_open(self) -> bool:
        """Whether other keys are arguments of something else."""
        return "arguments" in inspect.signature(self.make).parameters

    def fits(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        before, known, named = len(mistakes.messages), self.parameters, dict[str, Any]()
        others = {key: one for key, one in value.items() if key not in known}
        meant = {} if self.is_open else {key: nearest(key, known) for key in others}
        for key, near in meant.items():
            if others[key] is not None:
                mistakes.add(self._no_such_key(key, near), (*path, key))
        for name, (kind, one) in known.items():
            if value.get(name) is not None:
                named[name] = mistakes.read(kind, value[name], (*path, name))
            elif name in self.required and name not in meant.values():
                why, instead = "it has no default", f"write '{name}:' and {kind.text}"
                mistakes.add(ConfigError.cannot(f"omit {name!r}", why=why, instead=instead), path)
        if len(mistakes.messages) > before:
            return None
        if self.is_open:
            named["arguments"] = others
        positional = [
            item
            for name, (_, one) in known.items()
            if one.kind is Parameter.VAR_POSITIONAL
            for item in named.pop(name, ())
        ]
        return self.make(*positional, **named)

    def _no_such_key(self, key: str, near: str | None) -> ConfigError:
        instead = f"did you mean {near!r}?" if near else f"the keys here are {', '.join(self.parameters)}"
        if key in FOREIGN and near is None:
            instead = FOREIGN[key][-1]
        return ConfigError.cannot(
            f"use the key {key!r}", why="there is no such key here", instead=instead
        )

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        name = self.make.__name__
        if name not in parts:
            parts[name] = {}  # a value inside may be of the same kind
            texts = texts_of(self.make)
            properties = {}
            for key, (kind, one) in self.parameters.items():
                properties[key] = {**kind.schema(parts), "description": texts.get(key, "")}
                default = one.default
                if default not in (None, Parameter.empty) and is_plain(default):
                    properties[key]["default"] = str(default) if isinstance(default, Time) else default
            parts[name] = {
                "type": "object",
                "description": summary_of(self.make),
                "properties": properties,
                "required": self.required,
                "additionalProperties": self.is_open,
            }
        return {"$ref": f"#/$defs/{name}"}


def is_plain(value: object) -> bool:
    """Return whether a default can be shown."""
    return isinstance(value, (bool, int, float, str, Time))


@final
@dataclass(frozen=True, eq=False)
class Named(Kind):
    """A schedule, a batch size or a rule: `{Name: {argument: value}}`, a plain form, or a target."""

    text: str
    names: Mapping[str, Callable[..., Any]]
    plain: Callable[[Any], Any]
    """Makes it of a plain form, or of a target."""
    is_plain: Callable[[Any], bool]
    forms: Sequence[Mapping[str, Any]]
    """The schemas of the plain forms."""

    def fits(self, value: object) -> bool:
        return True

    def read(self, value: Any, path: Path, mistakes: Mistakes) -> Any:
        before = len(mistakes.messages)
        if isinstance(value, dict) and "target" in value:
            value = mistakes.read(section_of(Target), value, path)
        elif isinstance(value, dict) and len(value) == 1 and next(iter(value)) in self.names:
            [(name, given)] = value.items()
            return self._named(name, given, (*path, name), mistakes)
        elif isinstance(value, list) and self.plain is as_schedule:
            factors = mistakes.read(Several(self), value, path)
            return None if len(mistakes.messages) > before else schedules.Product(*factors)
        elif not self.is_plain(value):
            raise self._unknown(value)
        return None if len(mistakes.messages) > before else self.plain(value)

    def _named(self, name: str, given: Any, path: Path, mistakes: Mistakes) -> Any:
        """Return the object of that name; its first argument may be given without a name."""
        section = section_of(self.names[name])
        first, (kind, _) = next(iter(section.parameters.items()))
        is_inner = isinstance(given, dict) and isinstance(kind, (Named, Checked)) and (
            len(given) == 1 and next(iter(given)) in (*_CURVES, *_SIZES, "target")
        )
        if given is None:
            given = {}
        if not isinstance(given, dict) or is_inner:
            given = {first: given}
        return section.read(given, path, mistakes)

    def _unknown(self, value: object) -> ConfigError:
        keys = [str(key) for key in value] if isinstance(value, dict) else []
        near = next(filter(None, (nearest(key, self.names) for key in keys)), None)
        old = next((OLD_WORDS[key] for key in keys if key in OLD_WORDS), None)
        instead = old or self.text
        if near is not None and old is None:
            needed = section_of(self.names[near]).required
            arguments = ", ".join(f"{key}: ..." for key in needed)
            instead = f"did you mean {{{near}: {{{arguments}}}}}?"
        why = "it is none of the possible forms"
        return ConfigError.cannot(f"use {shown(value)}", why=why, instead=f"write {instead}")

    def schema(self, parts: dict[str, Any]) -> dict[str, Any]:
        title = {as_schedule: "Schedule", as_policy: "BatchSize", as_rule: "Rule"}[self.plain]
        here = {"$ref": f"#/$defs/{title}"}
        if title not in parts:
            parts[title] = {}
            properties = {name: self._argument(name, parts) for name in self.names}
            several = [{"type": "array", "items": here}] if title == "Schedule" else []
            named = {
                "type": "object",
                "properties": properties,
                "minProperties": 1,
                "maxProperties": 1,
                "additionalProperties": False,
            }
            target = section_of(Target).schema(parts)
            parts[title] = {"anyOf": [*self.forms, *several, named, target]}
        return here

    def _argument(self, name: str, parts: dict[str, Any]) -> dict[str, Any]:
        section = section_of(self.names[name])
        whole = section.schema(parts)
        first, _ = next(iter(section.parameters.values()))
        return {"anyOf": [whole, first.schema(parts)]}


def _kinds_in(module: types.ModuleType, *bases: type) -> dict[str, type]:
    """Return the classes of a module that can be made, by their names."""
    found = {name: getattr(module, name) for name in module.__all__}
    return {
        name: kind
        for name, kind in found.items()
        if isinstance(kind, type)
        and issubclass(kind, bases)
        and not (inspect.isabstract(kind) or kind in (*bases, schedules.Custom))
    }


_CURVES = _kinds_in(schedules, Schedule)
_SIZES: Mapping[str, Callable[..., Any]] = {
    **_kinds_in(batching, BatchSizePolicy, Pair),
    "NormTest": batching.noise_scale.NormTest,
    "rampup": batching.rampup,
}
SCHEDULE = Named(
    "for example {Cosine: {end: 0.1, warmup: 5%}}, or a number",
    _CURVES,
    as_schedule,
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    [{"type": "number", "minimum": 0}],
)
SIZES = Named(
    "a number, '0ep:8 1ep:16', or for example {DoublingRamp: {start: 8, end: 64, over: 40%}}",
    _SIZES,
    as_policy,
    lambda value: type(value) in (int, str)
    or (isinstance(value, dict) and not any(str(key).isidentifier() for key in value)),
    [
        {"type": "integer", "minimum": 1},
        {"type": "string", "examples": ["0tok:768 250Btok:1536"]},
        {
            "type": "object",
            "description": "A size from each of some times on.",
            "propertyNames": {"$ref": "#/$defs/Time"},
            "additionalProperties": {"type": "integer", "minimum": 1},
            "minProperties": 1,
        },
    ],
)
RULE = Named(
    "{sqrt: 256} or {linear: 256}, with the size that the rate is meant for",
    {one.__name__: one for one in (batching.LinearRule, batching.SquareRootRule)},
    as_rule,
    lambda value: isinstance(value, dict) and set(value) <= set(RULES),
    [
        {
            "type": "object",
            "properties": dict.fromkeys(RULES, {"type": "integer", "minimum": 1}),
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
        }
    ],
)
_NAMED: Mapping[Any, Named] = {
    Schedule: SCHEDULE,
    ScheduleLike: SCHEDULE,
    BatchSizePolicy: SIZES,
    PolicyLike: SIZES,
    PolicyLike | Pair: SIZES,
    RuleLike: RULE,
}
_TIMES = {Time, str, timedelta, Trigger, Literal["rest"]}


@cache
def section_of(make: Callable[..., Any], without: tuple[str, ...] = ()) -> Section:
    """Return the kind of the arguments of a class or function."""
    return Section(make, without)


@dataclass(frozen=True)
class Without:
    """Keys that a section leaves out: `Annotated[Loading, Without("seed")]`."""

    names: tuple[str, ...]


@cache
def kind_of(hint: Any) -> Kind:
    """Return the kind of values that a type hint describes; None counts as absent.

    >>> kind_of(int | None).text
    'a whole number'
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        arguments = tuple(one for one in arguments if one is not type(None))
        hint = Union[arguments]  # noqa: UP007  of a tuple
    if hint in _NAMED:
        return _NAMED[hint]
    if hint is Time or (Time in arguments and _TIMES.issuperset(arguments)):
        return Moment(may_rest=Literal["rest"] in arguments)
    if hint is Number:
        return Plain(float)
    if origin in (Union, types.UnionType):
        return kind_of(arguments[0]) if len(arguments) == 1 else Either([*map(kind_of, arguments)])
    if origin is Annotated:
        kind = kind_of(arguments[0])
        for mark in arguments[1:]:
            if isinstance(mark, Without) and isinstance(kind, Section):
                kind = section_of(kind.make, mark.names)
            elif isinstance(mark, Check):
                kind = Moment(mark) if isinstance(kind, Moment) else Checked(kind, mark)
        return kind
    if origin is Literal:
        return Choice(arguments)
    if origin is tuple:
        return Row([*map(kind_of, arguments)])
    if origin in (dict, Mapping):
        return Entries(*map(kind_of, arguments))
    if origin in (list, Sequence, Iterable):
        return Several(kind_of(arguments[0]))
    if origin is Callable:
        return section_of(Target)
    if hint is Any:
        return Anything()
    return Plain(hint) if hint in _PLAIN else section_of(hint)


def summary_of(make: object) -> str:
    """Return the first line of a docstring.

    >>> summary_of(len)
    'Return the number of items in a container.'
    """
    return (make.__doc__ or "").partition("\n")[0]


def texts_of(make: Any) -> dict[str, str]:
    """Return the description of each argument: its docstring below it, or under `Args`.

    >>> texts_of(batching.StagedRamp)["sizes"]
    'two or more sizes in ascending order.'
    """
    written = (inspect.getdoc(make) or "").partition("Args:\n")[2]
    found = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", written, re.MULTILINE))
    for base in reversed(make.__mro__ if is_dataclass(make) else ()):
        if base.__module__.startswith("stretto.") and is_dataclass(base):
            found |= dict(_field_texts(base))
    return {name: " ".join(text.split()) for name, text in found.items()}


def _field_texts(kind: type) -> Iterable[tuple[str, str]]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef), "the source of a class is a class"
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, text
