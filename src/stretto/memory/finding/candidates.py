"""Candidate batch sizes, and the search for the largest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from stretto.errors import FitError, shown
from stretto.timing.number import whole

Method = Literal["bisect", "halve"]


class Found(NamedTuple):
    """The result of a search."""

    size: int
    """The largest size that was tried and fits."""
    too_large: int | None
    """The smallest size that was tried and does not fit; None if all tried sizes fit."""


@final
@dataclass(frozen=True, slots=True)
class CandidateSizes:
    """The candidate sizes in order: multiples of a number, or powers of two.

    >>> [size for size in CandidateSizes(minimum=5, maximum=40, multiple_of=8)]
    [8, 16, 24, 32, 40]
    >>> [size for size in CandidateSizes(minimum=3, maximum=100, power_of_two=True)]
    [4, 8, 16, 32, 64]

    Raises:
        FitError: there is no such size, or a bound is not a positive integer.
    """

    minimum: int = 1
    maximum: int = 1 << 24
    multiple_of: int = 1
    power_of_two: bool = False

    def __post_init__(self) -> None:
        for name in ("minimum", "maximum", "multiple_of"):
            value = getattr(self, name)
            number = whole(value)
            if number is None or number < 1:
                raise FitError.cannot(
                    f"look for a batch size with {name}={shown(value)}",
                    why="it is not an integer of at least 1",
                    instead="write a positive number of samples",
                )
            object.__setattr__(self, name, number)
        if self.power_of_two and self.multiple_of & (self.multiple_of - 1):
            raise FitError.cannot(
                f"look for a power of two that is a multiple of {self.multiple_of}",
                why="there is none",
                instead="write a multiple_of that is a power of two, or power_of_two=False",
            )
        if self.at_most(self.maximum) is None:
            raise FitError.cannot(
                f"look for a batch size from {self.minimum} to {self.maximum}",
                why=f"there is no {self._kind} among them",
                instead="widen the bounds",
            )

    def __iter__(self) -> Iterator[int]:
        return map(self._size, range(self._first, self._index(self.maximum) + 1))

    @property
    def smallest(self) -> int:
        """The smallest candidate."""
        return self._size(self._first)

    @property
    def largest(self) -> int:
        """The largest candidate."""
        return self._size(self._index(self.maximum))

    def at_most(self, size: int) -> int | None:
        """Return the largest candidate up to `size`; None if all are larger."""
        index = self._index(min(size, self.maximum))
        return None if index < self._first else self._size(index)

    def above(self, size: int) -> int | None:
        """Return the smallest candidate above `size`; None if there is none."""
        index = max(self._index(size) + 1, self._first)
        return None if index > self._index(self.maximum) else self._size(index)

    def halfway(self, low: int, high: int) -> int:
        """Return the candidate halfway between two; of neighbours, the lower."""
        return self._size((self._index(low) + self._index(high)) // 2)

    @property
    def _kind(self) -> str:
        if self.multiple_of == 1:
            return "power of two" if self.power_of_two else "integer"
        return f"{'power of two that is a ' * self.power_of_two}multiple of {self.multiple_of}"

    @property
    def _first(self) -> int:
        if self.power_of_two:
            return (max(self.minimum, self.multiple_of) - 1).bit_length()
        return -(-self.minimum // self.multiple_of)

    def _size(self, index: int) -> int:
        return 1 << index if self.power_of_two else index * self.multiple_of

    def _index(self, size: int) -> int:
        return size.bit_length() - 1 if self.power_of_two else size // self.multiple_of


def search(
    fits: Callable[[int], bool],
    sizes: CandidateSizes,
    *,
    method: Method = "bisect",
    guess: int | None = None,
    within: float = 0.0,
) -> Found:
    """Return the largest size that fits, among those that were tried.

    `bisect` first encloses the answer between a size that fits and one that does not: it doubles
    from two samples, or moves away from the guess in growing strides. Then it halves the interval.
    `halve` starts at the largest size, or the guess, and halves it until it fits. It needs the
    fewest trials, but the answer may be only half of what would fit.

    Args:
        fits: whether a size fits. If it does, all smaller sizes are assumed to fit.
        sizes: the candidates.
        method: `"bisect"` or `"halve"`.
        guess: where to start.
        within: stop when the interval is at most this fraction of the answer.

    >>> search(lambda size: size <= 100, CandidateSizes(multiple_of=8))
    Found(size=96, too_large=104)
    >>> search(lambda size: size <= 100, CandidateSizes(maximum=1000), method="halve").size
    62

    Raises:
        FitError: the smallest size does not fit.
    """
    failed: list[int] = []

    def tried(size: int) -> bool:
        is_small_enough = fits(size)
        if not is_small_enough:
            failed.append(size)
        return is_small_enough

    begin = None if guess is None else sizes.at_most(guess)
    if method == "halve":
        low = _halve(tried, sizes, sizes.largest if begin is None else begin)
    else:
        low = _bisect(tried, sizes, begin, within)
    if low is None:
        raise FitError.cannot(
            f"find a batch size from {sizes.minimum} to {sizes.maximum}",
            why=f"{sizes.smallest} does not fit",
            instead="make the model or its samples smaller, or give it more memory",
        )
    return Found(low, min(failed, default=None))


def largest(fits: Callable[[int], bool], *, maximum: int, guess: int | None = None) -> int | None:
    """Return the largest size, up to `maximum`, that fits; None if a single sample does not."""
    if not fits(1):
        return None
    return search(fits, CandidateSizes(maximum=maximum), guess=guess).size


def _halve(fits: Callable[[int], bool], sizes: CandidateSizes, begin: int) -> int | None:
    size = begin
    while not fits(size):
        if size == sizes.smallest:
            return None
        size = sizes.at_most(size // 2) or sizes.smallest
    return size


def _bisect(
    fits: Callable[[int], bool], sizes: CandidateSizes, begin: int | None, within: float
) -> int | None:
    low, high = _enclose(fits, sizes, begin)
    while low is not None and high is not None and high - low > within * low:
        middle = sizes.halfway(low, high)
        if middle == low:
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


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
