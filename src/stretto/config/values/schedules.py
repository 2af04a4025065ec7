"""`schedules` in a run file, and the schedules that become of them.

The keys of each kind are the arguments of its class, read from its signature, and their
descriptions are those of its docstring: a schedule is described in one place.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, cast

from pydantic import ConfigDict, Field, Tag, create_model, model_validator

from stretto.config.reading.source import Path
from stretto.config.values.context import CHECKING, Building
from stretto.config.values.docstrings import argument_texts, summary_of
from stretto.config.values.fields import (
    Count,
    Duration,
    Number,
    Section,
    Target,
    TargetText,
    TimeText,
    check_duration,
    check_no_duration,
    shape_of,
)
from stretto.errors import ScheduleError
from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    DecayShape,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    Periods,
    Polynomial,
    Product,
    Schedule,
    StepDecay,
    as_schedule,
)

KINDS: Mapping[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "cosine_restarts": CosineRestarts,
    "polynomial": Polynomial,
    "exponential": Exponential,
    "step": StepDecay,
    "multi_step": MultiStep,
    "inverse_sqrt": InverseSqrt,
    "wsd": WSD,
}
"""The schedules that a run file can name, each by the key that stands for it."""

_TYPES: Mapping[str, Any] = {
    "Factor": Number,
    "Positive": Number,
    "int": Count,
    "Length": TimeText,
    "Interval": TimeText,
    "Length | None": TimeText | None,
    "Interval | None": TimeText | None,
    "Sequence[TimeLike]": list[TimeText],
    "DecayShape": DecayShape,
}
"""What a run file holds for the annotation of a schedule's argument."""


class Arguments(Section):
    """The arguments of one kind of schedule."""

    def given(self) -> dict[str, Any]:
        """Return them by name."""
        return {name: getattr(self, name) for name in type(self).model_fields}


def _arguments(kind: type[Schedule]) -> type[Arguments]:
    """The section whose keys are the arguments of `kind`."""
    descriptions = argument_texts(kind)
    fields = {
        name: (
            _TYPES[parameter.annotation],
            Field(
                default=... if parameter.default is parameter.empty else parameter.default,
                description=descriptions.get(name),
            ),
        )
        for name, parameter in inspect.signature(kind).parameters.items()
    }
    summary = summary_of(kind)
    return create_model(kind.__name__, __base__=Arguments, __doc__=summary, **cast(Any, fields))


class Curve(Section):
    """A factor that multiplies a hyper-parameter, as a function of time."""

    duration: Duration | None = None
    """In `periods`: how long this one is, or `rest`."""

    def schedule(self, building: Building, path: Path) -> Schedule:
        """Return the schedule."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.schedule(CHECKING, ())
        return self


class KnownCurve(Curve):
    """One of the schedules that stretto has."""

    periods: Annotated[list[CurveInPeriod], Field(min_length=1)] | None = None
    """Schedules one after another, each with a `duration`; times in it are relative to it."""

    def schedule(self, building: Building, path: Path) -> Schedule:
        """Return the schedule that the one key names."""
        names = [*KINDS, "periods"]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ScheduleError.cannot(
                f"follow {' and '.join(given)} at once" if given else "follow no schedule",
                why="a schedule is one of them" if given else "its kind is not said",
                instead="write one, or a list of several, which multiply"
                if given
                else "write for example cosine: {end: 0.1}, or constant: {}",
            )
        if self.periods is None:
            arguments: Arguments = getattr(self, given[0])
            return KINDS[given[0]](**arguments.given())
        schedules = []
        for number, period in enumerate(self.periods):
            here = (*path, "periods", number)
            with building.source.at(*here):
                duration = check_duration(period.duration)
                schedules.append((duration, period.schedule(building, here)))
        return Periods(schedules)


class CustomCurve(Curve):
    """A function of yours: `function(timer) -> factor`."""

    model_config = ConfigDict(extra="allow")

    target: TargetText
    """`package.module:function`; all other keys are its arguments."""

    def schedule(self, building: Building, path: Path) -> Schedule:
        """Return the function as a schedule."""
        section = Target(target=self.target, **(self.__pydantic_extra__ or {}))
        return as_schedule(building.function(section, path))


if TYPE_CHECKING:
    WrittenCurve = KnownCurve
else:
    WrittenCurve = create_model(
        "WrittenCurve",
        __base__=KnownCurve,
        __doc__="One of the schedules that stretto has, by its name.",
        **{name: (_arguments(kind) | None, None) for name, kind in KINDS.items()},
    )


def _shape(value: object) -> str | None:
    """The tag of the way in which a schedule is written."""
    if isinstance(value, Curve):
        return "<CustomCurve>" if isinstance(value, CustomCurve) else "<WrittenCurve>"
    if isinstance(value, list):
        return "<list>"
    if not isinstance(value, Mapping):
        return "<number>" if isinstance(value, (int, float)) else None
    if "target" in value:
        return "<CustomCurve>"
    return "<WrittenCurve>"


_Written: TypeAlias = (
    Annotated[WrittenCurve, Tag("<WrittenCurve>")] | Annotated[CustomCurve, Tag("<CustomCurve>")]
)
CurveInPeriod: TypeAlias = Annotated[
    _Written, shape_of(_shape, "write for example {duration: 5%, linear: {start: 0, end: 1}}")
]
"""The schedule of one period."""
OneSchedule: TypeAlias = Annotated[
    Annotated[Number, Tag("<number>")] | _Written,
    shape_of(_shape, "write for example {cosine: {end: 0.1}}, or a number"),
]
"""A schedule, or a factor that stays."""
ScheduleText: TypeAlias = Annotated[
    Annotated[Number, Tag("<number>")]
    | _Written
    | Annotated[list[OneSchedule], Field(min_length=1), Tag("<list>")],
    shape_of(_shape, "write for example {cosine: {end: 0.1, warmup: 5%}}, a number, or a list"),
]
"""What multiplies a hyper-parameter: a schedule, a number, or a list whose product it is."""

WrittenCurve.model_rebuild()


def build_schedule(value: ScheduleText, building: Building, path: Path) -> Schedule:
    """Return the schedule that an entry of `schedules` in a run file says.

    >>> from stretto.config.values.context import CHECKING
    >>> build_schedule([0.5, 2.0], CHECKING, ("schedules", "lr"))
    Product(Constant(value=0.5), Constant(value=2.0))

    Raises:
        ConfigError: it cannot be built; the message says where it stands.
    """
    if isinstance(value, list):
        items = [
            build_schedule(item, building, (*path, number)) for number, item in enumerate(value)
        ]
        return items[0] if len(items) == 1 else Product(*items)
    with building.source.at(*path):
        if isinstance(value, Curve):
            check_no_duration(value.duration)
            return value.schedule(building, path)
        return Constant(value)
