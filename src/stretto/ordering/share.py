"""The positions of the run that belong to each rank."""

from __future__ import annotations


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
