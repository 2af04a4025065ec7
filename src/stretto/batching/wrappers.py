"""Policies that change the sizes of another one: bounds, rounding, monotone growth."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias, final

from stretto.batching.bound_wrappers import BoundMap, BoundMonotone
from stretto.batching.parse import as_policy
from stretto.batching.policy import BatchSizePolicy, BoundPolicy, Size, checked_size
from stretto.batching.written import WRAPPERS, written
from stretto.errors import Argument, BatchSizeError
from stretto.schedules.fields import Check, check_fields, fill, one_of
from stretto.timing import Horizon

Rounding: TypeAlias = Annotated[
    Literal["down", "up"],
    Check(lambda value, name, error: one_of(value, name, ("down", "up"), error)),
]
"""The direction of rounding."""
LARGE = 1 << 60
"""Above any batch size."""


def checked_policy(policy: object) -> BatchSizePolicy:
    """Return the policy inside a wrapper, from a policy or its written form.

    Raises:
        BatchSizeError: it is neither, or a schedule depends on its sizes.
    """
    inner = as_policy(policy)
    if inner.is_coupled:
        raise BatchSizeError.cannot(
            f"change the sizes of {inner!r}",
            why="the learning rate goes by them, and would not know",
            instead="give the pair a maximum, multiple_of, or other sizes: "
            "Seesaw(schedule, 16, maximum=256, multiple_of=8)",
        )
    return inner


Inner: TypeAlias = Annotated[BatchSizePolicy, Check(lambda value, *_: checked_policy(value))]
"""A field that is the policy inside a wrapper."""


@dataclass(frozen=True, slots=True, repr=False)
class Wrapper(BatchSizePolicy):
    """A policy around another one; it has the same times."""

    policy: Inner

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return the warnings of the policy inside."""
        return self.policy.warnings(horizon, largest)

    def wrapped(self, size: int) -> int:
        """Return what this wrapper makes of a single `size`; by default, `size`."""
        return self.rounded_inside(size)

    @final
    def rounded_inside(self, size: int) -> int:
        """Return what the wrappers inside this one make of `size`."""
        return self.policy.wrapped(size) if isinstance(self.policy, Wrapper) else size


