"""Candidate batch sizes; `phantomgpu.searching.bisect` finds the largest of them that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

from stretto.errors import FitError, shown
from stretto.timing.grammar import checked_whole

MAXIMUM = 1 << 24
"""The default largest size."""


class Found(NamedTuple):
    """The result of a search."""

    size: int
    """The largest size that was tried and fits."""
    too_large: int | None
    """The smallest size that was tried and does not fit; None if all tried sizes fit."""


class NothingFitsError(FitError):
    """The smallest candidate does not fit."""


@final
@dataclass(frozen=True, slots=True)
class CandidateSizes:
    """The candidate sizes: multiples of a number or powers of two, between two bounds.

    >>> sizes = CandidateSizes(minimum=5, maximum=40, multiple_of=8)
    >>> sizes.smallest, sizes.at_most(30), sizes.above(30)
    (8, 24, 32)
    >>> CandidateSizes(minimum=5, maximum=40, power_of_two=True).at_most(40)
    32

    Raises:
        FitError: there is no such size, or a bound is not a positive integer.
    """

    minimum: int = 1
    maximum: int = MAXIMUM
    multiple_of: int = 1
    power_of_two: bool = False

    def __post_init__(self) -> None:
        for name in ("minimum", "maximum", "multiple_of"):
            value = getattr(self, name)
            what = f"look for a batch size with {name}={shown(value)}"
            instead = "write a positive number of samples"
            object.__setattr__(self, name, checked_whole(value, FitError, what, instead))
        if self.power_of_two and self.multiple_of & (self.multiple_of - 1):
            raise FitError.cannot(
                f"look for a power of two that is a multiple of {self.multiple_of}",
                why="there is none",
                instead="write a multiple_of that is a power of two, or power_of_two=False",
            )
        if self.at_most(self.maximum) is None:
            kind = "power of two" if self.power_of_two else "integer"
            if self.multiple_of > 1:
                prefix = "power of two that is a " * self.power_of_two
                kind = f"{prefix}multiple of {self.multiple_of}"
            raise FitError.cannot(
                f"look for a batch size from {self.minimum} to {self.maximum}",
                why=f"there is no {kind} among them",
                instead="widen the bounds",
            )

    @property
    def smallest(self) -> int:
        """The smallest candidate."""
        if self.power_of_two:
            return 1 << (max(self.minimum, self.multiple_of) - 1).bit_length()
        return -(-self.minimum // self.multiple_of) * self.multiple_of

    def number(self, index: int) -> int:
        """Return the candidate of an index, as `bisect` counts them."""
        return 1 << index if self.power_of_two else index * self.multiple_of

    @property
    def indices(self) -> tuple[int, int]:
        """The indices of the smallest and the largest candidate."""
        first, last = self.smallest, self.at_most(self.maximum)
        assert last is not None, "checked"
        if self.power_of_two:
            return first.bit_length() - 1, last.bit_length() - 1
        return first // self.multiple_of, last // self.multiple_of

    def at_most(self, size: int) -> int | None:
        """Return the largest candidate up to `size`; None if all are larger."""
        size = min(size, self.maximum)
        if size < self.smallest:
            return None
        if self.power_of_two:
            return 1 << size.bit_length() - 1
        return size // self.multiple_of * self.multiple_of

    def above(self, size: int) -> int | None:
        """Return the smallest candidate above `size`; None if there is none."""
        each = self.multiple_of
        found = 1 << size.bit_length() if self.power_of_two else (size // each + 1) * each
        found = max(found, self.smallest)
        return None if found > self.maximum else found
