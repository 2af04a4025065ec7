"""Batch sizes and schedules of run files, read by pydantic from the signatures of their classes.

A form is a section whose keys are the arguments of a class; read, it is an object of that class.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    final,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    Tag,
    TypeAdapter,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)

from stretto import batching, schedules
from stretto.batching import BatchSizePolicy, SizeFunction, rampup
from stretto.batching.periods import SizePeriods as PeriodsOfSizes
from stretto.batching.policy import Size
from stretto.batching.seesaw import Continuous, Pair
from stretto.batching.steps import PolicyLike, StepsLike
from stretto.config.fields import (
    AnyTime,
    Count,
    CountOrAuto,
    Interval,
    Section,
    read_as,
    read_time,
    reference,
    refused_at,
    shape_of,
    summary_of,
    without_nulls,
)
from stretto.config.targets import Target, TargetText, bound_target, call_target, import_target
from stretto.config.yaml import Path, Source
from stretto.errors import BatchSizeError, nearest, shown
from stretto.schedules import Schedule
from stretto.schedules import fields as of_schedules
from stretto.schedules.fields import Factor, Positive, Timed
from stretto.schedules.periods import time_or_rest
from stretto.settings import DATA_DIMENSIONS
from stretto.timing import Horizon, TimeLike, Trigger
from stretto.timing.time import Number

Value = TypeVar("Value")
CURVES: Mapping[str, type[Schedule]] = {
    "constant": schedules.Constant,
    "linear": schedules.Linear,
    "cosine": schedules.Cosine,
    "cosine_restarts": schedules.CosineRestarts,
    "polynomial": schedules.Polynomial,
    "exponential": schedules.Exponential,
    "step": schedules.StepDecay,
    "multi_step": schedules.MultiStep,
    "inverse_sqrt": schedules.InverseSqrt,
    "wsd": schedules.WSD,
}
"""The schedules that a run file can name, by key."""
RAMPS: Mapping[str, type[BatchSizePolicy]] = {
    "linear": batching.LinearRamp,
    "double": batching.DoublingRamp,
    "stages": batching.StagedRamp,
}
"""The values of `ramp`."""
COUPLED: Mapping[str, type[Pair]] = {
    "seesaw": batching.Seesaw,
    "increase_instead_of_decay": batching.IncreaseInsteadOfDecay,
}
"""Batch sizes that take over the decay of the learning rate, by the key of their sizes."""
AROUND: Mapping[str, type[BatchSizePolicy]] = {
    "power_of_two": batching.PowerOfTwo,
    "multiple_of": batching.MultipleOf,
    "hysteresis": batching.Hysteresis,
    "monotone": batching.Monotone,
    "at_least": batching.AtLeast,
    "at_most": batching.AtMost,
}
"""Further keys, which change the sizes, in the order in which they apply."""


SIZES: Mapping[str, tuple[Callable[..., BatchSizePolicy], str]] = {
    "size": (batching.Fixed, "size"),
    "steps": (batching.PiecewiseConstant, "steps"),
    "periods": (batching.PeriodSizes, "periods"),
    "increase": (batching.IncreaseFunction, "function"),
    "noise_scale": (batching.NoiseScale, "c"),
    "norm_test": (batching.NormTest, "eta"),
    "plateau": (batching.Plateau, "metric"),
    "rampup": (rampup, "final"),
}
"""Batch sizes by their key, and the argument that the value of the key fills."""


def data_ranks(mesh: Mapping[str, int] | None, world_size: int | None) -> int | None:
    """Return how many ranks share out the samples, as far as a run file says.

    >>> data_ranks({"dp": 4, "tp": 2}, None), data_ranks(None, None)
    (4, None)
    """
    if mesh is None:
        return world_size
    return math.prod(size for name, size in mesh.items() if name in DATA_DIMENSIONS)


@final
@dataclass(frozen=True, slots=True)
class Context:
    """The facts that batch sizes depend on besides their own keys.

    >>> Context(world_size=8, micro_batch_size=4).even_unit
    32
    """

    world_size: int = 1
    micro_batch_size: int | None = None
    decay: Schedule = schedules.Cosine()  # noqa: RUF009  a frozen value
    """The schedule of the learning rate, for batch sizes that are coupled with it."""

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> Context:
        """Return the context from other keys of the run file; torchrun sets `WORLD_SIZE`."""
        micro, rate = keys.get("micro_batch_size"), keys.get("schedules", {}).get("lr")
        return cls(
            data_ranks(keys.get("mesh"), keys.get("world_size"))
            or int(os.environ.get("WORLD_SIZE", "1")),
            None if micro == "auto" else micro,
            schedules.Cosine() if rate is None else rate.value,
        )

    @property
    def even_unit(self) -> int:
        """The unit of an evenly split batch size."""
        return self.world_size * (self.micro_batch_size or 1)

    def for_arguments_of(self, make: Any) -> dict[str, Any]:
        """Return the arguments of `make` that a run file does not write beside its own key."""
        if make in COUPLED.values():
            return {"decay": self.decay}
        if make is not rampup:
            return {}
        return {"world_size": self.world_size, "micro_batch_size": self.micro_batch_size}


def argument_texts(kind: object) -> dict[str, str]:
    """Return the description of each argument in a docstring.

    >>> argument_texts(batching.StagedRamp)["sizes"]
    'two or more sizes in ascending order.'
    """
    section = (inspect.getdoc(kind) or "").partition("Args:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _nested(name: str) -> Any:
    """Return the type of a value that is read by the adapter of that name."""

    def read(value: Any, info: ValidationInfo) -> Any:
        return adapter(name).validate_python(value, context=info.context)

    return Annotated[Any, PlainValidator(read), reference(name)]


def _period(name: str) -> Any:
    """Return the type of periods, whose other keys than `duration` the adapter reads."""

    def read(value: Any, info: ValidationInfo) -> tuple[Any, Any]:
        if not isinstance(value, dict) or value.get("duration") is None:
            raise BatchSizeError.cannot(
                f"use {shown(value)} as a period",
                why="it has no 'duration'",
                instead="write how long it is, such as 'duration: 10%', or 'duration: rest'",
            )
        rest = dict(value)
        duration = rest.pop("duration")
        with refused_at("duration"):
            duration = time_or_rest(
                duration, lambda given, *_: read_time(given), "duration", BatchSizeError
            )
        return duration, adapter(name).validate_python(rest, context=info.context)

    schema = reference(f"PeriodOf{name}")
    return Annotated[list[Annotated[Any, PlainValidator(read), schema]], Field(min_length=1)]


_Text: TypeAlias = Annotated[str, Field(examples=["0tok:768 250Btok:1536"])]
_Mapping: TypeAlias = Annotated[
    dict[Annotated[str, WithJsonSchema({"type": "string", "x-ref": "Time"})], Count],
    Field(min_length=1, description="A size from each of some times on."),
]
_TYPES: dict[Any, Any] = {
    int: Count,
    Size: Count,
    int | Literal["auto"]: CountOrAuto,
    float | Continuous: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "continuous"}]})
    ],
    Factor: Annotated[float, Field(ge=0)],
    Positive: Annotated[float, Field(gt=0)],
    Number: float,
    **dict.fromkeys((TimeLike, of_schedules.Length, of_schedules.Interval), AnyTime),
    TimeLike | Trigger: Interval,
    PolicyLike: _nested("BatchSize"),
    StepsLike: Annotated[
        Annotated[_Text, Tag("<text>")] | Annotated[_Mapping, Tag("<mapping>")],
        shape_of(
            lambda value: "<text>" if isinstance(value, str) else "<mapping>",
            "write for example '0ep:8 1ep:16'",
        ),
    ],
    PeriodsOfSizes: _period("BatchSize"),
}
"""The types of a run file by the annotation of an argument; others are the annotation itself."""


def _type(hint: Any) -> Any:
    """Return the type of a value in a run file, from the annotation of an argument."""
    arguments, origin = get_args(hint), get_origin(hint)
    if hint in _TYPES:
        return _TYPES[hint]
    if type(None) in arguments:
        rest = tuple(one for one in arguments if one is not type(None))
        return _type(Union[rest]) | None  # noqa: UP007  of a tuple
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Callable:
        return Target
    return list[_type(arguments[0])] if origin is Sequence else hint  # type: ignore[misc]


def _fields(make: Any, key: str, argument: str) -> dict[str, Any]:
    """Return the fields of a form by key: type and default."""
    params = getattr(make, "__dataclass_params__", None)
    has_own = isinstance(make, type) and not (params and params.init)
    hints = get_type_hints(vars(make)["__init__"] if has_own else make, include_extras=True)
    texts, found = argument_texts(make), {}
    for one in inspect.signature(make).parameters.values():
        if one.name in Context().for_arguments_of(make):
            continue
        is_key = one.name == argument
        hint: Any = Annotated[_type(hints[one.name]), Field(description=texts.get(one.name))]
        default = ... if is_key or one.default is one.empty else one.default
        found[key if is_key else one.name] = (hint, default)
    return found


def _form(make: Any, key: str = "", argument: str = "", **beside: Any) -> Any:
    """Return the type of a mapping whose keys are the arguments of `make`.

    Args:
        make: the class or function to call with them.
        key: the key that names the form.
        argument: the argument that its value fills.
        beside: further keys: type and default of each.
    """
    own = _fields(make, key, argument)
    section = create_model(
        make.__name__, __base__=Section, __doc__=summary_of(make), **beside | own
    )

    def made(read: Any, info: ValidationInfo) -> Any:
        context: Context = info.context or Context()
        given = {
            argument if one == key else one: getattr(read, one)
            for one in own
            if one in read.model_fields_set
        }
        given |= context.for_arguments_of(make)
        if make in COUPLED.values():
            return make(**given | {"multiple_of": _multiple_of(read, context) or 1})
        if make is rampup and context.micro_batch_size is None:
            raise BatchSizeError.cannot(
                f"ramp up to {read.rampup} by gradient accumulation",
                why="the run file has no number as micro_batch_size",
                instead="write for example micro_batch_size: 8, or use another ramp",
            )
        policy = make(**given)
        if not beside:
            return policy
        wrapped = _wrapped(policy, read, context)
        if given.get("maximum") is not None:
            _check_reach(policy, wrapped, is_bounded=read.at_most is not None)
        return wrapped

    return Annotated[section, AfterValidator(made)], f"<{make.__name__}>"


def _multiple_of(read: Any, context: Context) -> int | None:
    unit = context.even_unit if read.even else 1
    return read.multiple_of if unit == 1 else math.lcm(read.multiple_of or 1, unit)


def _wrapped(policy: BatchSizePolicy, read: Any, context: Context) -> BatchSizePolicy:
    """Wrap a policy as the keys beside it ask."""
    for key, kind in AROUND.items():
        value = _multiple_of(read, context) if key == "multiple_of" else getattr(read, key)
        if value is None or value is False:
            continue
        with refused_at(key):
            policy = kind(policy) if key == "monotone" else kind(policy, value)
    return policy


def _check_reach(policy: BatchSizePolicy, wrapped: BatchSizePolicy, *, is_bounded: bool) -> None:
    """Refuse bounds and rounding that exceed the policy's own bounds."""
    own, reached = (one.bind(Horizon("1ep")).bounds for one in (policy, wrapped))
    if own and reached and (reached[0] < own[0] or (reached[1] > own[1] and not is_bounded)):
        raise BatchSizeError.cannot(
            f"keep sizes between {own[0]} and {own[1]}",
            why=f"the bounds and rounding beside it lead to sizes from {reached[0]} to "
            f"{reached[1]}",
            instead="write those as start, minimum or maximum, or other bounds",
        )