@dataclass(frozen=True, slots=True, repr=False)
class SizeMap(Wrapper):
    """A wrapper that maps each size to another; it has no state."""

    @final
    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Bind the policy inside."""
        return BoundMap(self.policy.bind(horizon), self.changed)

    @final
    def wrapped(self, size: int) -> int:
        """Return what the wrappers inside, then this one, make of `size`."""
        return self.changed(self.rounded_inside(size))

    @abstractmethod
    def changed(self, size: int) -> int:
        """Return the new size; the function must be monotone."""


@dataclass(frozen=True, slots=True, repr=False)
class _Bound(SizeMap):
    """A bound of sizes."""

    size: Size
    key: ClassVar[str]
    beyond: ClassVar[int]
    """A size that the bound changes, whatever the bound is."""

    def __post_init__(self) -> None:
        check_fields(self)
        inside, beyond = self.rounded_inside(self.size), self.rounded_inside(self.beyond)
        if inside != self.size and self.changed(beyond) != beyond:
            written = Argument(self.key, self.size, f"{type(self).__name__}(policy, {self.size})")
            raise BatchSizeError.cannot(
                ("bound batch sizes by ", written),
                why=f"the rounding and bounds inside turn {self.size} into {inside}",
                instead=f"write {inside}",
            )


@written(WRAPPERS, "at_most", "size")
@final
@dataclass(frozen=True, slots=True, repr=False)
class AtMost(_Bound):
    """Never more than `size`.

    >>> from stretto.batching import LinearRamp
    >>> AtMost(LinearRamp(8, 1024, "1ep"), 512).size
    512

    Raises:
        BatchSizeError: the size is not an integer of at least 1, or not one that the rounding and
            the bounds inside allow.
    """

    key = "at_most"
    beyond = LARGE

    def changed(self, size: int) -> int:
        """Return the smaller of the two."""
        return min(size, self.size)


@written(WRAPPERS, "at_least", "size")
@final
@dataclass(frozen=True, slots=True, repr=False)
class AtLeast(_Bound):
    """Never less than `size`.

    >>> from stretto.batching import LinearRamp
    >>> AtLeast(LinearRamp(8, 1024, "1ep"), 32).size
    32

    Raises:
        BatchSizeError: the size is not an integer of at least 1, or not one that the rounding and
            the bounds inside allow.
    """

    key = "at_least"
    beyond = 1

    def changed(self, size: int) -> int:
        """Return the larger of the two."""
        return max(size, self.size)


@written(WRAPPERS, "multiple_of", "factor")
@final
@dataclass(frozen=True, slots=True, repr=False)
class MultipleOf(SizeMap):
    """Rounds to multiples of `factor`, at least one; down by default, or up.

    With `factor = world_size * micro_batch_size` every rank always runs full micro-batches.

    The result may exceed the `maximum` of the policy inside (up) or fall below its `minimum`
    (down). For bounds that always hold, wrap it; they must be multiples themselves:

    >>> from stretto.batching import NoiseScale
    >>> MultipleOf(NoiseScale(8, 100), 32, "up").bind(Horizon("1ep")).bounds
    (32, 128)
    >>> AtMost(MultipleOf(NoiseScale(8, 100), 32, "up"), 96).bind(Horizon("1ep")).bounds
    (32, 96)

    >>> from stretto.batching import Fixed, Signals
    >>> from stretto.timing import Timestamp
    >>> bound = MultipleOf(Fixed(100), 64).bind(Horizon("1ep"))
    >>> bound.decide(Timestamp(), bound.start(), Signals())[0]
    64

    Raises:
        BatchSizeError: the factor is not an integer of at least 1.
    """

    factor: int
    rounding: Rounding = "down"

    def __post_init__(self) -> None:
        check_fields(self)
        fill(self, factor=checked_size(self.factor, "a factor of batch sizes"))
        inside = self.policy
        while isinstance(inside, Wrapper):
            if isinstance(inside, PowerOfTwo) and self.factor & (self.factor - 1):
                raise BatchSizeError.cannot(
                    f"round powers of two to multiples of {self.factor}",
                    why=f"no multiple of {self.factor} is a power of two",
                    instead="keep one of the two",
                )
            inside = inside.policy

    def changed(self, size: int) -> int:
        """Return the nearest multiple that way."""
        add = self.factor - 1 if self.rounding == "up" else 0
        return max(1, (size + add) // self.factor) * self.factor


@written(WRAPPERS, "power_of_two", "rounding")
@final
@dataclass(frozen=True, slots=True, repr=False)
class PowerOfTwo(SizeMap):
    """Rounds to powers of two; down by default, or up.

    The result may exceed the `maximum` of the policy inside (up) or fall below its `minimum`
    (down). For bounds that always hold, wrap it; they must be powers themselves:

    >>> from stretto.batching import NoiseScale
    >>> AtMost(PowerOfTwo(NoiseScale(8, 100), "up"), 64).bind(Horizon("1ep")).bounds
    (8, 64)

    >>> from stretto.batching import Fixed, Signals
    >>> from stretto.timing import Timestamp
    >>> bound = PowerOfTwo(Fixed(100)).bind(Horizon("1ep"))
    >>> bound.decide(Timestamp(), bound.start(), Signals())[0]
    64
    """

    rounding: Rounding = "down"

    def changed(self, size: int) -> int:
        """Return the nearest power that way."""
        below = 1 if self.rounding == "up" else 0
        return 1 << (size - below).bit_length() - 1 + below


@written(WRAPPERS, "monotone")
@final
@dataclass(frozen=True, slots=True, repr=False)
class Monotone(Wrapper):
    """Never shrinks: the largest size decided so far.

    >>> from stretto.batching import Signals, Steps
    >>> from stretto.timing import Timestamp
    >>> bound = Monotone(Steps("0ba:8 1ba:4")).bind(Horizon("9ba"))
    >>> _, state = bound.decide(Timestamp(), bound.start(), Signals())
    >>> bound.decide(Timestamp(batch=1), state, Signals())[0]
    8
    """

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Bind the policy inside."""
        return BoundMonotone(self.policy.bind(horizon))
