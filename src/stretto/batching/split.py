"""`split`: one batch over ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from stretto.batching.policy import Tokens, checked_size, checked_world_size
from stretto.errors import BatchSizeError
from stretto.ordering import evenly, stream_start
from stretto.timing.grammar import whole


@final
@dataclass(frozen=True, slots=True)
class Split:
    """How the batch `[start, start + size)` is shared; made by `split`.

    Rank r of W owns the positions i with `i % W == r`, so shares differ by at most one sample.
    All ranks run the same number of micro-batches, because collectives inside a model need it. A
    rank without samples runs a dummy of weight 0.

    >>> parts = split(13, 4, 2)
    >>> parts.shares, parts.accumulation
    ((4, 3, 3, 3), 2)
    """

    size: int
    """Samples of the batch, over all ranks."""
    world_size: int
    """How many ranks share it."""
    micro_batch_size: int | None
    """The most samples in one micro-batch; None: a share is one micro-batch."""
    start: int = 0
    """The position of the batch's first sample."""

    @property
    def shares(self) -> tuple[int, ...]:
        """The samples of each rank."""
        return tuple(self.share(rank) for rank in range(self.world_size))

    def share(self, rank: int) -> int:
        """Return the samples of one rank: the positions i in the batch with `i % W == rank`."""
        world = self.world_size
        return stream_start(self.start + self.size, rank, world) - stream_start(
            self.start, rank, world
        )

    @property
    def accumulation(self) -> int:
        """Micro-batches per rank: as many as the largest share needs."""
        if self.micro_batch_size is None:
            return 1
        largest = -(-self.size // self.world_size)
        return -(-largest // self.micro_batch_size)

    def micro_batch_sizes(self, rank: int) -> tuple[int, ...]:
        """Return the sizes of one rank's micro-batches: they differ by at most one.

        >>> split(13, 4, 2).micro_batch_sizes(0), split(13, 4, 2).micro_batch_sizes(3)
        ((2, 2), (2, 1))
        """
        return evenly(self.share(rank), parts=self.accumulation)


def split(
    size: int,
    world_size: int,
    micro_batch_size: int | None = None,
    *,
    even: bool = False,
    start: int = 0,
) -> Split:
    """Share a batch over ranks and micro-batches.

    >>> shared = split(13, 4, 2)
    >>> shared.shares, shared.accumulation
    ((4, 3, 3, 3), 2)

    Args:
        size: samples of the batch, over all ranks.
        world_size: how many ranks share it.
        micro_batch_size: the most samples that one rank takes at once; by default, its whole share.
        even: allow only multiples of `world_size * micro_batch_size`, so that every rank runs
            full micro-batches.
        start: the position of the batch's first sample; it decides which ranks get one more.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, or `even` and the size is not such
            a multiple.
    """
    size = checked_size(size)
    world_size = checked_world_size(world_size)
    if micro_batch_size is not None:
        micro_batch_size = checked_size(micro_batch_size, "a micro-batch size")
    if isinstance(size, Tokens) or isinstance(micro_batch_size, Tokens):
        why = "how many tokens each sample has is not known here"
        instead = "write numbers of samples, or pack(lengths, budget, world_size)"
        raise BatchSizeError.cannot("split by amounts in tokens", why=why, instead=instead)
    position = whole(start)
    if position is None or position < 0:
        why, instead = "it is not an integer of at least 0", "pass the number of samples before it"
        raise BatchSizeError.bad("start", start, why, instead)
    unit = even_unit(world_size, micro_batch_size)
    if even and size % unit:
        raise not_even(size, world_size, micro_batch_size)
    return Split(size, world_size, micro_batch_size, position)


def in_rows(size: int, micro_batch_size: int | None, row: int) -> tuple[int, int | None]:
    """Return a batch and a micro-batch size in rows of `row` samples, at least one each.

    >>> in_rows(24, 7, row=4), in_rows(24, None, row=4)
    ((6, 1), (6, None))
    """
    micro = None if micro_batch_size is None else max(1, micro_batch_size // row)
    return max(1, size // row), micro


def even_unit(world_size: int, micro_batch_size: int | None) -> int:
    """Return the number that all evenly split sizes are multiples of."""
    return world_size * (1 if isinstance(micro_batch_size, Tokens) else micro_batch_size or 1)


def not_even(
    size: int, world_size: int, micro_batch_size: int | None, each: int | None = None
) -> BatchSizeError:
    """Return the error for a size that cannot be split evenly.

    Args:
        size: samples of the batch.
        world_size: how many ranks share it.
        micro_batch_size: the most samples that one rank takes at once.
        each: the tokens of a sample if sizes are written in tokens; None: in samples.
    """
    unit = even_unit(world_size, micro_batch_size)
    lower = max(unit, size - size % unit)
    sizes = (lower, lower + unit, unit)
    few, more, step = (one if each is None else Tokens(one * each) for one in sizes)
    instead = f"write a multiple such as {few} or {more}, or MultipleOf(policy, {step!r})"
    micro = "" if micro_batch_size is None else f" with micro-batches of {micro_batch_size}"
    what = f"split {size} samples evenly over {world_size} ranks{micro}"
    return BatchSizeError.cannot(what, why=f"it is not a multiple of {unit}", instead=instead)
