"""`batch_size` in a run file, in any of the ways to write it, and the policy it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import Field, Tag

from stretto.batching import BatchSizePolicy, PeriodSizes, as_policy
from stretto.config.building import Building
from stretto.config.fields import Count, check_duration, check_no_duration, shape_of
from stretto.config.sizes import (
    DoublingSizes,
    FunctionSizes,
    IncreasedSizes,
    LinearSizes,
    OneSize,
    Sizes,
    StagedSizes,
    SteppedSizes,
    StepsMapping,
    StepsText,
)
from stretto.config.source import Path
from stretto.config.targets import nearest_to


class PeriodicSizes(Sizes):
    """One way after another, each on a clock that starts with its period."""

    periods: Annotated[list[SizesInPeriod], Field(min_length=1)]
    """Each with a `duration`, and a way to write its sizes; times in it are relative to it."""

    def _sizes(self, building: Building, path: Path) -> BatchSizePolicy:
        policies = []
        for number, period in enumerate(self.periods):
            here = (*path, "periods", number)
            with building.source.at(*here):
                policies.append((check_duration(period.duration), period.policy(building, here)))
        return PeriodSizes(policies)


_KEYS: Mapping[str, type[Sizes]] = {
    "size": OneSize,
    "steps": SteppedSizes,
    "periods": PeriodicSizes,
    "target": FunctionSizes,
    "increase": IncreasedSizes,
}
"""The key that says which way a batch size is written."""
_RAMPS: Mapping[str, type[Sizes]] = {
    "linear": LinearSizes,
    "double": DoublingSizes,
    "stages": StagedSizes,
}


def _shape(value: object) -> str | None:
    """The tag of the way in which a batch size is written."""
    if isinstance(value, Sizes):
        return f"<{type(value).__name__}>"
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, Mapping):
        return "<number>"
    if value and all(str(key)[:1].isdigit() for key in value):
        return "<steps>"
    keys = [*_KEYS, "ramp"]
    found = next((key for key in keys if key in value), None)
    found = found or next(filter(None, (nearest_to(str(key), keys) for key in value)), None)
    if found != "ramp":
        return f"<{_KEYS[found].__name__}>" if found else None
    kind = nearest_to(str(value.get("ramp")), _RAMPS)
    return f"<{_RAMPS[kind or 'double'].__name__}>"


_Written: TypeAlias = (
    Annotated[OneSize, Tag("<OneSize>")]
    | Annotated[SteppedSizes, Tag("<SteppedSizes>")]
    | Annotated[LinearSizes, Tag("<LinearSizes>")]
    | Annotated[DoublingSizes, Tag("<DoublingSizes>")]
    | Annotated[StagedSizes, Tag("<StagedSizes>")]
    | Annotated[PeriodicSizes, Tag("<PeriodicSizes>")]
    | Annotated[FunctionSizes, Tag("<FunctionSizes>")]
    | Annotated[IncreasedSizes, Tag("<IncreasedSizes>")]
)
SizesInPeriod: TypeAlias = Annotated[
    _Written, shape_of(_shape, "write for example {duration: 10%, size: 8}")
]
"""The sizes of one period."""
BatchSize: TypeAlias = Annotated[
    Annotated[Count, Tag("<number>")]
    | Annotated[StepsText, Tag("<text>")]
    | Annotated[StepsMapping, Tag("<steps>")]
    | _Written,
    shape_of(
        _shape,
        "write a number, '0ep:8 1ep:16', or for example "
        "{ramp: double, start: 8, end: 64, over: 40%}",
    ),
]
"""Samples of one optimizer step over all ranks, in any of the ways to write it."""

PeriodicSizes.model_rebuild()


def build_batch_size(value: BatchSize, building: Building, path: Path) -> BatchSizePolicy:
    """Return the policy that a `batch_size` of a run file says.

    >>> from stretto.config.building import CHECKING
    >>> build_batch_size("0ep:8 1ep:16", CHECKING, ("batch_size",))
    Steps('0ep:8 1ep:16')

    Raises:
        ConfigError: it cannot be built; the message says where it stands.
    """
    with building.source.at(*path):
        if isinstance(value, Sizes):
            check_no_duration(value.duration)
            return value.policy(building, path)
        return as_policy(value)
