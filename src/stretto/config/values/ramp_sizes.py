"""The ways to write batch sizes that grow from a start to an end."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from stretto.batching import BatchSizePolicy, DoublingRamp, LinearRamp, StagedRamp, rampup
from stretto.config.reading.source import Path
from stretto.config.values.context import Building
from stretto.config.values.fields import Count, Length
from stretto.config.values.sizes import Sizes, WrittenSizes
from stretto.errors import BatchSizeError, cannot

RampKind: TypeAlias = Literal["double", "linear", "stages"]
Equal: TypeAlias = Literal["time", "batches"]


def _only(kind: str) -> Any:
    """Let the schema of one kind of ramp take only its own name; errors list all of them."""
    return Field(json_schema_extra={"enum": [kind]}, examples=[kind])


class LinearSizes(WrittenSizes):
    """Grows in equal increments, each held equally long."""

    ramp: Annotated[RampKind, _only("linear")]
    start: Count
    """The size of the first batch."""
    end: Count
    """The size from `over` on."""
    over: Length
    """How long the ramp is, from the start of the run."""
    increment: Count = 1
    """By how much the size grows at once."""
    equal: Equal = "time"
    """What each size gets equally much of: `time`, in the unit of `over`, or `batches`."""

    def _written(self) -> BatchSizePolicy:
        return LinearRamp(
            self.start, self.end, self.over, increment=self.increment, equal=self.equal
        )


class DoublingSizes(WrittenSizes):
    """Doubles from start to end, each size held equally long."""

    ramp: Annotated[RampKind, _only("double")]
    start: Count
    """The size of the first batch."""
    end: Count
    """The size from `over` on."""
    over: Length
    """How long the ramp is, from the start of the run."""
    equal: Equal = "time"
    """What each size gets equally much of: `time`, in the unit of `over`, or `batches`."""

    def _written(self) -> BatchSizePolicy:
        return DoublingRamp(self.start, self.end, self.over, equal=self.equal)


class StagedSizes(WrittenSizes):
    """Grows through the given sizes, each held equally long."""

    ramp: Annotated[RampKind, _only("stages")]
    sizes: list[Count]
    """Two or more sizes in ascending order; the last one holds from `over` on."""
    over: Length
    """How long the ramp is, from the start of the run."""
    equal: Equal = "time"
    """What each size gets equally much of: `time`, in the unit of `over`, or `batches`."""

    def _written(self) -> BatchSizePolicy:
        return StagedRamp(self.sizes, self.over, equal=self.equal)


class RampupSizes(Sizes):
    """Doubles up to a final size, by gradient accumulation alone."""

    rampup: Count
    """The size from `over` on: a multiple of world_size * micro_batch_size, like every other."""
    over: Length
    """How long the ramp is, from the start of the run."""
    initial_global_train_batch_size: Count | None = None
    """The size of the first batch; left out, the lowest possible, world_size * micro_batch_size."""

    def _sizes(self, building: Building, path: Path) -> BatchSizePolicy:
        del path
        micro = building.micro_batch_size
        if not building.imports:
            micro = 1  # the file on its own: ranks and micro-batches are not known yet
        if micro is None:
            raise BatchSizeError(
                cannot(
                    f"ramp up to {self.rampup} by gradient accumulation",
                    why="the run file states no micro-batch size",
                    instead="write micro_batch_size: 8, or another ramp such as "
                    f"{{ramp: double, start: 8, end: {self.rampup}, over: {self.over}}}",
                )
            )
        return rampup(
            self.rampup,
            self.over,
            world_size=building.world_size,
            micro_batch_size=micro,
            initial_global_train_batch_size=self.initial_global_train_batch_size,
        )
