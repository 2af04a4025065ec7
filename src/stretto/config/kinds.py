"""Kinds of values in a run file: each reads a value, and describes itself as JSON Schema.

They are made from type hints, so a setting is declared once. A schedule or a batch size is written
as in Python: `{Cosine: {warmup: 5%}}` is `Cosine(warmup="5%")`. Classes check their own values;
this module knows keys, types and places.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from datetime import timedelta
from functools import cache
from inspect import Parameter
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    Union,
    final,
    get_args,
    get_origin,
    get_type_hints,
)

from stretto import batching, schedules
from stretto._foreign import FOREIGN, OLD_WORDS, arguments_of
from stretto.batching import BatchSizePolicy, Pair, Rule, as_policy, as_rule
from stretto.batching.noise_scale import NormTest
from stretto.batching.policy import FoundSize
from stretto.batching.rules import RULES
from stretto.config.targets import Function, Maker, Target
from stretto.config.yaml import Path, Source
from stretto.errors import ConfigError, Message, StrettoError, nearest, shown
from stretto.schedules import Schedule, as_schedule
from stretto.schedules.fields import Check, checked_interval, one_of
from stretto.settings import Loading
from stretto.timing import Time, TimeLike, Trigger
from stretto.timing.time import Number

MAX_ERRORS = 20
"""Most errors that one message lists."""
Parts: TypeAlias = dict[str, Any]
"""The definitions of a JSON schema, by name."""


@final
class Mistakes:
    """All that is wrong in a run file, each with its place."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._messages: list[Message] = []

    def __len__(self) -> int:
        return len(self._messages)

    def read(self, kind: Kind, value: object, path: Path) -> Any:
        """Return what a value describes; note what is wrong with it, and return None then."""
        try:
            if kind.fits(value):
                return kind.read(value, path, self)
            raise ConfigError.cannot(
                f"use {shown(value)}", why="it is not valid here", instead=f"write {kind.text}"
            )
        except StrettoError as error:
            self.add(error, path)
        return None

    def add(self, error: StrettoError, path: Path) -> None:
        """Note an error at a place, unless it has one."""
        where = self._source.where(path)
        self._messages += [one if one.where else one.at(where) for one in error.messages]

    def check(self) -> None:
        """Raise one error for all mistakes.

        Raises:
            ConfigError: there are some.
        """
        found = list(dict.fromkeys(self._messages))
        if found:
            error = ConfigError(*found[:MAX_ERRORS])
            if len(found) > MAX_ERRORS:
                error.add_note(f"and {len(found) - MAX_ERRORS} more")
            raise error


