"""Fit a memory curve to recordings of a few small steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from stretto.errors import FitError
from stretto.memory.prediction.curve import FittedAllocation, MemoryCurve
from stretto.memory.prediction.recording import Recording

TOLERANCE = Fraction(1, 100)
"""Allowed error of the peak if recordings do not have the same allocations."""


def fit(recordings: Sequence[Recording], *, noise: Fraction = Fraction(0)) -> MemoryCurve:
    """Return the curve through recordings of the same step at different sizes.

    Each allocation is fitted separately, then they are summed. Fitting the peaks would be wrong,
    because the moment of the peak changes with the size.

    If the recordings do not have the same allocations (a kernel may choose another algorithm for
    another size), allocations are matched by their origin. An allocation that only the largest
    recording has counts as constant.

    >>> from stretto.memory.prediction.recording import Allocation, Event, Place
    >>> def recording(size):
    ...     place = Place("forward", "")
    ...     both = [Allocation(100, place, "parameters"), Allocation(10 * size, place, "batch")]
    ...     return Recording(size, both, [Event(0, False, place), Event(1, False, place)])
    >>> fit([recording(2), recording(3)]).peak(50)
    600

    Args:
        recordings: two or more sizes; one more than the degree of the polynomials.
        noise: how far, as a fraction, an allocation may deviate from a straight line and still be
            fitted by one. Real kernels round their allocations, and a parabola through rounded
            numbers extrapolates badly: an LSTM recorded at 2, 3 and 5 samples was 5.8 percent off
            at 40; with a straight line, 0.3 percent.

    Raises:
        FitError: the recordings differ too much.
    """
    ordered = sorted(recordings, key=lambda recording: recording.size)
    model = ordered[-1]
    are_alike = all(_shape(other) == _shape(model) for other in ordered)
    if are_alike:
        columns = [[one.bytes for one in recording.allocations] for recording in ordered]
    else:
        columns = [_bytes_like(model, recording) for recording in ordered]
    sizes = tuple(recording.size for recording in ordered)
    allocations = [
        FittedAllocation(_straight(sizes, [column[index] for column in columns], noise), *one[1:4])
        for index, one in enumerate(model.allocations)
    ]
    curve = MemoryCurve(sizes, allocations, model.events)
    allowed = max(TOLERANCE, noise)
    for recording in () if are_alike else ordered:
        if abs(curve.peak(recording.size) - recording.peak) > allowed * recording.peak:
            raise _too_different(recording, model)
    return curve


def settled(first: Recording, steady: Recording) -> Recording | None:
    """Return the first step as it would be with existing optimizer state.

    Allocations before the update come from `first`, all others from `steady`, because the update
    does not depend on the batch. None if the two differ before the update.
    """
    given, wanted = _before_update(first), _before_update(steady)
    origins = [
        [recording.allocations[i][1:] for i in indices]
        for recording, indices in ((first, given), (steady, wanted))
    ]
    if origins[0] != origins[1]:
        return None
    allocations = list(steady.allocations)
    for source, target in zip(given, wanted, strict=True):
        allocations[target] = first.allocations[source]
    return Recording(first.size, allocations, steady.events)


def _before_update(recording: Recording) -> list[int]:
    return [
        index
        for index, one in enumerate(recording.allocations)
        if one.place.phase != "optimizer" and one.category != "optimizer"
    ]


def _straight(
    sizes: Sequence[int], counts: Sequence[int], noise: Fraction
) -> tuple[int | Fraction, ...]:
    """Return points on the line from the first to the last count, if all are near it."""
    if noise == 0 or len(sizes) < 3:
        return tuple(counts)
    slope = Fraction(counts[-1] - counts[0], sizes[-1] - sizes[0])
    line = [counts[0] + slope * (size - sizes[0]) for size in sizes]
    is_near = all(abs(a - b) <= noise * b for a, b in zip(line, counts, strict=True))
    return tuple(line if is_near else counts)


def _shape(recording: Recording) -> list[tuple[int, bool]]:
    return [(event.allocation, event.is_free) for event in recording.events]


def _bytes_like(model: Recording, recording: Recording) -> list[int]:
    """Return the bytes of a recording, matched to the allocations of `model`."""
    known = dict(zip(_keys(recording), recording.allocations, strict=True))
    return [
        known.get(key, one).bytes for key, one in zip(_keys(model), model.allocations, strict=True)
    ]


def _keys(recording: Recording) -> list[tuple[Any, ...]]:
    """Return keys of allocations: their origin, and a counter among the same origin."""
    before: Counter[tuple[Any, ...]] = Counter()
    keys = []
    for one in recording.allocations:
        origin = (one.place, one.source)
        keys.append((*origin, before[origin]))
        before[origin] += 1
    return keys


def _too_different(recording: Recording, model: Recording) -> FitError:
    pairs = zip(recording.events, model.events, strict=False)
    place = next((a.place for a, b in pairs if a[:2] != b[:2]), model.events[-1].place)
    where = f" of {place.module}" if place.module else ""
    return FitError.cannot(
        f"fit the memory of batches of {recording.size} and {model.size} samples",
        why="the step does not allocate alike for both: the first difference is in the "
        f"{place.phase}{where}",
        instead="try real steps of each size instead",
    )
