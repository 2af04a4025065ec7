"""Batch sizes and schedules of run files, read by pydantic from the signatures of their classes.

A form is a section whose keys are the arguments of a class; read, it is an object of that class.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)

from stretto import batching, schedules
from stretto.batching import BatchSizePolicy, SizeFunction, rampup
from stretto.batching.functions import IncreaseCallable
from stretto.batching.periods import Periods as PeriodsOfSizes
from stretto.batching.policy import Size
from stretto.batching.seesaw import Continuous, Coupling
from stretto.batching.steps import PolicyLike, StepsLike
from stretto.config.fields import (
    Count,
    CountOrAuto,
    Section,
    Target,
    TargetText,
    read_time,
    shape_of,
    shown,
    summary_of,
)
from stretto.config.messages import explain
from stretto.config.settings import CHECKING, Building, refused_at
from stretto.config.targets import call_target
from stretto.config.yaml import Path, Source
from stretto.errors import Argument, BatchSizeError, ScheduleError, TimeError, nearest
from stretto.schedules import Schedule
from stretto.schedules.fields import Factor, Interval, Length, Positive
from stretto.timing import Horizon, TimeLike
from stretto.timing.time import Number

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
COUPLED: Mapping[str, type[Coupling]] = {
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


def from_accumulation(
    final_size: int,
    over: TimeLike,
    *,
    initial_global_train_batch_size: int | None = None,
    building: Building,
) -> BatchSizePolicy:
    """Doubles up to a final size, by gradient accumulation alone.

    Args:
        final_size: the size from `over` on: a multiple of world_size * micro_batch_size, like every
            other.
        over: how long the ramp is, from the start of the run.
        initial_global_train_batch_size: the size of the first batch; left out, the lowest possible,
            world_size * micro_batch_size.
        building: the ranks and their micro-batch size.
    """
    micro = building.micro_batch_size if building.imports else 1  # checking knows no ranks
    if micro is None:
        raise BatchSizeError.cannot(
            f"ramp up to {final_size} by gradient accumulation",
            why="the run file states no micro-batch size",
            instead="write micro_batch_size: 8, or another ramp such as "
            f"{{ramp: double, start: 8, end: {final_size}, over: {over}}}",
        )
    return rampup(
        final_size,
        over,
        world_size=building.world_size,
        micro_batch_size=micro,
        initial_global_train_batch_size=initial_global_train_batch_size,
    )


SIZES: Mapping[str, tuple[Callable[..., BatchSizePolicy], str]] = {
    "size": (batching.Fixed, "size"),
    "steps": (batching.Steps, "steps"),
    "periods": (batching.PeriodSizes, "periods"),
    "increase": (batching.IncreaseFunction, "function"),
    "noise_scale": (batching.NoiseScale, "c"),
    "norm_test": (batching.NormTest, "eta"),
    "plateau": (batching.Plateau, "metric"),
    "rampup": (from_accumulation, "final_size"),
}
"""Batch sizes by the key that says what they are, and the argument that its value fills."""


def argument_texts(kind: object) -> dict[str, str]:
    """Return what a docstring says of each argument.

    >>> argument_texts(batching.StagedRamp)["sizes"]
    'two or more sizes in ascending order.'
    """
    section = (inspect.getdoc(kind) or "").partition("Args:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _reference(name: str) -> WithJsonSchema:
    return WithJsonSchema({"x-ref": name})


def _nested(name: str) -> Any:
    """Return the type of a value that is read by the adapter of that name."""

    def read(value: Any, info: ValidationInfo) -> Any:
        return adapter(name).validate_python(value, context=info.context)

    return Annotated[Any, PlainValidator(read), _reference(name)]


def _period(name: str) -> Any:
    """Return the type of periods, whose other keys than `duration` the adapter reads."""

    def read(value: Any, info: ValidationInfo) -> tuple[Any, Any]:
        if not isinstance(value, dict) or value.get("duration") is None:
            raise ScheduleError.cannot(
                f"use {shown(value)} as a period",
                why="it has no 'duration'",
                instead="write how long it is, such as 'duration: 10%', or 'duration: rest'",
            )
        duration = value["duration"]
        with refused_at(("duration",)):
            if duration in (-1, "-1"):
                raise TimeError.cannot(
                    f"use {duration} as a duration",
                    why="it is not a time",
                    instead="write 'rest' for what is left of the run",
                )
            duration = duration if duration == "rest" else read_time(duration)
        rest = {key: one for key, one in value.items() if key != "duration"}
        if name == "BatchSize" and (key := coupled_key(rest)):
            raise BatchSizeError.cannot(
                f"use {key!r} here",
                why="its sizes follow the learning rate of the whole run",
                instead="write it as batch_size itself, and the periods in schedules.lr",
            )
        return duration, adapter(name).validate_python(rest, context=info.context)

    schema = _reference(f"PeriodOf{name}")
    return Annotated[list[Annotated[Any, PlainValidator(read), schema]], Field(min_length=1)]


def _function(value: Any, info: ValidationInfo) -> Any:
    section = value if isinstance(value, Target) else Target.model_validate(value)
    return _building(info).function(section)


_Time: TypeAlias = Annotated[Any, PlainValidator(read_time), _reference("Time")]
_Text: TypeAlias = Annotated[str, Field(examples=["0tok:768 250Btok:1536"])]
_Mapping: TypeAlias = Annotated[
    dict[str, Count],
    Field(min_length=1),
    WithJsonSchema(
        {
            "description": "A size from each of some times on.",
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"x-ref": "Time"},
            "additionalProperties": {"type": "integer", "minimum": 1},
        }
    ),
]
_STEPS_SHAPES: dict[Any, str] = {dict: "<mapping>", str: "<text>"}
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
    **dict.fromkeys((TimeLike, Length, Interval), _Time),
    PolicyLike: _nested("BatchSize"),
    StepsLike: Annotated[
        Annotated[_Text, Tag("<text>")] | Annotated[_Mapping, Tag("<mapping>")],
        shape_of(
            lambda value: _STEPS_SHAPES.get(type(value)),
            "write for example '0ep:8 1ep:16'",
        ),
    ],
    PeriodsOfSizes: _period("BatchSize"),
    IncreaseCallable: Annotated[Any, PlainValidator(_function), _reference("Target")],
}
"""What a run file holds for the annotation of an argument; for any other, the annotation itself."""


def _type(hint: Any) -> Any:
    """Return the type of a value in a run file, from the annotation of an argument."""
    arguments = get_args(hint)
    if hint in _TYPES:
        return _TYPES[hint]
    if type(None) in arguments:
        rest = tuple(one for one in arguments if one is not type(None))
        return _type(Union[rest]) | None  # noqa: UP007  of a tuple
    if get_origin(hint) is Annotated:
        return _type(arguments[0])
    if get_origin(hint) is Sequence:
        return list[_type(arguments[0])]  # type: ignore[misc]
    return hint


def _building(info: ValidationInfo) -> Building:
    return cast(Building, info.context or CHECKING)


def _fields(make: Any, key: str, argument: str) -> dict[str, Any]:
    """Return the fields of a form by key: type and default."""
    params = getattr(make, "__dataclass_params__", None)
    source = (
        make if (params and params.init) or not isinstance(make, type) else vars(make)["__init__"]
    )
    hints, texts = get_type_hints(source, include_extras=True), argument_texts(make)
    found = {}
    for one in inspect.signature(make).parameters.values():
        if one.name == "building" or (make in COUPLED.values() and one.name == "decay"):
            continue
        is_key = one.name == argument
        default = ... if is_key or one.default is one.empty else one.default
        kind: Any = _type(hints[one.name])
        hint: Any = Annotated[kind, Field(description=texts.get(one.name))]
        found[key if is_key else one.name] = (hint, default)
    return found


def _title(make: Any) -> str:
    """Return the name of a form in the JSON schema."""
    return str(make.__name__) if isinstance(make, type) else make.__name__.title().replace("_", "")


def _form(make: Any, key: str = "", argument: str = "", **beside: Any) -> Any:
    """Return the type of a mapping whose keys are the arguments of `make`.

    Args:
        make: what is called with them.
        key: the key that says what it is.
        argument: the argument that its value fills.
        beside: further keys: type and default of each.
    """
    own = _fields(make, key, argument)
    name = _title(make)
    section = create_model(name, __base__=Section, __doc__=summary_of(make), **beside | own)

    def made(read: Any, info: ValidationInfo) -> Any:
        given = {
            argument if one == key else one: getattr(read, one)
            for one in own
            if one in read.model_fields_set
        }
        building, known = _building(info), inspect.signature(make).parameters
        given |= {"building": building} if "building" in known else {}
        if make in COUPLED.values():
            if read.even and building.even_unit > 1:
                given["multiple_of"] = math.lcm(given.get("multiple_of", 1), building.even_unit)
            return make(building.decay, **given)
        policy = make(**given)
        if "at_most" not in beside:
            return policy
        policy = _wrapped(policy, read, building)
        if given.get("maximum") is not None:
            _check_reach(make(**given), policy, given, is_bounded=read.at_most is not None)
        return policy

    return Annotated[section, AfterValidator(made)], f"<{name}>"


def _wrapped(policy: BatchSizePolicy, read: Any, building: Building) -> BatchSizePolicy:
    """Return a policy with what is written beside it."""
    for key, kind in AROUND.items():
        value = getattr(read, key)
        if key == "multiple_of" and read.even and building.even_unit > 1:
            value = math.lcm(value or 1, building.even_unit)
        with refused_at((key,)):
            if key == "monotone":
                policy = kind(policy) if value else policy
            elif value is not None:
                policy = kind(policy, value)
    return policy


def _check_reach(
    policy: BatchSizePolicy,
    wrapped: BatchSizePolicy,
    given: Mapping[str, Any],
    *,
    is_bounded: bool,
) -> None:
    """Refuse bounds and rounding that exceed the policy's own bounds."""
    horizon = Horizon("1ep")
    inner, outer = policy.bind(horizon).bounds, wrapped.bind(horizon).bounds
    if inner is None or outer is None:
        return
    name = "start" if given.get("minimum") is None else "minimum"
    if outer[1] > inner[1] and not is_bounded:
        name, stated, reached = "maximum", inner[1], outer[1]
    elif outer[0] < inner[0]:
        stated, reached = inner[0], outer[0]
    else:
        return
    raise BatchSizeError.cannot(
        ("use ", Argument(name, stated)),
        why=f"the bounds and rounding beside it lead to {reached}",
        instead=f"write {reached}, or other bounds",
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
    own = {name: one for name, one in _fields(SizeFunction, "", "").items() if name in _OPTIONS}
    text = "A function of yours, `function(timestamp, current) -> size`, or a policy of yours."
    which = "`package.module:function`, or a class of policies; keys that are not listed here are "
    target = Annotated[TargetText, Field(description=f"{which}its arguments.")]
    section = create_model(
        "TargetSizes", __base__=Target, __doc__=text, target=(target, ...), **own | _around()
    )

    def made(read: Any, info: ValidationInfo) -> BatchSizePolicy:
        building = _building(info)
        options = {name: getattr(read, name) for name in own if name in read.model_fields_set}
        options = {name: value for name, value in options.items() if value is not None}
        target = Target(target=read.target, **read.arguments)
        if building.is_class(target.target, BatchSizePolicy):
            policy = call_target(target, source=None, **options)
        else:
            policy = SizeFunction(building.function(target), None, **options)
        return _wrapped(policy, read, building)

    return Annotated[section, AfterValidator(made)], "<TargetSizes>"


_OPTIONS = ("every", "planned")


def _size_shape(value: Any) -> str | None:
    """Return the tag of the form that a batch size has."""
    if isinstance(value, (bool, float)) or value is None:
        return None
    if isinstance(value, (int, str)):
        return "<number>" if isinstance(value, int) else "<text>"
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("ramp"), str) and value["ramp"] in RAMPS:
        return f"<{RAMPS[value['ramp']].__name__}>"
    given = [key for key in (*SIZES, *COUPLED) if value.get(key) is not None]
    if given:
        make = COUPLED[given[0]] if given[0] in COUPLED else SIZES[given[0]][0]
        return f"<{_title(make)}>"
    if "target" in value:
        return "<TargetSizes>"
    return "<mapping>" if any(not str(key).isidentifier() for key in value) else None