def _around() -> dict[str, Any]:
    """Return the keys that change sizes: type and default."""
    even = "Only multiples of world_size * micro_batch_size: all ranks run full micro-batches."
    found: dict[str, Any] = {"even": (Annotated[bool, Field(description=even)], False)}
    for key, kind in AROUND.items():
        hints = get_type_hints(kind, include_extras=True)
        names = [name for name in inspect.signature(kind).parameters if name != "policy"]
        value = _type(hints[names[0]]) | None if names else bool
        text = Field(description=summary_of(kind))
        found[key] = (Annotated[value, text], None if names else False)
    return found


def _target_of_sizes() -> Any:
    own = _fields(SizeFunction, "", "")
    own = {name: own[name] for name in ("every", "planned")}
    text = "A function of yours, `function(timestamp, current) -> size`, or a policy of yours."
    which = "`package.module:function`, or a class of policies; other keys are its arguments."
    own["target"] = (Annotated[TargetText, Field(description=which)], ...)
    section = create_model("TargetSizes", __base__=Target, __doc__=text, **own | _around())

    def made(read: Any, info: ValidationInfo) -> BatchSizePolicy:
        target = Target(target=read.target, **read.arguments)
        policy = SizeFunction(target, None, every=read.every, planned=read.planned)
        return _wrapped(policy, read, info.context or Context())

    return Annotated[section, AfterValidator(made)], "<TargetSizes>"


