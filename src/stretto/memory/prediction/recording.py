"""What one step allocated and freed, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

Category = Literal[
    "parameters",
    "buffers",
    "optimizer",
    "gradients",
    "batch",
    "activations",  # of the forward, kept for the backward
    "temporaries",
    "other",  # there before the step, and none of these: a teacher that the loss function holds
]


class Place(NamedTuple):
    """Where in a step something happened."""

    phase: str
    """`before` (what the step finds), `forward`, `backward` or `optimizer`."""
    module: str
    """The path of the module that was running; empty outside of all modules."""


class Allocation(NamedTuple):
    """One piece of memory."""

    bytes: int
    place: Place
    """Where it was allocated."""
    category: Category
    source: str = ""
    """The operation that allocated it, where that is known."""


class Event(NamedTuple):
    """A change of what is allocated."""

    allocation: int
    """Which one, by its place in the list of allocations."""
    is_free: bool
    place: Place
    """Where the step was when it happened."""


@final
@dataclass(frozen=True, slots=True)
class Recording:
    """All allocations of one step at one size, those that it finds included."""

    size: int
    """Samples of the micro-batch."""
    allocations: Sequence[Allocation]
    events: Sequence[Event]

    def live(self) -> list[int]:
        """Return the bytes that are allocated after each event."""
        result, total = [], 0
        for event in self.events:
            size = self.allocations[event.allocation].bytes
            total += -size if event.is_free else size
            result.append(total)
        return result

    @property
    def peak(self) -> int:
        """The most bytes that are allocated at once."""
        return max(self.live(), default=0)
