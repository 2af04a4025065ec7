"""Batch sizes that take over the decay of the learning rate: `seesaw` and its relative."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, Tag, model_validator

from stretto.batching import Coupling, IncreaseInsteadOfDecay, Seesaw, as_policy
from stretto.config.reading.source import Path
from stretto.config.values.context import CHECKING, Building
from stretto.config.values.fields import Count, Number, Section, shape_of
from stretto.config.values.ramp_sizes import DoublingSizes, LinearSizes, StagedSizes
from stretto.config.values.sizes import WAYS, Sizes, SteppedSizes, StepsMapping, StepsText
from stretto.errors import nearest
from stretto.schedules import Cosine, Schedule

_RAMPS: Mapping[str, type[Section]] = {
    "linear": LinearSizes,
    "double": DoublingSizes,
    "stages": StagedSizes,
}


def shape_among(keys: Mapping[str, type[Section]], value: object) -> str | None:
    """Return the tag of the way in which a batch size is written, by the key that says which."""
    if isinstance(value, Section):
        return f"<{type(value).__name__}>"
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, Mapping):
        return "<number>"
    if value and all(str(key)[:1].isdigit() for key in value):
        return "<steps>"
    names = [*keys, "ramp"]
    found = next((key for key in names if key in value), None)
    # What another way calls its own is no slip of the pen: 'start' is near to 'target'.
    own = {key for section in (*keys.values(), *_RAMPS.values()) for key in section.model_fields}
    slips = (nearest(str(key), names) for key in value if key not in own)
    found = found or next(filter(None, slips), None)
    if found != "ramp":
        return f"<{keys[found].__name__}>" if found else None
    kind = nearest(str(value.get("ramp")), _RAMPS)
    return f"<{_RAMPS[kind or 'double'].__name__}>"


WarmupSizes: TypeAlias = Annotated[
    Annotated[Count, Tag("<number>")]
    | Annotated[StepsText, Tag("<text>")]
    | Annotated[StepsMapping, Tag("<steps>")]
    | Annotated[SteppedSizes, Tag("<SteppedSizes>")]
    | Annotated[LinearSizes, Tag("<LinearSizes>")]
    | Annotated[DoublingSizes, Tag("<DoublingSizes>")]
    | Annotated[StagedSizes, Tag("<StagedSizes>")],
    shape_of(
        lambda value: shape_among({"steps": SteppedSizes}, value),
        "write a number, '0ep:8 1ep:16', or for example "
        "{ramp: double, start: 8, end: 32, over: 10%}",
    ),
    Field(examples=[16]),
]
"""The sizes before the schedule decays: one, steps or a ramp."""


GrowthFactor: TypeAlias = Annotated[
    Annotated[Number, Tag("<number>")] | Annotated[Literal["continuous"], Tag("<text>")],
    shape_of(
        lambda value: "<text>" if isinstance(value, str) else "<number>",
        "write a number above 1, or continuous",
    ),
]
"""By how much a batch grows at once."""


class CoupledSizes(Section):
    """Sizes that grow as `schedules.lr` decays; the learning rate then decays by less."""

    ways: ClassVar[tuple[str, ...]] = WAYS

    kind: ClassVar[type[Coupling]]

    factor: GrowthFactor = 2.0
    """By how much the batch grows at once; `continuous`: whenever another sample fits in."""
    smooth: bool = False
    """Whether the learning rate follows the curve between two steps of the size."""
    maximum: Count | None = None
    """The size beyond which the learning rate alone decays; left out, 64 times that before."""
    multiple_of: Count = 1
    """Only multiples of this, rounded down."""
    even: bool = False
    """Only multiples of world_size * micro_batch_size, so that all ranks run full micro-batches."""
    reference: Count | None = None
    """The size that the learning rate is meant for; left out, that at the end of the warm-up."""

    def coupling(self, decay: Schedule, building: Building, path: Path) -> Coupling:
        """Return the pair of schedule and sizes that `decay`, the schedule of the file, becomes."""
        written = self._warmup()
        if isinstance(written, Sizes):
            policy = written.policy(building, path)
        else:
            policy = as_policy(written)
        unit = building.even_unit if self.even else 1
        return self.kind(
            decay,
            policy,
            factor=self.factor,
            smooth=self.smooth,
            maximum=self.maximum,
            multiple_of=math.lcm(self.multiple_of, unit),
            reference=self.reference,
        )

    def _warmup(self) -> WarmupSizes:
        raise NotImplementedError

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.coupling(Cosine(), CHECKING, ())
        return self


class SeesawSizes(CoupledSizes):
    """Wherever the schedule divides the learning rate by a, divide by sqrt(a), grow by a."""

    kind = Seesaw

    seesaw: WarmupSizes
    """The size before the schedule decays: a number, or steps or a ramp to warm the batch up."""

    def _warmup(self) -> WarmupSizes:
        return self.seesaw


class InsteadSizes(CoupledSizes):
    """Wherever the schedule divides the learning rate by a, grow the batch by a instead."""

    kind = IncreaseInsteadOfDecay

    increase_instead_of_decay: WarmupSizes
    """The size before the schedule decays: a number, or steps or a ramp to warm the batch up."""

    def _warmup(self) -> WarmupSizes:
        return self.increase_instead_of_decay
