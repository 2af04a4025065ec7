"""The allocations of one step, in order."""

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
    "activations",  # of the forward pass, saved for the backward pass
    "temporaries",
    "workspaces",  # of cuBLAS, kept from their first use on
    "other",  # other memory from before the step, such as a teacher in the loss function
]


class Place(NamedTuple):
    """A place in a step: the phase and the module."""

    phase: str
    """`before` (static memory), `forward`, `backward` or `optimizer`."""
    module: str
    """The path of the running module; empty outside of all modules."""


class Allocation(NamedTuple):
    """One allocated block of memory."""

    bytes: int
    place: Place
    """Where it was allocated."""
    category: Category
    source: str = ""
    """The operation that allocated it, if known."""
    stream: int = 0
    """The stream that it belongs to; 0 is the default stream."""


class Event(NamedTuple):
    """An allocation or a free."""

    allocation: int
    """Index into the list of allocations."""
    is_free: bool
    place: Place
    """Where in the step it happened."""


@final
@dataclass(frozen=True, slots=True)
class Recording:
    """All allocations of one step at one size, static memory included."""

    size: int
    """Samples of the micro-batch."""
    allocations: Sequence[Allocation]
    events: Sequence[Event]

    def live(self) -> list[int]:
        """Return the allocated bytes after each event."""
        result, total = [], 0
        for event in self.events:
            size = self.allocations[event.allocation].bytes
            total += -size if event.is_free else size
            result.append(total)
        return result

    @property
    def peak(self) -> int:
        """The peak of allocated bytes."""
        return max(self.live(), default=0)
