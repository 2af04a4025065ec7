"""One curve from recordings of a few small steps."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.errors import FitError, cannot
from stretto.memory.curve import FittedAllocation, MemoryCurve
from stretto.memory.recording import Recording


def fit(recordings: Sequence[Recording]) -> MemoryCurve:
    """Return the curve through recordings of the same step at different sizes.

    Allocations are fitted one by one, and summed after. The peaks themselves would mislead: which
    moment is the peak changes with the size.

    >>> from stretto.memory.recording import Allocation, Event, Place
    >>> def recording(size):
    ...     place = Place("forward", "")
    ...     both = [Allocation(100, place, "parameters"), Allocation(10 * size, place, "batch")]
    ...     return Recording(size, both, [Event(0, False, place), Event(1, False, place)])
    >>> fit([recording(2), recording(3)]).peak(50)
    600

    Args:
        recordings: of two sizes or more; as many as the degree of the polynomials, and one.

    Raises:
        FitError: the steps did not allocate and free in the same order.
    """
    ordered = sorted(recordings, key=lambda recording: recording.size)
    first = ordered[0]
    shape = _shape(first)
    for other in ordered[1:]:
        if _shape(other) != shape:
            raise _different(first, other)
    allocations = [
        FittedAllocation(tuple(r.allocations[index].bytes for r in ordered), *one[1:])
        for index, one in enumerate(first.allocations)
    ]
    return MemoryCurve(tuple(r.size for r in ordered), allocations, first.events)


def _shape(recording: Recording) -> list[tuple[int, bool]]:
    return [(event.allocation, event.is_free) for event in recording.events]


def _different(first: Recording, other: Recording) -> FitError:
    pairs = zip(first.events, other.events, strict=False)
    places = (a.place for a, b in pairs if a[:2] != b[:2])
    place = next(places, first.events[-1].place)
    where = f" in {place.module}" if place.module else ""
    return FitError(
        cannot(
            f"fit the memory of batches of {first.size} and {other.size} samples",
            why="the step does not allocate the same tensors for both: the first difference is "
            f"in the {place.phase}{where}",
            instead="try real steps instead",
        )
    )
