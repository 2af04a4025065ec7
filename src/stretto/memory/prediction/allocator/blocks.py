"""Blocks of the caching allocator: a stream's free ones, and how neighbours merge."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import final


@final
class Block:
    """A piece of a segment; `previous` and `next` are its neighbours there."""

    __slots__ = ("address", "age", "is_free", "is_mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.is_free = True
        self.is_mapped = True
        """Whether memory is behind the addresses; False only in expandable segments."""
        self.previous: Block | None = None
        self.next: Block | None = None
        self.age = 0
        """Number of searches of large blocks before this one became free."""

    def insert(self, previous: Block | None, after: Block | None) -> None:
        """Put this block between two neighbours."""
        self.previous, self.next = previous, after
        if previous is not None:
            previous.next = self
        if after is not None:
            after.previous = self

    @property
    def is_segment(self) -> bool:
        """Whether this block is a whole segment."""
        return self.previous is None and self.next is None


@final
class Pool:
    """Free blocks of one stream, all small (up to 1 MiB) or all large."""

    __slots__ = ("free", "is_small", "least_rest", "unmapped")

    def __init__(self, *, is_small: bool, least_rest: int) -> None:
        self.is_small = is_small
        self.least_rest = least_rest
        """A block is split if at least this many bytes remain."""
        self.free: list[tuple[int, int, Block]] = []
        """Sizes, addresses and blocks, sorted."""
        self.unmapped: list[tuple[int, Block]] = []
        """Addresses and blocks without memory, sorted; only in expandable segments."""

    def add(self, block: Block) -> None:
        """Add a free block."""
        block.is_free = True
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def add_unmapped(self, block: Block) -> None:
        """Add a block without memory."""
        block.is_mapped = False
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Remove a block without memory."""
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def merge(self, block: Block) -> None:
        """Merge a block, which is in no list, with free neighbours of its kind."""
        before = block.previous
        if before is not None and before.is_free and before.is_mapped == block.is_mapped:
            self._drop(before)
            block.address = before.address
            block.size += before.size
            block.insert(before.previous, block.next)
        after = block.next
        if after is not None and after.is_free and after.is_mapped == block.is_mapped:
            self._drop(after)
            block.size += after.size
            block.insert(block.previous, after.next)

    def _drop(self, block: Block) -> None:
        if block.is_mapped:
            self.remove(block)
        else:
            self.remove_unmapped(block)
