"""Wrappers on one run: what another bound policy decides, changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, final

from stretto.batching.policy import BoundPolicy, Hold, PolicyState, inner_state
from stretto.batching.signals import NO_SIGNALS, Signals
from stretto.timing import Timestamp, TimeUnit


@dataclass(frozen=True, slots=True)
class BoundWrapper(BoundPolicy):
    """A bound policy around another one; it reads the same signals."""

    inner: BoundPolicy

    @property
    def is_static(self) -> bool:
        """Whether the policy inside is."""
        return self.inner.is_static

    @property
    def units(self) -> frozenset[TimeUnit]:
        """The units of the policy inside."""
        return self.inner.units

    @property
    def reads(self) -> frozenset[str]:
        """The signals of the policy inside."""
        return self.inner.reads

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The bounds of the policy inside, whose sizes it takes over."""
        return self.inner.bounds

    def inside(self, state: PolicyState) -> tuple[BoundPolicy, PolicyState]:
        """Return the policy inside and its part of the state."""
        return self.inner, inner_state(state)

    def accepts(self, state: PolicyState) -> bool:
        """Return whether the state fits this policy and the one inside."""
        return set(state) == set(self.start()) and self.inner.accepts(inner_state(state))

    def holds_until(self, timestamp: Timestamp, state: PolicyState) -> Hold | None:
        """Return the hold of the policy inside."""
        inner, within = self.inside(state)
        return inner.holds_until(timestamp, within)


@final
@dataclass(frozen=True, slots=True)
class BoundMap(BoundWrapper):
    """A bound policy whose sizes go through a function."""

    function: Callable[[int], int]

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The bounds of the policy inside, changed."""
        inner = self.inner.bounds
        return None if inner is None else (self.function(inner[0]), self.function(inner[1]))

    def start(self) -> PolicyState:
        """Return the state of the policy inside."""
        return self.inner.start()

    def accepts(self, state: PolicyState) -> bool:
        """Return whether the policy inside accepts the state."""
        return self.inner.accepts(state)

    def inside(self, state: PolicyState) -> tuple[BoundPolicy, PolicyState]:
        """Return the policy inside and this state, which it shares."""
        return self.inner, state

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Return the size of the policy inside, changed."""
        size, state = self.inner.decide(timestamp, state, signals)
        return self.function(size), state


@final
@dataclass(frozen=True, slots=True)
class BoundMonotone(BoundWrapper):
    """A bound policy that never shrinks; its state is the largest size so far."""

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The first size, and the largest of the policy inside."""
        if self.inner.bounds is None:
            return None
        first, _ = self.inner.decide(Timestamp(), self.inner.start(), NO_SIGNALS)
        return first, self.inner.bounds[1]

    def start(self) -> PolicyState:
        """Return the state before any size."""
        return {"largest": None, "inner": self.inner.start()}

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Return the larger of what is decided now and what was before."""
        size, inner = self.inner.decide(timestamp, inner_state(state), signals)
        largest = max(size, cast("int | None", state["largest"]) or size)
        return largest, {"largest": largest, "inner": inner}