def imported(value: Value, source: Source, path: Path) -> Value:
    """Return batch sizes or a schedule with the functions that their targets name.

    Raises:
        ConfigError: a target cannot be imported or called.
    """

    def change(found: object) -> object:
        target = getattr(found, "function", None)
        if not isinstance(target, Target):
            return found.replaced(change) if isinstance(found, Timed) else found
        if isinstance(found, SizeFunction):
            kind = import_target(target.target, where=source.where((*path, "target")))
            if isinstance(kind, type) and issubclass(kind, BatchSizePolicy):
                options = {"every": found.every, "planned": None if found.planned else False}
                return call_target(target, source=source, path=path, **without_nulls(options))
        function = bound_target(target, source=source, path=path)
        if isinstance(found, Schedule):
            return schedules.as_schedule(function)
        return replace(cast(Any, found), function=function)

    with source.at(*path):
        return cast(Value, change(value))


def _size_shape(value: Any) -> str | None:
    """Return the tag of the form that a batch size has."""
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return "<number>" if isinstance(value, int) else "<text>"
    if not isinstance(value, dict):
        return None
    makes: dict[str, Any] = {key: make for key, (make, _) in SIZES.items()} | {**COUPLED}
    found = [make for key, make in makes.items() if value.get(key) is not None]
    if isinstance(value.get("ramp"), str) and value["ramp"] in RAMPS:
        found.insert(0, RAMPS[value["ramp"]])
    if found or "target" in value:
        return f"<{found[0].__name__}>" if found else "<TargetSizes>"
    return "<mapping>" if any(not str(key).isidentifier() for key in value) else None


