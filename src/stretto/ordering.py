"""The order of samples: a keyed permutation of each epoch, and each rank's share.

The permutation is evaluated at any position in constant memory. It is a Feistel network on
`Z_a x Z_b` with `a * b >= n` (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
2002). A number is a pair of halves; in each round, a hash of one half is
added to the other. This is a bijection for any hash. `a` and `b` are close to the square root of
`n`, so fewer than `a` numbers are outside `range(n)`. A result outside is permuted again until it
is inside ("cycle walking").

All values stay below 2^63 or are masked to 32 bits. So `stretto.data` can evaluate the same
permutation in blocks of 64-bit integers with wrap-around.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, final

from stretto.errors import DataError
from stretto.timing.grammar import whole

__all__ = ["SampleOrder", "evenly", "share", "stream_start"]


MASK = 0xFFFFFFFF
FACTOR_1 = 0x7FEB352D
FACTOR_2 = 0x846CA68B
"""The multipliers of a well-tested 32-bit hash (Wellons, "Prospecting for hash functions")."""


class Network(NamedTuple):
    """The permutation of one epoch: sizes of the halves, and a key per round."""

    num_samples: int
    above: int
    """Number of values of the upper half."""
    below: int
    """Number of values of the lower half; a number is `upper * below + lower`."""
    keys: tuple[int, ...]
    """32-bit keys; even rounds change the upper half, odd rounds the lower."""


@lru_cache(maxsize=8)  # epochs that are in use at the same time
def network(num_samples: int, seed: int, epoch: int) -> Network:
    """Return the permutation of one epoch.

    >>> sorted(permuted(position, network(5, seed=0, epoch=0)) for position in range(5))
    [0, 1, 2, 3, 4]
    """
    above = math.isqrt(num_samples - 1) + 1 if num_samples > 1 else 1
    rounds = _rounds(num_samples)
    # One digest has at most 64 bytes: 16 keys.
    text = "".join(
        blake2b(f"{seed} {epoch} {block}".encode()).hexdigest() for block in range(-(-rounds // 16))
    )
    keys = tuple(int(text[8 * i : 8 * i + 8], 16) for i in range(rounds))
    return Network(num_samples, above, -(-num_samples // above), keys)


def permuted(position: int, net: Network) -> int:
    """Return the image of `position`."""
    num_samples, above, below, keys = net
    while True:
        upper, lower = divmod(position, below)
        for number, key in enumerate(keys):
            if number % 2:
                lower = (lower + hashed(upper, key, below)) % below
            else:
                upper = (upper + hashed(lower, key, above)) % above
        position = upper * below + lower
        if position < num_samples:
            return position


def hashed(half: int, key: int, size: int) -> int:
    """Return a number below `size` that depends on `half` and `key`."""
    mixed = (half ^ key) * FACTOR_1
    mixed = (mixed ^ (mixed >> 15)) * FACTOR_2 & MASK
    return mixed * size >> 32


def _rounds(num_samples: int) -> int:
    """Return the number of rounds after which the order looks random.

    Small data sets need more rounds: among the 720 orders of 6 samples, six rounds are not uniform,
    twenty-four are (chi-square over 43,200 seeds). For larger data sets these numbers pass the test
    of pairs at positions that share a half, which are the weakest.
    """
    if num_samples < 256:
        return 24
    return 8 if num_samples < 65536 else 6


_MOST_SAMPLES = 2**62


@final
@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of samples over the whole run, in constant memory.

    A run is a line of positions 0, 1, 2, ...; position `p` belongs to epoch `p // num_samples`.
    With `shuffle`, every epoch is a pseudo-random permutation of the data set that depends only on
    the seed and the epoch. Nothing is stored, and any position is evaluated directly.

    >>> order = SampleOrder(6, seed=7)
    >>> sorted(order[position] for position in range(6, 12))
    [0, 1, 2, 3, 4, 5]
    >>> [SampleOrder(3, shuffle=False)[position] for position in range(6)]
    [0, 1, 2, 0, 1, 2]
    >>> [SampleOrder(6, seed=7, group=2)[position] for position in range(6)]
    [0, 1, 4, 5, 2, 3]

    Raises:
        DataError: `num_samples` is out of range, or the seed is not an integer.
    """

    num_samples: int
    """Samples in an epoch."""
    seed: int = 0
    """Selects the permutations; any integer."""
    shuffle: bool = True
    """Whether epochs are permuted; if not, samples come in the order of the data set."""
    group: int = 1
    """How many consecutive samples of the data set stay together: whole groups are permuted. It
    divides `num_samples`."""

    def __post_init__(self) -> None:
        num_samples, seed = whole(self.num_samples), whole(self.seed)
        if num_samples is None or not 1 <= num_samples <= _MOST_SAMPLES:
            why, instead = "it is not an integer from 1 to 2^62", "pass the length of the data set"
            raise DataError.bad("num_samples", self.num_samples, why, instead)
        if seed is None:
            raise DataError.bad("seed", self.seed, "it is not an integer", "write for example 7")
        object.__setattr__(self, "num_samples", num_samples)
        object.__setattr__(self, "seed", seed)

    def __getitem__(self, position: int) -> int:
        """Return the index of the sample at `position` of the run, counted from 0."""
        if position < 0:
            raise IndexError(f"positions are counted from 0, got {position}")
        epoch, within = divmod(position, self.num_samples)
        if not self.shuffle:
            return within
        group, inside = divmod(within, self.group)
        groups = network(self.num_samples // self.group, self.seed, epoch)
        return permuted(group, groups) * self.group + inside

    def in_rows(self, row: int) -> SampleOrder:
        """Return the order of rows of `row` consecutive samples.

        >>> SampleOrder(8, seed=7, group=4).in_rows(2)
        SampleOrder(num_samples=4, seed=7, shuffle=True, group=2)
        """
        return SampleOrder(self.num_samples // row, self.seed, self.shuffle, self.group // row)

    def epoch_of(self, position: int) -> int:
        """Return the epoch that `position` belongs to.

        >>> SampleOrder(6).epoch_of(13)
        2
        """
        return position // self.num_samples


def share(start: int, size: int, rank: int, world_size: int) -> range:
    """Return the positions of the batch `[start, start + size)` that `rank` owns.

    Rank r of W owns the positions i with `i % W == r`. So its stream of samples does not depend on
    batch sizes, shares differ by at most one sample, and W can change on resume.

    >>> [list(share(10, 5, rank, 2)) for rank in range(2)]
    [[10, 12, 14], [11, 13]]
    """
    return range(start + (rank - start) % world_size, start + size, world_size)


def stream_start(position: int, rank: int, world_size: int) -> int:
    """Return how many positions before `position` belong to `rank`.

    Entry j of a rank's stream is position `rank + j * world_size`.

    >>> [stream_start(11, rank, 2) for rank in range(2)]
    [6, 5]
    """
    return -((rank - position) // world_size)


def evenly(count: int, *, most: int | None = None, parts: int | None = None) -> tuple[int, ...]:
    """Return sizes that add up to `count` and differ by at most one, the larger ones first.

    >>> evenly(7, most=3), evenly(2, parts=3)
    ((3, 2, 2), (1, 1, 0))

    Args:
        count: how many there are.
        most: the largest size; None: `count`.
        parts: how many sizes; None: as few as `most` allows.
    """
    if parts is None:
        parts = 1 if most is None else -(-count // most)
    each, larger = divmod(count, parts)
    return (each + 1,) * larger + (each,) * (parts - larger)
