"""`SampleOrder`: the sample at each position of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from stretto.errors import DataError, shown
from stretto.ordering.permutation import network, permuted
from stretto.timing.number import whole

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

    Raises:
        DataError: `num_samples` is out of range, or the seed is not an integer.
    """

    num_samples: int
    """Samples in an epoch."""
    seed: int = 0
    """Selects the permutations; any integer."""
    shuffle: bool = True
    """Whether epochs are permuted; if not, samples come in the order of the data set."""

    def __post_init__(self) -> None:
        num_samples, seed = whole(self.num_samples), whole(self.seed)
        if num_samples is None or not 1 <= num_samples <= _MOST_SAMPLES:
            raise DataError.cannot(
                f"put {shown(self.num_samples)} samples in order",
                why="their number is not an integer from 1 to 2^62",
                instead="pass the number of samples in the data set, such as 50000",
            )
        if seed is None:
            raise DataError.cannot(
                f"shuffle with seed {shown(self.seed)}",
                why="it is not an integer",
                instead="write a number such as 7",
            )
        object.__setattr__(self, "num_samples", num_samples)
        object.__setattr__(self, "seed", seed)

    def __getitem__(self, position: int) -> int:
        """Return the index of the sample at `position` of the run, counted from 0."""
        if position < 0:
            raise IndexError(f"positions are counted from 0, got {position}")
        epoch, within = divmod(position, self.num_samples)
        if not self.shuffle:
            return within
        return permuted(within, network(self.num_samples, self.seed, epoch))

    def epoch_of(self, position: int) -> int:
        """Return the epoch that `position` belongs to.

        >>> SampleOrder(6).epoch_of(13)
        2
        """
        return position // self.num_samples