def _size_text(text: str) -> BatchSizePolicy:
    return batching.as_policy(text)


def _size_forms() -> Iterator[tuple[Any, str]]:
    yield Annotated[Count, AfterValidator(batching.Fixed)], "<number>"
    yield Annotated[_Text, AfterValidator(_size_text)], "<text>"
    yield Annotated[_Mapping, AfterValidator(batching.PiecewiseConstant)], "<mapping>"
    yield _target_of_sizes()
    for name, ramp in RAMPS.items():
        which = Annotated[str, WithJsonSchema({"const": name, "description": "Which ramp."})]
        yield _form(ramp, ramp=(which, ...), **_around())
    for key, (make, argument) in SIZES.items():
        yield _form(make, key, argument, **_around())
    for key, coupled in COUPLED.items():
        yield _form(coupled, key, "size", even=_around()["even"])


def _schedule_shape(value: Any) -> str | None:
    """Return the tag of the form that a schedule has."""
    if isinstance(value, (int, float, list)) and not isinstance(value, bool):
        return "<list>" if isinstance(value, list) else "<number>"
    if not isinstance(value, dict):
        return None
    if "target" in value:
        return "<Target>"
    return next((f"<{_curve(key)}>" for key in (*CURVES, "periods") if key in value), None)


def _curve(key: str) -> str:
    """Return the name of the form of a schedule."""
    return f"Schedule{key.title().replace('_', '')}"


