"""Candidate batch sizes, and the search for the largest that fits."""

from __future__ import annotations

from collections.abc import Callable
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


def search(
    fits: Callable[[int], bool],
    sizes: CandidateSizes,
    *,
    halves: bool = False,
    guess: int | None = None,
    within: float = 0.0,
) -> Found:
    """Return the largest size that fits, among those that were tried.

    The answer is first enclosed between a size that fits and one that does not: the size doubles
    from two samples, or moves away from the guess in growing strides. Then the interval is halved.
    With `halves`, the largest size, or the guess, is halved until it fits. That needs the fewest
    trials, but the answer may be only half of what would fit.

    Args:
        fits: whether a size fits. If it does, all smaller sizes are assumed to fit.
        sizes: the candidates.
        halves: whether sizes are only halved.
        guess: where to start.
        within: stop when the interval is at most this fraction of the answer.

    >>> search(lambda size: size <= 100, CandidateSizes(multiple_of=8))
    Found(size=96, too_large=104)

    Raises:
        NothingFitsError: the smallest size does not fit.
    """
    failed: list[int] = []

    def tried(size: int) -> bool:
        is_small_enough = fits(size)
        if not is_small_enough:
            failed.append(size)
        return is_small_enough

    begin = None if guess is None else sizes.at_most(guess)
    low: int | None
    high: int | None = None
    if halves:
        low = begin or sizes.at_most(sizes.maximum)
        while low is not None and not tried(low):
            low = None if low == sizes.smallest else sizes.at_most(low // 2) or sizes.smallest
    else:
        low, high = _enclose(tried, sizes, begin)
    if low is None:
        raise NothingFitsError.cannot(
            f"find a batch size from {sizes.minimum} to {sizes.maximum}",
            why=f"{sizes.smallest} does not fit",
            instead="make the model or its samples smaller, or give it more memory",
        )
    while high is not None and high - low > within * low:
        middle = sizes.at_most((low + high) // 2)
        if middle is None or middle == low:
            break
        low, high = (middle, high) if tried(middle) else (low, middle)
    return Found(low, min(failed, default=None))


def _enclose(
    fits: Callable[[int], bool], sizes: CandidateSizes, begin: int | None
) -> tuple[int | None, int | None]:
    """Return a size that fits and one that does not; None if there is none."""
    # Start at two samples if possible: batch normalisation refuses a single one.
    two = sizes.at_most(2) or sizes.smallest
    size = two if begin is None else begin
    # With a guess, strides grow from its neighbour. Without one, each doubles the size.
    stride = size if begin is None else 0
    if fits(size):
        low = size
        while True:
            following = sizes.above(low)
            if following is None:
                return low, None
            high = max(following, sizes.at_most(low + stride) or 0)
            if not fits(high):
                return low, high
            low, stride = high, max(2 * stride, low // 16, 1)
    high = size
    while high != sizes.smallest:
        low = sizes.at_most(high - max(stride, 1)) or sizes.smallest
        if fits(low):
            return low, high
        high, stride = low, max(2 * stride, low // 16, 1)
    return None, high
