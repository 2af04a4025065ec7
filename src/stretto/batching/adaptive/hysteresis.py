"""`Hysteresis`: a size that moves only when it matters, and not too often."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import cast, final

from stretto.batching.bound_wrappers import BoundWrapper
from stretto.batching.policy import (
    BoundPolicy,
    Hold,
    PolicyState,
    inner_state,
)
from stretto.batching.signals import Signals
from stretto.batching.wrappers import Wrapper
from stretto.batching.written import WRAPPERS, written
from stretto.errors import BatchSizeError, TimeError, shown
from stretto.schedules.fields import Interval, check_fields, fill
from stretto.timing import Axis, Horizon, Time, Timestamp, TimeUnit
from stretto.timing.number import exact
from stretto.timing.time import Number


@written(WRAPPERS, "hysteresis", "ratio")
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

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Bind the policy inside, and resolve `wait`."""
        inner, ratio = self.policy.bind(horizon), exact(self.ratio)
        if self.wait is None:
            return BoundHysteresis(inner, ratio, None, 0)
        wait = Time(self.wait)
        axis = horizon.axis(wait.unit)
        return BoundHysteresis(inner, ratio, axis, math.ceil(horizon.ticks(wait, axis)))


@final
@dataclass(frozen=True, slots=True)
class BoundHysteresis(BoundWrapper):
    """Hysteresis on one run; remembers the size and when it last changed."""

    ratio: Fraction
    axis: Axis | None
    wait_ticks: int

    @property
    def is_static(self) -> bool:
        """Whether the policy inside is, and `wait` is not wall time."""
        reads_wall = self.axis is not None and self.axis.unit is TimeUnit.SECOND
        return self.inner.is_static and not reads_wall

    @property
    def units(self) -> frozenset[TimeUnit]:
        """The units of the policy inside, and that of `wait`."""
        return self.inner.units | ({self.axis.unit} if self.axis else set())

    def start(self) -> PolicyState:
        """Return the state before any size."""
        return {"size": None, "changed": None, "inner": self.inner.start()}

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
