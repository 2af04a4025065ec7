"""Memory of a step as a function of the batch size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple, final

from stretto.memory.prediction.recording import Category, Event, Place
from stretto.memory.search import CandidateSizes, search


class FittedAllocation(NamedTuple):
    """An allocation that all recordings share, with its bytes at each recorded size."""

    bytes: tuple[int | Fraction, ...]
    place: Place
    category: Category
    source: str


class Peak(NamedTuple):
    """The moment of a step with the most allocated memory."""

    size: int
    bytes: int
    place: Place
    """Where the step is at that moment."""
    by_category: Mapping[Category, int]
    by_module: Mapping[str, int]
    """By the module that allocated it; "" is outside of all modules."""


@final
@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The peak of allocated bytes as a function of the batch size.

    The bytes of each allocation are a polynomial in the size, through its bytes at `sizes`. So the
    live bytes at any moment are a polynomial, too, and the peak is their maximum. The curve is
    convex if no polynomial bends down. It is flat for small sizes, if the weight update needs more
    memory than the batch.
    """

    sizes: tuple[int, ...]
    """The recorded sizes."""
    allocations: Sequence[FittedAllocation]
    events: Sequence[Event]
    _moments: Sequence[tuple[int | Fraction, ...]] = field(init=False, repr=False, compare=False)
    _front: Sequence[tuple[Fraction, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        moments = _sums(self.allocations, self.events, len(self.sizes))
        distinct = list(dict.fromkeys(moments))
        object.__setattr__(self, "_moments", moments)
        object.__setattr__(self, "_front", _front([newton(self.sizes, m) for m in distinct]))

    def peak(self, size: int) -> int:
        """Return the peak of allocated bytes for a batch of that size."""
        if size < max(self.sizes):
            # The front is only valid above the recorded sizes.
            return max(evaluate(self.sizes, newton(self.sizes, m), size) for m in self._moments)
        return max(evaluate(self.sizes, coefficients, size) for coefficients in self._front)

    def at(self, size: int) -> Peak:
        """Return the moment of the peak: its bytes, its place, and its allocations."""
        totals = [evaluate(self.sizes, newton(self.sizes, m), size) for m in self._moments]
        when = max(range(len(totals)), key=totals.__getitem__)
        by_category: dict[Category, int] = {}
        by_module: dict[str, int] = {}
        for index in sorted(self._live_after(when)):
            one = self.allocations[index]
            count = evaluate(self.sizes, newton(self.sizes, one.bytes), size)
            by_category[one.category] = by_category.get(one.category, 0) + count
            by_module[one.place.module] = by_module.get(one.place.module, 0) + count
        return Peak(size, totals[when], self.events[when].place, by_category, by_module)

    def bytes_at(self, size: int) -> list[int]:
        """Return the bytes of each allocation for a batch of that size."""
        return [evaluate(self.sizes, newton(self.sizes, a.bytes), size) for a in self.allocations]

    def largest(self, limit: int) -> int | None:
        """Return the largest size whose peak is at most `limit` bytes.

        None if not even one sample fits.
        """

        def fits(size: int) -> bool:
            return self.peak(size) <= limit

        return search(fits, CandidateSizes()).size if fits(1) else None

    def _live_after(self, when: int) -> set[int]:
        live: set[int] = set()
        for event in itertools.islice(self.events, when + 1):
            if event.is_free:
                live.discard(event.allocation)
            else:
                live.add(event.allocation)
        return live


def newton(sizes: Sequence[int], values: Sequence[int | Fraction]) -> tuple[Fraction, ...]:
    """Return the divided differences of `values` at `sizes`: Newton's form of the polynomial.

    >>> newton((2, 3), (20, 30))
    (Fraction(20, 1), Fraction(10, 1))
    """
    column = [Fraction(value) for value in values]
    result = [column[0]]
    for order in range(1, len(sizes)):
        column = [
            (column[i + 1] - column[i]) / (sizes[i + order] - sizes[i])
            for i in range(len(column) - 1)
        ]
        result.append(column[0])
    return tuple(result)


def evaluate(sizes: Sequence[int], coefficients: Sequence[Fraction], size: int) -> int:
    """Return the value at `size` of a polynomial in Newton's form, rounded up.

    >>> evaluate((2, 3), (Fraction(20), Fraction(10)), 7)
    70
    """
    total = Fraction(0)
    for node, coefficient in zip(reversed(sizes), reversed(coefficients), strict=True):
        total = total * (size - node) + coefficient
    return math.ceil(total)


def _sums(
    allocations: Sequence[FittedAllocation], events: Iterable[Event], width: int
) -> list[tuple[int | Fraction, ...]]:
    total: list[int | Fraction] = [0] * width
    result = []
    for event in events:
        sign = -1 if event.is_free else 1
        for column, count in enumerate(allocations[event.allocation].bytes):
            total[column] += sign * count
        result.append(tuple(total))
    return result


def _front(candidates: Iterable[tuple[Fraction, ...]]) -> list[tuple[Fraction, ...]]:
    """Keep polynomials that no other exceeds in every coefficient: only these can be the maximum.

    In Newton's form this is valid at and above the largest recorded size, where all products that
    the coefficients multiply are at least 0.
    """
    kept: list[tuple[Fraction, ...]] = []
    for one in sorted(candidates, reverse=True):
        if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in kept):
            kept.append(one)
    return kept
