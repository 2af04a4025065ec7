"""Expandable segments: addresses are reserved once, and memory is mapped to them as needed.

It follows `ExpandableSegment` and its callers in `c10/cuda/CUDACachingAllocator.cpp` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from stretto.memory.prediction.allocator.blocks import Block, Pool

_MIB = 1 << 20
_SMALL_PAGE = 2 * _MIB


@final
class ExpandableSegments:
    """Maps memory to the blocks of pools, and takes it back."""

    def __init__(self, *, large_page: int, device_memory: int | None) -> None:
        self._large_page = large_page
        # torch reserves 9/8 of the device's memory as addresses, for each segment.
        self._addresses = 1 << 62 if device_memory is None else device_memory * 9 // 8
        self._next_address = 0

    def expand(self, pool: Pool, size: int, take: Callable[[int], bool]) -> Block | None:
        """Return a block of at least that size, in no list; None if out of memory.

        Args:
            pool: the blocks of the stream.
            size: bytes of the block.
            take: counts bytes of physical memory; False if the device has not so many left.
        """
        block = self._find(pool, size)
        if not block.is_mapped and not self._map(block, min(block.size, size), take):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size), take):
                return None
            block = following
        pool.remove(block)
        return block

    def release(self, pool: Pool) -> int:
        """Unmap the pages of free blocks; return the bytes."""
        released = 0
        for _, _, block in list(pool.free):
            size = self._unmap(block)
            released += size
            if size and block.is_segment:
                pool.remove_unmapped(block)
        return released

    def _page(self, pool: Pool) -> int:
        return _SMALL_PAGE if pool.is_small else self._large_page

    def _find(self, pool: Pool, size: int) -> Block:
        """Return the first block of free and unmapped ones that together have room."""
        for _, block in pool.unmapped:
            before = block.previous
            first = before if before is not None and before.is_free else block
            if _has_room(first, size):
                return first
        page = self._page(pool)
        start = -(-self._next_address // page) * page
        block = Block(pool, start, -(-self._addresses // page) * page)
        self._next_address = start + block.size
        pool.add_unmapped(block)
        return block

    def _map(self, block: Block, size: int, take: Callable[[int], bool]) -> bool:
        pool, page = block.pool, self._page(block.pool)
        size = -(-size // page) * page
        if not take(size):
            return False
        pool.remove_unmapped(block)
        block.is_mapped = True
        if size < block.size:
            rest = Block(pool, block.address + size, block.size - size)
            rest.insert(block, block.next)
            pool.add_unmapped(rest)
            block.size = size
        pool.merge(block)
        pool.add(block)
        return True

    def _unmap(self, block: Block) -> int:
        pool, page = block.pool, self._page(block.pool)
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return 0
        pool.remove(block)
        if block.address < start:
            before = Block(pool, block.address, start - block.address)
            before.insert(block.previous, block)
            pool.add(before)
        if end < block.address + block.size:
            after = Block(pool, end, block.address + block.size - end)
            after.insert(block, block.next)
            pool.add(after)
        block.address, block.size, block.is_mapped = start, end - start, False
        pool.merge(block)
        pool.add_unmapped(block)
        return end - start


def _has_room(block: Block | None, size: int) -> bool:
    """Return whether this block and the free ones that follow it have that size."""
    while size > 0 and block is not None and block.is_free:
        size -= block.size
        block = block.next
    return size <= 0
