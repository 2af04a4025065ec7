"""Policies that change the sizes of another policy."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, final

from stretto.batching.policy import (
    ABOVE_1,
    NO_SIGNALS,
    BatchSizePolicy,
    Bound,
    Decision,
    Hold,
    PolicyState,
    PositiveInt,
    Signals,
    Size,
    SizePart,
    Tokens,
    in_unit_of,
    sizes_in,
    wrapped,
)
from stretto.batching.steps import as_policy
from stretto.errors import BatchSizeError, StrettoError, samples_text
from stretto.schedules.fields import Check, Interval
from stretto.timing import Horizon, Time, Timestamp, TimeUnit
from stretto.timing.grammar import exact
from stretto.timing.time import Number

_FEW = 4
"""Sizes that a warning lists."""
Rounding: TypeAlias = Literal["down", "up"]
"""The direction of rounding."""


Inner: TypeAlias = Annotated[BatchSizePolicy, Check(lambda value, *_: as_policy(value))]
"""A field that is the policy inside a wrapper."""


@dataclass(frozen=True, slots=True, repr=False)
class Wrapper(BatchSizePolicy):
    """A policy around another one; it has the same times."""

    policy: Inner

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return the warnings of the policy inside."""
        return self.policy.warnings(horizon, largest)

    def mapped(self, size: int) -> int:
        """Return what this wrapper and those inside make of `size`; by default, those inside."""
        return self.policy.mapped(size) if isinstance(self.policy, Wrapper) else size


