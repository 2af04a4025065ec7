"""Policies that change the sizes of another policy."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, TypeAlias, cast, final

from stretto.batching.policy import (
    NO_SIGNALS,
    BatchSizePolicy,
    Bound,
    Hold,
    PolicyState,
    Signals,
    Size,
    checked_size,
    inner_state,
    wrapped,
)
from stretto.batching.steps import as_policy
from stretto.errors import Argument, BatchSizeError, TimeError, shown
from stretto.schedules.fields import Check, Interval, check_fields, fill, one_of
from stretto.timing import Axis, Horizon, Time, Timestamp, TimeUnit
from stretto.timing.grammar import exact
from stretto.timing.time import Number

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
    def bind(self, horizon: Horizon) -> Bound:
        """Bind the policy inside."""
        inner = self.policy.bind(horizon)

        def decide(
            timestamp: Timestamp, state: PolicyState, signals: Signals
        ) -> tuple[int, PolicyState]:
            size, state = inner.decide(timestamp, state, signals)
            return self.changed(size), state

        ends = inner.bounds
        bounds = None if ends is None else (self.changed(ends[0]), self.changed(ends[1]))
        return replace(inner, decide=decide, bounds=bounds)

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
    >>> bound.decide(Timestamp(), bound.start, Signals())[0]
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
    >>> bound.decide(Timestamp(), bound.start, Signals())[0]
    64
    """

    rounding: Rounding = "down"

    def changed(self, size: int) -> int:
        """Return the nearest power that way."""
        below = 1 if self.rounding == "up" else 0
        return 1 << (size - below).bit_length() - 1 + below


@final
@dataclass(frozen=True, slots=True, repr=False)
class Monotone(Wrapper):
    """Never shrinks: the largest size decided so far.

    >>> from stretto.batching import Signals, Steps
    >>> from stretto.timing import Timestamp
    >>> bound = Monotone(Steps("0ba:8 1ba:4")).bind(Horizon("9ba"))
    >>> _, state = bound.decide(Timestamp(), bound.start, Signals())
    >>> bound.decide(Timestamp(batch=1), state, Signals())[0]
    8
    """

    def bind(self, horizon: Horizon) -> Bound:
        """Bind the policy inside."""
        inner = self.policy.bind(horizon)

        def decide(
            timestamp: Timestamp, state: PolicyState, signals: Signals
        ) -> tuple[int, PolicyState]:
            size, within = inner.decide(timestamp, inner_state(state), signals)
            largest = max(size, cast("int | None", state["largest"]) or size)
            return largest, {"largest": largest, "inner": within}

        bounds = inner.bounds
        if bounds is not None:
            first, _ = inner.decide(Timestamp(), inner.start, NO_SIGNALS)
            bounds = first, bounds[1]
        return wrapped(inner, {"largest": None}, decide=decide, bounds=bounds)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Hysteresis(Wrapper):
    """Moves only when the size wanted is at least `ratio` times larger or smaller than the size.

    From a size B it moves to B' when `B' >= ratio * B` or `B' <= B / ratio`, and only when `wait`
    has passed since it last moved. Sizes in between are not reached: what the policy inside wants
    is either taken whole or not at all.

    >>> from stretto.batching import LinearRamp
    >>> Hysteresis(LinearRamp(8, 64, "1ep"), 1.5, wait="5%")
    Hysteresis(LinearRamp(8, 64, '1ep'), 1.5, wait='0.05dur')

    Args:
        policy: what the size follows.
        ratio: how far the two must be apart, above 1.
        wait: the least time between two changes; left out, none.

    Raises:
        BatchSizeError: the ratio is not a finite number above 1, or `wait` has no length.
    """

    ratio: Number
    wait: Interval | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        fill(self, ratio=_ratio(self.ratio))

    def bind(self, horizon: Horizon) -> Bound:
        """Bind the policy inside, and resolve `wait`."""
        inner, ratio = self.policy.bind(horizon), exact(self.ratio)
        if self.wait is None:
            return HysteresisRun(inner, ratio, None, 0).bound
        wait = Time(self.wait)
        axis = horizon.axis(wait.unit)
        return HysteresisRun(inner, ratio, axis, math.ceil(horizon.ticks(wait, axis))).bound


@final
@dataclass(frozen=True, slots=True)
class HysteresisRun:
    """Hysteresis on one run; remembers the size and when it last changed."""

    inner: Bound
    ratio: Fraction
    axis: Axis | None
    wait_ticks: int

    @property
    def bound(self) -> Bound:
        """The policy."""
        units = frozenset({self.axis.unit} if self.axis else ())
        return wrapped(
            self.inner,
            {"size": None, "changed": None},
            decide=self.decide,
            holds_until=self.holds_until,
            is_static=self.inner.is_static and TimeUnit.SECOND not in units,
            units=self.inner.units | units,
        )

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Return the size kept, or the one wanted where it is far enough away."""
        wanted, inner = self.inner.decide(timestamp, inner_state(state), signals)
        size = cast("int | None", state["size"])
        if size is None:
            return wanted, {"size": wanted, "changed": None, "inner": inner}
        tick = timestamp_tick(self.axis, timestamp)
        is_far = wanted >= size * self.ratio or wanted * self.ratio <= size
        if not is_far or tick < self._free(state):
            return size, {**state, "inner": inner}
        return wanted, {"size": wanted, "changed": tick, "inner": inner}

    def holds_until(self, timestamp: Timestamp, state: PolicyState) -> Hold | None:
        """Return the hold of the policy inside, ended earlier where only `wait` stops a change."""
        inner = inner_state(state)
        hold = self.inner.holds_until(timestamp, inner)
        free = self._free(state)
        if hold is None or self.axis is None or timestamp_tick(self.axis, timestamp) >= free:
            return hold
        return hold & Hold(((self.axis, free),))

    def _free(self, state: PolicyState) -> int:
        """The tick from which the size may change again."""
        changed = cast("int | None", state["changed"])
        return 0 if changed is None else changed + self.wait_ticks


def timestamp_tick(axis: Axis | None, timestamp: Timestamp) -> int:
    """Return what `axis` reads, or 0 where there is none: no wait, always free."""
    return 0 if axis is None else axis.read(timestamp)


def _ratio(ratio: object) -> Number:
    try:
        factor = exact(ratio)
    except TimeError:
        factor = Fraction(0)
    if factor <= 1:
        raise BatchSizeError.cannot(
            f"move the batch size when it is {shown(ratio)} times as large",
            why="it is not a finite number above 1",
            instead="write a ratio such as 1.25",
        )
    return float(factor) if exact(float(factor)) == factor else factor