def _size_text(value: str) -> BatchSizePolicy:
    return batching.as_policy(value)


def _size_forms() -> Iterator[tuple[Any, str]]:
    yield Annotated[Count, AfterValidator(batching.Fixed)], "<number>"
    yield Annotated[_Text, AfterValidator(_size_text)], "<text>"
    yield Annotated[_Mapping, AfterValidator(batching.Steps)], "<mapping>"
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
    custom = AfterValidator(lambda read, info: schedules.as_schedule(_function(read, info)))
    yield Annotated[Target, custom], "<Target>"
    inner: dict[str, Any] = {key: _form(kind)[0] for key, kind in CURVES.items()}
    inner["periods"] = Annotated[_period("Schedule"), AfterValidator(schedules.Periods)]
    for key, kind in inner.items():
        only: dict[str, Any] = {key: (kind, ...)}
        model = create_model(_curve(key), __base__=Section, **only)
        value = AfterValidator(lambda read, key=key: getattr(read, key))
        yield Annotated[model, value], f"<{_curve(key)}>"


def _product(items: Sequence[Schedule]) -> Schedule:
    return items[0] if len(items) == 1 else schedules.Product(*items)


def _arguments() -> set[str]:
    """Return the arguments of all batch sizes."""
    makes: list[Any] = [*RAMPS.values(), *COUPLED.values(), *(make for make, _ in SIZES.values())]
    return {name for make in makes for name in inspect.signature(make).parameters}