def _schedule_forms() -> Iterator[tuple[Any, str]]:
    yield Annotated[Annotated[float, Field(ge=0)], AfterValidator(schedules.Constant)], "<number>"
    several = Annotated[list[_nested("Schedule")], Field(min_length=1)]  # type: ignore[misc,valid-type]
    yield Annotated[several, AfterValidator(_product)], "<list>"
    yield Annotated[Target, AfterValidator(schedules.as_schedule)], "<Target>"
    inner: dict[str, Any] = {key: _form(kind)[0] for key, kind in CURVES.items()}
    inner["periods"] = Annotated[_period("Schedule"), AfterValidator(schedules.Periods)]
    for key, kind in inner.items():
        only: dict[str, Any] = {key: (kind, ...)}
        model = create_model(_curve(key), __base__=Section, **only)
        value = AfterValidator(lambda read, key=key: getattr(read, key))
        yield Annotated[model, value], f"<{_curve(key)}>"


def _product(items: Sequence[Schedule]) -> Schedule:
    return items[0] if len(items) == 1 else schedules.Product(*items)


@cache
def adapter(name: str) -> TypeAdapter[Any]:
    """Return the reader of a "BatchSize" or a "Schedule", which also describes it."""
    if name == "BatchSize":
        keys = ("ramp", *SIZES, *COUPLED)
        ramp = f"{{ramp: double, start: 8, end: 64, over: 40%}} (or a ramp of {', '.join(RAMPS)})"
        return _adapter(_size_forms(), _size_shape, keys, f"a number, '0ep:8 1ep:16', or {ramp}")
    keys = (*CURVES, "periods")
    return _adapter(_schedule_forms(), _schedule_shape, keys, "{cosine: {end: 0.1}}, or a number")


def _adapter(
    forms: Iterator[tuple[Any, str]],
    shape: Callable[[Any], str | None],
    keys: tuple[str, ...],
    example: str,
) -> TypeAdapter[Any]:
    def check(value: Any) -> Any:
        if shape(value) is not None:
            return value
        given = value if isinstance(value, dict) else ()
        near = next(filter(None, (nearest(key, keys) for key in given if key not in keys)), None)
        hint = f"did you mean {near!r}? Or " if near else ""
        raise BatchSizeError.cannot(
            f"use {shown(value)}",
            why="it has none of the possible forms",
            instead=f"{hint}write for example {example}",
        )

    tagged = tuple(Annotated[form, Tag(tag)] for form, tag in forms)
    whole: Any = Annotated[Union[tagged], Discriminator(shape), BeforeValidator(check)]  # noqa: UP007  of a tuple
    return TypeAdapter(whole)


@final
@dataclass(frozen=True, slots=True)
class Read(Generic[Value]):
    """A value of a run file, and the object that it describes."""

    written: Any
    value: Value = field(compare=False)


def _read(name: str) -> Any:
    def read(written: Any, info: ValidationInfo) -> Read[Any]:
        context = Context.of(info.data)
        return Read(written, adapter(name).validate_python(written, context=context))

    return PlainValidator(read), PlainSerializer(lambda read: read.written), reference(name)


BatchSize: TypeAlias = Annotated[Read[BatchSizePolicy | Pair], *_read("BatchSize")]
"""Samples of one optimizer step over all ranks, in any of the ways to write it."""
AnySchedule: TypeAlias = Annotated[Read[Schedule], *_read("Schedule")]
"""A schedule, in any of the ways to write it."""


def settings_form(
    kind: type, *without: str, types: Mapping[str, Any], **defaults: Any
) -> GetPydanticSchema:
    """Return a reader of mappings whose keys are the fields of a class of settings."""
    hints = get_type_hints(kind)
    own: dict[str, Any] = {
        one.name: (
            types.get(one.name) or _type(hints[one.name]),
            defaults.get(one.name, one.default),
        )
        for one in fields(kind)
        if one.name not in without
    }
    section = create_model(kind.__name__, __base__=Section, __doc__=summary_of(kind), **own)

    def made(read: Any) -> Any:
        return kind(**{name: getattr(read, name) for name in own})

    def written(made: Any) -> dict[str, Any]:
        return section.model_validate({name: getattr(made, name) for name in own}).model_dump(
            mode="json"
        )

    return read_as(Annotated[section, AfterValidator(made), PlainSerializer(written)])