@dataclass(frozen=True, slots=True, repr=False)
class SizeMap(Wrapper):
    """A wrapper that maps each size to another; it has no state."""

    @final
    def bind(self, horizon: Horizon) -> Bound:
        """Bind the policy inside."""
        inner = self.policy.bind(horizon)

        def decide(timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
            size, state = inner.decide(timestamp, state, signals)
            return self.changed(size), state

        ends = inner.bounds
        bounds = None if ends is None else (self.changed(ends[0]), self.changed(ends[1]))
        return replace(inner, decide=decide, bounds=bounds)

    @final
    def end_size(self) -> int | None:
        """Return what becomes of the last size of the policy inside."""
        size = self.policy.end_size()
        return None if size is None else self.changed(size)

    @final
    def mapped(self, size: int) -> int:
        """Return what the wrappers inside, then this one, make of `size`."""
        return self.changed(Wrapper.mapped(self, size))

    @abstractmethod
    def changed(self, size: int) -> int:
        """Return the new size; the function must be monotone."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class InSamples(SizeMap):
    """The sizes of a policy in tokens as samples of `each` tokens: the most that they hold.

    It decides in tokens and rounds down last, so ramps and factors lose nothing on the way.

    >>> bound = InSamples(as_policy("64Ktok"), 4096).bind(Horizon("1ep"))
    >>> bound.decide(Timestamp(), bound.start, NO_SIGNALS)[0], bound.bounds
    (15, (15, 15))
    """

    each: PositiveInt

    @property
    def unit(self) -> TimeUnit:
        """Samples."""
        return TimeUnit.SAMPLE

    def changed(self, size: int) -> int:
        """Return the most samples with so many tokens.

        Raises:
            BatchSizeError: it is less than one.
        """
        if size < self.each:
            raise BatchSizeError.cannot(
                f"take batches of {Tokens(size)}",
                why=f"that is less than one sample of {self.each:,} tokens",
                instead=f"write '{Tokens(self.each)}' or more",
            )
        return size // self.each

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return the warnings of the policy inside."""
        return self.policy.warnings(horizon, largest * self.each)


def rounding(policy: BatchSizePolicy, each: int) -> str | None:
    """Return which sizes in tokens are no whole samples of `each`, and what becomes of them.

    >>> rounding(as_policy("64Ktok"), 4096)
    'sizes are rounded down to whole samples of 4,096 tokens: 64Ktok is 15 samples'
    """
    odd = [size for size in dict.fromkeys(_tokens_in(policy)) if size % each]
    texts = [f"{size} is {samples_text(size // each)}" for size in odd[:_FEW]]
    more = f", and {len(odd) - _FEW} more" if len(odd) > _FEW else ""
    line = f"sizes are rounded down to whole samples of {each:,} tokens: "
    return line + ", ".join(texts) + more if odd else None


def _tokens_in(policy: BatchSizePolicy) -> Iterator[Tokens]:
    for size in sizes_in(policy, parts=False):
        if isinstance(size, Tokens):
            yield size
        elif isinstance(size, BatchSizePolicy):
            yield from _tokens_in(size)


@dataclass(frozen=True, slots=True, repr=False)
class _Bound(SizeMap):
    """A bound of sizes."""

    size: Size
    beyond: ClassVar[int]
    """A size that the bound changes, whatever the bound is."""

    def __post_init__(self) -> None:
        BatchSizePolicy.__post_init__(self)
        inside, beyond = Wrapper.mapped(self, self.size), Wrapper.mapped(self, self.beyond)
        if inside != self.size and self.changed(beyond) != beyond:
            inside = in_unit_of(self.size, inside)
            why = f"the rounding and bounds inside turn it into {inside}"
            raise BatchSizeError.bad("size", self.size, why, f"write {inside}")


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

    beyond = 1 << 60

    def changed(self, size: int) -> int:
        """Return the smaller of the two."""
        return int(min(size, self.size))


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

    beyond = 1

    def changed(self, size: int) -> int:
        """Return the larger of the two."""
        return int(max(size, self.size))


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

    factor: SizePart
    rounding: Rounding = "down"

    def __post_init__(self) -> None:
        BatchSizePolicy.__post_init__(self)
        inside = self.policy
        while isinstance(inside, Wrapper):
            if isinstance(inside, PowerOfTwo) and self.factor & (self.factor - 1):
                why = "no multiple of it is a power of two, to which the sizes inside are rounded"
                raise BatchSizeError.bad("factor", self.factor, why, "keep one of the two")
            inside = inside.policy

    def changed(self, size: int) -> int:
        """Return the nearest multiple that way."""
        add = self.factor - 1 if self.rounding == "up" else 0
        return int(max(1, (size + add) // self.factor) * self.factor)


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

    >>> from stretto.batching import Signals, PiecewiseConstant
    >>> from stretto.timing import Timestamp
    >>> bound = Monotone(PiecewiseConstant("0ba:8 1ba:4")).bind(Horizon("9ba"))
    >>> _, state = bound.decide(Timestamp(), bound.start, Signals())
    >>> bound.decide(Timestamp(batch=1), state, Signals())[0]
    8
    """

    def bind(self, horizon: Horizon) -> Bound:
        """Bind the policy inside."""
        inner = self.policy.bind(horizon)

        def decide(timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
            size, within = inner.decide(timestamp, state["inner"], signals)
            largest = max(size, state["largest"] or size)
            return largest, {"largest": largest, "inner": within}

        bounds = inner.bounds
        if bounds is not None:
            first, _ = inner.decide(Timestamp(), inner.start, NO_SIGNALS)
            bounds = first, bounds[1]
        return wrapped(inner, {"largest": None}, decide=decide, bounds=bounds)


def _ratio(value: Any, name: str, error: type[StrettoError]) -> Number:
    factor: Any = ABOVE_1.converted(value, name, error)
    return factor if exact(factor) == exact(value) else exact(value)


Ratio: TypeAlias = Annotated[Number, Check(_ratio)]


@final
@dataclass(frozen=True, slots=True, repr=False)
class Hysteresis(Wrapper):
    """Moves only when the wanted size is at least `ratio` times larger or smaller.

    From a size B it moves to B' when `B' >= ratio * B` or `B' <= B / ratio`, and only when `wait`
    has passed since it last moved. It never moves part of the way.

    >>> from stretto.batching import LinearRamp
    >>> Hysteresis(LinearRamp(8, 64, "1ep"), 1.5, wait="5%")
    Hysteresis(LinearRamp(8, 64, '1ep'), 1.5, wait='0.05dur')

    Args:
        policy: the policy that the size follows.
        ratio: how far the two must be apart, above 1.
        wait: the least time between two changes; by default, none.

    Raises:
        BatchSizeError: the ratio is not a finite number above 1, or `wait` has no length.
    """

    ratio: Ratio
    wait: Interval | None = field(default=None, kw_only=True)

    def bind(self, horizon: Horizon) -> Bound:
        """Bind the policy inside; remember the size and when it last changed."""
        inner, ratio = self.policy.bind(horizon), exact(self.ratio)
        axis = None if self.wait is None else horizon.axis(Time(self.wait).unit)
        wait = 0
        if self.wait is not None and axis is not None:
            wait = math.ceil(horizon.ticks(Time(self.wait), axis))

        def read(timestamp: Timestamp) -> int:
            return 0 if axis is None else axis.read(timestamp)

        def free(state: PolicyState) -> int:
            """Return the tick from which the size may change again."""
            changed = state["changed"]
            return 0 if changed is None else changed + wait

        def decide(timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
            wanted, within = inner.decide(timestamp, state["inner"], signals)
            size = state["size"]
            if size is None:
                return wanted, {"size": wanted, "changed": None, "inner": within}
            tick = read(timestamp)
            is_far = wanted >= size * ratio or wanted * ratio <= size
            if not is_far or tick < free(state):
                return size, {**state, "inner": within}
            return wanted, {"size": wanted, "changed": tick, "inner": within}

        def holds_until(timestamp: Timestamp, state: PolicyState) -> Hold | None:
            hold, until = inner.holds_until(timestamp, state["inner"]), free(state)
            # It ends earlier if only `wait` stops a change.
            if hold is None or axis is None or read(timestamp) >= until:
                return hold
            return hold & Hold(((axis, until),))

        units = frozenset({axis.unit} if axis else ())
        return wrapped(
            inner,
            {"size": None, "changed": None},
            decide=decide,
            holds_until=holds_until,
            is_static=inner.is_static and TimeUnit.SECOND not in units,
            units=inner.units | units,
        )