def _spelled(names: Sequence[str], error: Any, alternative: str) -> BeforeValidator:
    """Return what refuses a mapping of no form or of several."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("ramp", "double") not in [*RAMPS]:
            near = nearest(value["ramp"], RAMPS)
            with refused_at(("ramp",)):
                raise error.cannot(
                    f"use {shown(value['ramp'])} as a ramp",
                    why="there is no such ramp",
                    instead=f"did you mean {near!r}?" if near else f"write {' or '.join(RAMPS)}",
                )
        given = [name for name in names if value.get(name) is not None]
        if len(given) > 1:
            raise error.cannot(
                f"combine {' and '.join(map(repr, given))}",
                why="each of them says what it is",
                instead=alternative,
            )
        for key in () if given else value:
            # 'start' is near to 'target', and an argument of some form.
            is_meant = str(key)[:1].isdigit() or key in _arguments()
            if not is_meant and (near := nearest(key, names)):
                with refused_at((key,)):
                    raise error.cannot(
                        f"use the key {shown(key)}",
                        why="there is no such key here",
                        instead=f"did you mean {near!r}?",
                    )
        return value

    return BeforeValidator(check)


_INSTEAD = {
    "BatchSize": "write a number, '0ep:8 1ep:16', or for example "
    "{ramp: double, start: 8, end: 64, over: 40%}",
    "Schedule": "write for example {cosine: {end: 0.1}}, or a number",
}


@cache
def adapter(name: str) -> TypeAdapter[Any]:
    """Return what reads and describes a value: a "BatchSize" or a "Schedule"."""
    is_size = name == "BatchSize"
    forms = _size_forms() if is_size else _schedule_forms()
    tagged = tuple(Annotated[form, Tag(tag)] for form, tag in forms)
    shape = shape_of(_size_shape if is_size else _schedule_shape, _INSTEAD[name])
    names = ["ramp", "target", *SIZES, *COUPLED] if is_size else [*CURVES, "periods", "target"]
    known = (
        _spelled(names, BatchSizeError, "keep one")
        if is_size
        else _spelled(names, ScheduleError, "keep one, or write a list: its items multiply")
    )
    whole: Any = Annotated[Union[tagged], shape, known]  # noqa: UP007  of a tuple
    return TypeAdapter(whole)


def coupled_key(value: object) -> str | None:
    """Return the key that couples a batch size with the learning rate, if there is one.

    >>> coupled_key({"seesaw": 16})
    'seesaw'
    """
    words = value if isinstance(value, Mapping) else {}
    return next((key for key in COUPLED if words.get(key) is not None), None)


def build_sizes(
    value: Any, written: Mapping[str, Schedule], building: Building, source: Source
) -> tuple[BatchSizePolicy, Mapping[str, Schedule]]:
    """Return the policy that a `batch_size` says, and what becomes of the schedules with it.

    Sizes that take over the decay of the learning rate take it from its schedule.

    >>> from stretto.schedules import Linear
    >>> build_sizes({"seesaw": 16}, {"lr": Linear()}, Building(), Source())
    (Seesaw(Linear(), Fixed(16)).policy, {'lr': Seesaw(Linear(), Fixed(16)).schedule})

    Raises:
        ConfigError: it cannot be built; the message says where it stands.
    """
    building = replace(building, decay=written.get("lr", building.decay))
    sizes = _built("BatchSize", value, building, source, ("batch_size",))
    if isinstance(sizes, Coupling):
        return sizes.policy, {**written, "lr": sizes.schedule}
    return sizes, written


def build_schedule(value: Any, building: Building, source: Source, path: Path) -> Schedule:
    """Return the schedule that a run file says; several in a list multiply.

    Raises:
        ConfigError: a target cannot be imported or called, or the schedule cannot be.
    """
    return cast(Schedule, _built("Schedule", value, building, source, path))


def _built(name: str, value: Any, building: Building, source: Source, path: Path) -> Any:
    try:
        return adapter(name).validate_python(value, context=building)
    except ValidationError as error:
        details: list[Any] = error.errors(include_url=False)
        lines = [{**one, "loc": (*path, *one["loc"])} for one in details]
        whole = ValidationError.from_exception_data(name, lines)  # type: ignore[arg-type]
        cause = details[0].get("ctx", {}).get("error", error)
        raise explain(whole, Section, source) from cause


def _checked(name: str) -> PlainValidator:
    def check(value: Any) -> Any:
        adapter(name).validate_python(value, context=CHECKING)
        return value

    return PlainValidator(check)


BatchSize: TypeAlias = Annotated[Any, _checked("BatchSize"), _reference("BatchSize")]
"""Samples of one optimizer step over all ranks, in any of the ways to write it."""
ScheduleText: TypeAlias = Annotated[Any, _checked("Schedule"), _reference("Schedule")]
"""A schedule as a run file holds it, which can be built."""
