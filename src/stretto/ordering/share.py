"""The positions of the run that belong to each rank, and how they are cut into pieces."""

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