@final
@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values."""

    text: str
    """What to write, for messages."""
    fits: Callable[[Any], bool]
    """Returns whether a value has the form of this kind."""
    schema: Callable[[Parts], Mapping[str, Any]]
    """Returns the JSON schema; definitions with a name are added to the parts."""
    read: Callable[[Any, Path, Mistakes], Any] = lambda value, *_: value
    """Returns what a value of that form describes, or raises; what is wrong inside is noted."""
    is_section: bool = False
    """Whether it is a mapping of the arguments of a class."""


_PLAIN: Mapping[Any, Kind] = {
    int: Kind("a whole number", lambda one: type(one) is int, lambda _: {"type": "integer"}),
    float: Kind("a number", lambda one: type(one) in (int, float), lambda _: {"type": "number"}),
    str: Kind("a text", lambda one: isinstance(one, str), lambda _: {"type": "string"}),
    bool: Kind("true or false", lambda one: isinstance(one, bool), lambda _: {"type": "boolean"}),
}


def _choice(choices: Sequence[str]) -> Kind:
    return Kind(
        " or ".join(map(repr, choices)),
        lambda value: isinstance(value, str),
        lambda _: {"enum": [*choices]},
        lambda value, path, _: one_of(value, str(path[-1]), choices, ConfigError),
    )


def _accepts(check: Check | None, value: object) -> bool:
    try:
        return check is None or bool(check.converted(value, "", ConfigError))
    except StrettoError:
        return False


def _time(check: Check | None = None, *, may_rest: bool = False) -> Kind:
    here = {"$ref": "#/$defs/Time"}
    until = {"type": "string", "pattern": "^until .", "examples": ["until 10Ttok"]}
    schema = {"anyOf": [{"const": "rest"}, here, until]} if may_rest else here
    shown = ", ".join(one for one in ("90ep", "1_000sp", "10%", "1h30m") if _accepts(check, one))
    text = f"a time such as {shown}" + ", until and a time, or rest" * may_rest

    def read(value: Any, path: Path, *_: object) -> Any:
        written = str(value)
        # The class reads those, and answers -1.
        if may_rest and (written in ("rest", "-1") or written.startswith("until ")):
            return written
        # The check reads the text itself, since its advice depends on what the time is for.
        return check.converted(written, str(path[-1]), ConfigError) if check else Time(written)

    return Kind(text, lambda value: isinstance(value, (str, int, float)), lambda _: schema, read)


def _checked(kind: Kind, check: Check) -> Kind:
    def read(value: Any, path: Path, mistakes: Mistakes) -> Any:
        before = len(mistakes)
        found = kind.read(value, path, mistakes)
        is_right = len(mistakes) == before
        return check.converted(found, str(path[-1]), ConfigError) if is_right else None

    return replace(kind, read=read)


def _several(item: Kind) -> Kind:
    """Return the kind of a list; one mapping of arguments may stand for a list of one."""

    def read(value: Any, path: Path, mistakes: Mistakes) -> Any:
        if isinstance(value, dict):
            return [mistakes.read(item, value, path)]
        return [mistakes.read(item, one, (*path, at)) for at, one in enumerate(value)]

    def schema(parts: Parts) -> Mapping[str, Any]:
        inner = item.schema(parts)
        several = {"type": "array", "items": inner}
        return {"anyOf": [inner, several]} if item.is_section else several

    kinds = (list, dict) if item.is_section else (list,)
    return Kind(f"a list: each {item.text}", lambda value: isinstance(value, kinds), schema, read)


def _row(items: Sequence[Kind]) -> Kind:
    """Return the kind of a list of so many values, each of its own kind."""
    return Kind(
        f"[{', '.join(one.text for one in items)}]",
        lambda value: isinstance(value, list) and len(value) == len(items),
        lambda parts: {"type": "array", "prefixItems": [one.schema(parts) for one in items]},
        lambda value, path, mistakes: [
            mistakes.read(kind, one, (*path, at))
            for at, (kind, one) in enumerate(zip(items, value, strict=True))
        ],
    )


def _entries(key: Kind, value: Kind) -> Kind:
    """Return the kind of a mapping from names; null counts as absent."""
    return Kind(
        f"a mapping from names: each {value.text}",
        lambda given: isinstance(given, dict),
        lambda parts: {"type": "object", "additionalProperties": value.schema(parts)},
        lambda given, path, mistakes: {
            mistakes.read(key, name, (*path, name)): mistakes.read(value, one, (*path, name))
            for name, one in given.items()
            if one is not None
        },
    )


def _either(kinds: Sequence[Kind]) -> Kind:
    """Return the kind of values that have the form of one of several kinds; the first counts."""
    return Kind(
        " or ".join(one.text for one in kinds),
        lambda value: any(one.fits(value) for one in kinds),
        lambda parts: {"anyOf": [one.schema(parts) for one in kinds]},
        lambda value, *place: next(one for one in kinds if one.fits(value)).read(value, *place),
    )


_ELSEWHERE: Mapping[Any, Sequence[str]] = {Loading: ("seed", "last_batch")}
"""Arguments that a run file has in another place."""


@cache
def parameters_of(make: Any) -> Mapping[str, Parameter]:
    """Return the parameters of a class or a function, with their hints as objects."""
    init = getattr(make, "__init__") if isinstance(make, type) else make  # noqa: B009  mypy
    options = getattr(make, "__dataclass_params__", None)
    hints = get_type_hints(make if options and options.init else init, include_extras=True)
    return {
        name: one.replace(annotation=hints[name])
        for name, one in arguments_of(make).items()
        if hints[name] is not Source and name not in _ELSEWHERE.get(make, ())
    }


@cache
def section(make: Callable[..., Any]) -> Kind:
    """Return the kind of mappings of the arguments of a class or a function.

    If it has an argument `arguments`, that takes all other keys. A null counts as absent, except
    among those.
    """
    known = {name: one for name, one in parameters_of(make).items() if name != "arguments"}
    is_open = "arguments" in parameters_of(make)
    required = [name for name, one in known.items() if _is_required(one)]

    def read(given: Any, path: Path, mistakes: Mistakes) -> Any:
        before, named = len(mistakes), dict[str, Any]()
        others = {key: one for key, one in given.items() if key not in known}
        wrong = [] if is_open else [key for key, one in others.items() if one is not None]
        meant = {key: nearest(key, known) for key in wrong}
        for key, near in meant.items():
            instead = f"did you mean {near!r}?" if near else f"the keys here are {', '.join(known)}"
            instead = FOREIGN[key][-1] if key in FOREIGN else instead
            why = "there is no such key here"
            error = ConfigError.cannot(f"use the key {key!r}", why=why, instead=instead)
            mistakes.add(error, (*path, key))
        for name, one in known.items():
            kind = _kind_of(one)
            if given.get(name) is not None:
                named[name] = mistakes.read(kind, given[name], (*path, name))
            elif name in required and name not in meant.values():
                why, instead = "it has no default", f"write '{name}: ...', {kind.text}"
                mistakes.add(ConfigError.cannot(f"omit {name!r}", why=why, instead=instead), path)
            elif isinstance(one.default, str):
                named[name] = kind.read(one.default, (*path, name), mistakes)
        if len(mistakes) > before:
            return None
        if is_open:
            named["arguments"] = others
        first = next(iter(known.values()))
        several = named.pop(first.name, ()) if first.kind is Parameter.VAR_POSITIONAL else ()
        return make(*several, **named)

    def schema(parts: Parts) -> Mapping[str, Any]:
        name = make.__name__
        if name not in parts:
            parts[name] = {}  # a value inside may be of the same kind
            texts = _texts_of(make)
            parts[name] = {
                "type": "object",
                "description": (make.__doc__ or "").partition("\n")[0],
                "properties": {
                    key: _described(one, texts.get(key), parts) for key, one in known.items()
                },
                "required": required,
                "additionalProperties": is_open,
            }
        return {"$ref": f"#/$defs/{name}"}

    text = f"some of the keys {', '.join(known)}"
    if make in (Target, Function, Maker):
        text = "{target: 'package.module:name'}"
    return Kind(text, lambda value: isinstance(value, dict), schema, read, is_section=True)


def _is_required(one: Parameter) -> bool:
    return one.default is Parameter.empty and one.kind is not Parameter.VAR_POSITIONAL


def _kind_of(one: Parameter) -> Kind:
    kind = kind_of(one.annotation)
    return _several(kind) if one.kind is Parameter.VAR_POSITIONAL else kind


def _described(one: Parameter, text: str | None, parts: Parts) -> Mapping[str, Any]:
    """Return the schema of a parameter."""
    found = dict(_kind_of(one).schema(parts))
    if text is not None:
        found["description"] = text
    if isinstance(one.default, (bool, int, float, str, Time)):
        found["default"] = str(one.default) if isinstance(one.default, Time) else one.default
    return found


def _named(
    title: str,
    text: str,
    names: Mapping[str, Callable[..., Any]],
    plain: Callable[[Any], Any],
    is_plain: Callable[[Any], bool],
    *forms: Mapping[str, Any],
) -> Kind:
    """Return the kind of `{Name: {argument: value}}`, of a target, and of plain forms.

    Args:
        title: the name of its schema.
        text: what to write.
        names: the classes and functions that can be named.
        plain: makes the object of a plain form, or of a function.
        is_plain: whether a value has a plain form.
        forms: the schemas of the plain forms.
    """

    def read(value: Any, path: Path, mistakes: Mistakes) -> Any:
        before = len(mistakes)
        if isinstance(value, dict) and "target" in value:
            value = mistakes.read(section(Function), value, path)
        elif isinstance(value, dict) and len(value) == 1 and next(iter(value)) in names:
            [(name, given)] = value.items()
            return _named_arguments(names[name], given, (*path, name), mistakes)
        elif isinstance(value, list) and "Product" in names:  # as a Trainer takes several
            return _named_arguments(schedules.Product, value, path, mistakes)
        elif not is_plain(value):
            raise _unnamed(value, names, text)
        return plain(value) if len(mistakes) == before else None

    def schema(parts: Parts) -> Mapping[str, Any]:
        here = {"$ref": f"#/$defs/{title}"}
        if title not in parts:
            parts[title] = {}
            named = {
                "type": "object",
                "properties": {
                    name: {"anyOf": [section(make).schema(parts), _first(make)[1].schema(parts)]}
                    for name, make in names.items()
                },
                "minProperties": 1,
                "maxProperties": 1,
                "additionalProperties": False,
            }
            several = [{"type": "array", "items": here}] if "Product" in names else []
            parts[title] = {"anyOf": [*forms, *several, named, section(Function).schema(parts)]}
        return here

    return Kind(text, lambda _: True, schema, read)


def _first(make: Callable[..., Any]) -> tuple[str, Kind]:
    """Return the first argument and its kind."""
    name, one = next(iter(parameters_of(make).items()))
    return name, _kind_of(one)


def _named_arguments(make: Callable[..., Any], given: Any, path: Path, mistakes: Mistakes) -> Any:
    """Return what a class makes; its first argument may be given alone, without its name."""
    given = {} if given is None else given
    first, _ = _first(make)
    is_value = (
        not isinstance(given, dict) or "target" in given or _is_named(given) or _is_steps(given)
    ) or (make is schedules.Periods and first not in given)  # by name
    return section(make).read({first: given} if is_value else given, path, mistakes)


def _is_named(value: Mapping[str, Any]) -> bool:
    return len(value) == 1 and not {*value}.isdisjoint({*_CURVES, *_SIZES})


def _is_steps(value: object) -> bool:
    """Return whether a value is a mapping from times."""
    return isinstance(value, dict) and {str.isidentifier(key) for key in value} == {False}


def _unnamed(value: object, names: Mapping[str, Any], text: str) -> ConfigError:
    """Return the error for a value that names none of the classes."""
    keys = [str(key) for key in value] if isinstance(value, dict) else []
    near = next(filter(None, (nearest(key, names) for key in keys)), None)
    old = next((write for key, write in OLD_WORDS.items() if key in keys), None)
    if near is not None and old is None:
        inner = next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else None
        known = parameters_of(names[near])
        given = {
            name: shown(one).strip("'")
            for name, one in (inner.items() if isinstance(inner, dict) else ())
            if name in known and isinstance(one, (str, int, float))
        }
        needed = {name: "..." for name, one in known.items() if _is_required(one)}
        written = ", ".join(f"{name}: {text}" for name, text in (needed | given).items())
        old = f"{{{near}: {{{written}}}}}"
    why = "it is none of the possible forms"
    return ConfigError.cannot(f"use {shown(value)}", why=why, instead=f"write {old or text}")


def _names_in(module: types.ModuleType, *bases: type) -> dict[str, type]:
    """Return the classes of a module that can be made, by their names."""
    kinds = {name: getattr(module, name) for name in module.__all__}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, bases)
        if not inspect.isabstract(kind) and kind not in (*bases, schedules.Custom)
    }


def from_torch(
    factory: Maker, every: TimeLike | None = None, monitor: str | None = None
) -> Schedule:
    """A scheduler of torch.

    Args:
        factory: the scheduler, without its optimizer.
        every: the time of one step; by default, a batch.
        monitor: the metric that steps it, such as `validation/loss`; then there is no `every`.
    """
    from stretto.optim import from_torch as wrapped

    return wrapped(factory, every, monitor=monitor)


_CURVES: Mapping[str, Callable[..., Any]] = {
    **_names_in(schedules, Schedule),
    **_names_in(batching, Schedule),
    "from_torch": from_torch,
}
_SIZES: Mapping[str, Callable[..., Any]] = {
    **_names_in(batching, BatchSizePolicy, Pair),
    "NormTest": NormTest,
    "rampup": batching.rampup,
    "from_megatron": batching.from_megatron,
}
_TEXT = {"type": "string", "pattern": r"^\s*[0-9][0-9_.eE+-]*(([KMBT]|[KMGT]i)?(sp|tok))?\s*$"}
_SIZE = {"anyOf": [{"type": "integer", "minimum": 1}, _TEXT]}
_FOUND = {"anyOf": [{"const": "auto"}, _SIZE]}
_AMOUNT = Kind(
    "a whole number, or tokens such as 64Ktok",
    lambda value: type(value) in (int, str),
    lambda _: _SIZE,
)
SCHEDULE = _named(
    "Schedule",
    "for example {Cosine: {end: 0.1, warmup: 5%}}, or a number",
    _CURVES,
    as_schedule,
    lambda value: type(value) in (int, float),
    {"type": "number", "minimum": 0},
)
SIZES = _named(
    "BatchSize",
    "a number, 64Ktok, '0ep:8 1ep:16', or for example {LinearRamp: {start: 8, end: 64, over: 40%}}",
    _SIZES,
    as_policy,
    lambda value: type(value) in (int, str) or _is_steps(value),
    {"type": "integer", "minimum": 1},
    {"type": "string", "examples": ["0tok:768 250Btok:1536", "64Ktok"]},
    {
        "type": "object",
        "description": "A size from each of some times on.",
        "propertyNames": {"$ref": "#/$defs/Time"},
        "additionalProperties": _SIZE,
        "minProperties": 1,
    },
)
_RULE_NAMES = {**RULES, **{rule.__name__: rule for rule in RULES.values()}}
_ONE_RULE = _named(
    "Rule",
    "{sqrt: 256} or {linear: 4Mtok}, with the size that the rate is meant for",
    _RULE_NAMES,
    as_rule,
    lambda _: False,
)
_RULES_BY_NAME = replace(
    _entries(_PLAIN[str], _ONE_RULE),
    fits=lambda value: (
        isinstance(value, dict)
        and value.keys().isdisjoint(_RULE_NAMES)
        and {type(one) for one in value.values()} in ({dict}, {dict, type(None)})
    ),
)
RULE = _either([_RULES_BY_NAME, _ONE_RULE])
_TIMES = {Time, str, timedelta, Trigger, Literal["rest"]}
_NAMED = {Schedule: SCHEDULE, BatchSizePolicy: SIZES, Rule: RULE}


@cache
def kind_of(hint: Any) -> Kind:
    """Return the kind of values that a type hint describes; None counts as absent.

    >>> kind_of(int | None).text
    'a whole number'
    """
    origin, inner = get_origin(hint), get_args(hint)
    if type(None) in inner:
        return kind_of(Union[tuple(one for one in inner if one is not type(None))])  # noqa: UP007
    for base, kind in _NAMED.items():
        if base in (hint, *inner):
            return kind
    if hint is Time or (Time in inner and _TIMES.issuperset(inner)):
        check = Check(checked_interval) if Trigger in inner else None
        return _time(check, may_rest=Literal["rest"] in inner)
    if hint == Number:
        return _PLAIN[float]
    if hint is Any:  # a place that a text names, or an object of yours
        return _either((_PLAIN[str], section(Target)))
    if origin is Annotated:
        return _annotated(inner[0], inner[1:])
    if origin is Literal:
        return _choice(inner)
    if origin is Callable or origin is None:
        return _PLAIN[hint] if hint in _PLAIN else section(Function if origin else hint)
    kinds = [*map(kind_of, inner)]
    if origin in (Union, types.UnionType):
        return _either(kinds)
    if origin is tuple:
        return _row(kinds)
    return _entries(*kinds) if origin in (dict, Mapping) else _several(kinds[0])


def _annotated(hint: Any, marks: Sequence[Any]) -> Kind:
    check = next((mark for mark in marks if isinstance(mark, Check)), None)
    if check is None:
        return kind_of(hint)
    if hint is Any:
        own = _FOUND if check in get_args(FoundSize) else _SIZE
        return _checked(replace(_AMOUNT, schema=lambda _: own), check)
    return _time(check) if hint == TimeLike else _checked(kind_of(hint), check)


def _texts_of(make: Any) -> dict[str, str]:
    """Return the description of each argument: the docstring below the field, or under `Args`."""
    written = (inspect.getdoc(make) or "").partition("Args:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", written, re.MULTILINE)
    for base in reversed(make.__mro__ if isinstance(make, type) else ()):
        if base.__module__.startswith("stretto.") and is_dataclass(base):
            # A field, and the text below it, before the next field.
            field = r'^    ([a-z_]\w*):(?:(?!\n    \w).)*?\n    """(.*?)"""'
            found += re.findall(field, inspect.getsource(base), re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}
