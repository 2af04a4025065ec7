"""The ways to write batch sizes that stand for themselves, with their bounds and rounding."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field, Tag, model_validator

from stretto.batching import (
    AtLeast,
    AtMost,
    BatchSizePolicy,
    Hysteresis,
    IncreaseFunction,
    Monotone,
    MultipleOf,
    PowerOfTwo,
    SizeFunction,
    Steps,
    as_policy,
)
from stretto.config.reading.source import Path
from stretto.config.values.context import CHECKING, Building
from stretto.config.values.fields import (
    TIME_PATTERN,
    Count,
    CountOrAuto,
    Duration,
    Length,
    Number,
    Section,
    Target,
    TargetText,
    read_time,
    shape_of,
)
from stretto.errors import BatchSizeError, cannot

WAYS = (
    *("size", "steps", "ramp", "rampup", "periods", "target", "increase"),
    *("noise_scale", "norm_test", "plateau", "seesaw", "increase_instead_of_decay"),
)
"""The keys that say what batch sizes are, of which there is one."""


def _steps(value: Any) -> Any:
    as_policy(value)
    return value


def _step_time(text: str) -> str:
    return str(read_time(text))


StepsText: TypeAlias = Annotated[
    str, AfterValidator(_steps), Field(examples=["0tok:768 250Btok:1536"])
]
"""Steps as Megatron writes them, with units."""
_StepTime: TypeAlias = Annotated[
    str, AfterValidator(_step_time), Field(json_schema_extra={"pattern": TIME_PATTERN})
]
StepsMapping: TypeAlias = Annotated[
    dict[_StepTime, Count],
    Field(min_length=1, json_schema_extra={"additionalProperties": False}),
    AfterValidator(_steps),
]
"""A size from each of some times on."""


class Sizes(Section):
    """What every way to write a batch size has in common.

    Applied in this order: power_of_two, multiple_of, even, hysteresis, monotone, at_least,
    at_most.
    """

    ways: ClassVar[tuple[str, ...]] = WAYS

    duration: Duration | None = None
    """In `periods`: how long this one is, or `rest`."""
    at_most: Count | None = None
    """Never more than this."""
    at_least: Count | None = None
    """Never less than this."""
    multiple_of: Count | None = None
    """Only multiples of this, rounded down."""
    power_of_two: Literal["down", "up"] | None = None
    """Only powers of two, rounded this way."""
    hysteresis: Number | None = None
    """Move only when the size is this many times too large or small, such as 1.25."""
    monotone: bool = False
    """Never shrink."""
    even: bool = False
    """Only multiples of world_size * micro_batch_size, so that all ranks run full micro-batches."""

    def policy(self, building: Building, path: Path) -> BatchSizePolicy:
        """Return the policy, with its bounds and rounding."""
        self._check_bounds(building)
        policy = self._sizes(building, path)
        if self.power_of_two is not None:
            policy = PowerOfTwo(policy, self.power_of_two)
        if self._factor(building) > 1:
            policy = MultipleOf(policy, self._factor(building))
        if self.hysteresis is not None:
            policy = Hysteresis(policy, self.hysteresis)
        if self.monotone:
            policy = Monotone(policy)
        if self.at_least is not None:
            policy = AtLeast(policy, self.at_least)
        return policy if self.at_most is None else AtMost(policy, self.at_most)

    def _sizes(self, building: Building, path: Path) -> BatchSizePolicy:
        raise NotImplementedError

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.policy(CHECKING, ())
        return self

    def _factor(self, building: Building) -> int:
        """What every size is a multiple of."""
        return math.lcm(self.multiple_of or 1, building.even_unit if self.even else 1)

    @property
    def _largest(self) -> int | None:
        """The `maximum` of sizes that follow what is measured; None for all others."""
        return None

    def _check_largest(self, largest: int, building: Building) -> None:
        """Refuse what would lift a size beyond its own maximum."""
        least = max(self._factor(building), self.at_least or 1)
        if least > largest:
            why = f"at least {least}, which no size is below"
            raise _bound("maximum", largest, why, (least,))
        if self.power_of_two == "up" and largest & (largest - 1):
            power = 1 << (largest.bit_length() - 1)
            raise _bound("maximum", largest, "a power of two", (power, 2 * power))

    @property
    def _smallest(self) -> tuple[str, int] | None:
        """The `minimum` of sizes that follow what is measured, by the word that says it."""
        return None

    def _check_smallest(self, word: str, smallest: int, building: Building) -> None:
        """Refuse what would take a size below its own minimum."""
        factor = self._factor(building)
        if smallest > factor and smallest % factor:
            lower = smallest - smallest % factor
            raise _bound(word, smallest, f"a multiple of {factor}", (lower, lower + factor))
        if self.power_of_two == "down" and smallest & (smallest - 1):
            power = 1 << (smallest.bit_length() - 1)
            raise _bound(word, smallest, "a power of two", (power, 2 * power))

    def _check_bounds(self, building: Building) -> None:
        """Refuse a bound that the rounding would have to break."""
        bounds, factor = (
            {"at_least": self.at_least, "at_most": self.at_most},
            self._factor(building),
        )
        for name, bound in bounds.items():
            if bound is not None and bound % factor:
                lower = max(factor, bound - bound % factor)
                raise _bound(name, bound, f"a multiple of {factor}", (lower, lower + factor))
            if bound is not None and self.power_of_two and bound & (bound - 1):
                power = 1 << (bound.bit_length() - 1)
                raise _bound(name, bound, "a power of two", (power, 2 * power))
        if self.at_most is not None and (self.at_least or 0) > self.at_most:
            raise _bound("at_least", self.at_least, f"at most {self.at_most}", (self.at_most,))
        largest = self._largest
        if largest is not None and self.at_most is None:
            self._check_largest(largest, building)
        smallest = self._smallest
        if smallest is not None and smallest[1] > (self.at_least or 0):
            self._check_smallest(*smallest, building)
        if self.power_of_two and factor & (factor - 1):
            raise BatchSizeError(
                cannot(
                    "round to powers of two and to multiples",
                    why=f"no multiple of {factor} is a power of two",
                    instead="keep one of power_of_two, multiple_of and even",
                )
            )


def _bound(name: str, bound: int | None, need: str, write: tuple[int, ...]) -> BatchSizeError:
    return BatchSizeError(
        cannot(
            f"use {name}: {bound}",
            why=f"it is not {need}",
            instead=f"write {' or '.join(map(str, write))}",
        )
    )


class WrittenSizes(Sizes):
    """Sizes that stand in the file, without a function of yours."""

    def _sizes(self, building: Building, path: Path) -> BatchSizePolicy:
        del building, path
        return self._written()

    def _written(self) -> BatchSizePolicy:
        raise NotImplementedError


class OneSize(WrittenSizes):
    """The same size for the whole run."""

    size: Count
    """Samples of one optimizer step, over all ranks."""

    def _written(self) -> BatchSizePolicy:
        return as_policy(self.size)


class SteppedSizes(WrittenSizes):
    """A size from each of some times on."""

    steps: Annotated[
        Annotated[StepsText, Tag("<text>")] | Annotated[StepsMapping, Tag("<steps>")],
        shape_of(
            lambda value: {str: "<text>", dict: "<steps>"}.get(type(value)),
            "write '0tok:768 250Btok:1536', or a mapping {0tok: 768, 250Btok: 1536}",
        ),
    ]
    """Text such as `0tok:768 250Btok:1536`, or a mapping from times to sizes."""

    def _written(self) -> BatchSizePolicy:
        return Steps(self.steps)


class FunctionSizes(Sizes):
    """A function of yours, `function(timestamp, current) -> size`, or a policy of yours."""

    model_config = ConfigDict(extra="allow")

    target: TargetText
    """`package.module:function`, or a class of policies (`stretto.BatchSizePolicy`); keys that are
    not listed here are its arguments."""
    every: Length | None = None
    """How often the function is asked; left out, before every batch. A policy gets it as an
    argument."""
    planned: bool | None = None
    """Whether the function's sizes follow from counts, so that they are known before the run; left
    out: yes. A policy gets it as an argument."""

    def _sizes(self, building: Building, path: Path) -> BatchSizePolicy:
        arguments = dict(self.__pydantic_extra__ or {})
        if building.is_class(self.target, BatchSizePolicy, path):
            own = {"every": self.every, "planned": self.planned}
            arguments |= {name: value for name, value in own.items() if value is not None}
            policy: BatchSizePolicy = building.made(Target(target=self.target, **arguments), path)
            return policy
        function = building.function(Target(target=self.target, **arguments), path)
        return SizeFunction(function, every=self.every, planned=self.planned is not False)


class IncreasedSizes(Sizes):
    """A function of yours that is asked once an epoch: `function(epoch, current) -> increment`."""

    increase: Target
    """The function."""
    start: Count
    """The size that its first call sees."""
    max_batch_size: CountOrAuto
    """An increment that leads beyond this is not applied; `auto`: beyond what fits into memory in
    a single pass on each rank."""

    def _sizes(self, building: Building, path: Path) -> BatchSizePolicy:
        function = building.function(self.increase, (*path, "increase"))
        return IncreaseFunction(function, self.start, self.max_batch_size)
