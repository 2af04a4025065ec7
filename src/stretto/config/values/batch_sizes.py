"""`batch_size` in a run file, in any of the ways to write it, and the policy it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import Field, Tag

from stretto.batching import BatchSizePolicy, PeriodSizes, as_policy
from stretto.config.reading.source import Path
from stretto.config.values.context import Building
from stretto.config.values.coupled_sizes import CoupledSizes, InsteadSizes, SeesawSizes, shape_among
from stretto.config.values.fields import Count, Section, check_duration, check_no_duration, shape_of
from stretto.config.values.following_sizes import NoiseScaleSizes, NormTestSizes, PlateauSizes
from stretto.config.values.ramp_sizes import DoublingSizes, LinearSizes, RampupSizes, StagedSizes
from stretto.config.values.sizes import (
    FunctionSizes,
    IncreasedSizes,
    OneSize,
    Sizes,
    SteppedSizes,
    StepsMapping,
    StepsText,
)
from stretto.errors import ConfigError, cannot
from stretto.schedules import Schedule


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


_KEYS: Mapping[str, type[Section]] = {
    "size": OneSize,
    "steps": SteppedSizes,
    "rampup": RampupSizes,
    "periods": PeriodicSizes,
    "target": FunctionSizes,
    "increase": IncreasedSizes,
    "noise_scale": NoiseScaleSizes,
    "norm_test": NormTestSizes,
    "plateau": PlateauSizes,
}
"""The key that says which way a batch size is written."""
_COUPLED: Mapping[str, type[Section]] = {
    "seesaw": SeesawSizes,
    "increase_instead_of_decay": InsteadSizes,
}


def _shape(value: object) -> str | None:
    """The tag of the way in which the sizes of a period are written."""
    coupled = [key for key in _COUPLED if isinstance(value, Mapping) and key in value]
    if coupled:
        raise ConfigError(
            cannot(
                f"use {coupled[0]!r} in a period",
                why="its sizes go by the learning rate of the whole run",
                instead=f"write it as batch_size itself, and the periods in schedules.lr; "
                f"{coupled[0]!r} may begin with steps or a ramp",
            )
        )
    return shape_among(_KEYS, value)


def _shape_of_run(value: object) -> str | None:
    """The tag of the way in which the batch size of a run is written."""
    return shape_among({**_COUPLED, **_KEYS}, value)


_Written: TypeAlias = (
    Annotated[OneSize, Tag("<OneSize>")]
    | Annotated[SteppedSizes, Tag("<SteppedSizes>")]
    | Annotated[LinearSizes, Tag("<LinearSizes>")]
    | Annotated[DoublingSizes, Tag("<DoublingSizes>")]
    | Annotated[StagedSizes, Tag("<StagedSizes>")]
    | Annotated[RampupSizes, Tag("<RampupSizes>")]
    | Annotated[PeriodicSizes, Tag("<PeriodicSizes>")]
    | Annotated[FunctionSizes, Tag("<FunctionSizes>")]
    | Annotated[IncreasedSizes, Tag("<IncreasedSizes>")]
    | Annotated[NoiseScaleSizes, Tag("<NoiseScaleSizes>")]
    | Annotated[NormTestSizes, Tag("<NormTestSizes>")]
    | Annotated[PlateauSizes, Tag("<PlateauSizes>")]
)
SizesInPeriod: TypeAlias = Annotated[
    _Written, shape_of(_shape, "write for example {duration: 10%, size: 8}")
]
"""The sizes of one period."""
BatchSize: TypeAlias = Annotated[
    Annotated[Count, Tag("<number>")]
    | Annotated[StepsText, Tag("<text>")]
    | Annotated[StepsMapping, Tag("<steps>")]
    | _Written
    | Annotated[SeesawSizes, Tag("<SeesawSizes>")]
    | Annotated[InsteadSizes, Tag("<InsteadSizes>")],
    shape_of(
        _shape_of_run,
        "write a number, '0ep:8 1ep:16', or for example "
        "{ramp: double, start: 8, end: 64, over: 40%}",
    ),
]
"""Samples of one optimizer step over all ranks, in any of the ways to write it."""

PeriodicSizes.model_rebuild()


def build_batch_size(value: BatchSize, building: Building, path: Path) -> BatchSizePolicy:
    """Return the policy that a `batch_size` of a run file says, one that stands for itself.

    >>> from stretto.config.values.context import CHECKING
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


def build_sizes(
    value: BatchSize, schedules: Mapping[str, Schedule], building: Building, path: Path
) -> tuple[BatchSizePolicy, Mapping[str, Schedule]]:
    """Return the policy that a `batch_size` says, and what becomes of the schedules with it.

    Sizes that take over the decay of the learning rate take it from its schedule.

    >>> from stretto.config.values.context import CHECKING
    >>> from stretto.schedules import Linear
    >>> pair = SeesawSizes.model_validate({"seesaw": 16})
    >>> build_sizes(pair, {"lr": Linear()}, CHECKING, ("batch_size",))
    (Seesaw(Linear(), Fixed(16)).policy, {'lr': Seesaw(Linear(), Fixed(16)).schedule})

    Raises:
        ConfigError: it cannot be built; the message says where it stands.
    """
    if not isinstance(value, CoupledSizes):
        return build_batch_size(value, building, path), schedules
    with building.source.at(*path):
        pair = value.coupling(schedules["lr"], building, path)
        return pair.policy, {**schedules, "lr": pair.schedule}
