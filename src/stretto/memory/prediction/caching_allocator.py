"""A model of PyTorch's caching allocator for CUDA: reserved memory, not only live memory.

It follows `c10/cuda/CUDACachingAllocator.cpp` of torch 2.13, with default settings and one stream.
Memory outside the allocator (context, workspaces of cuBLAS and cuDNN, NCCL) is not included.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from typing import final

_MIB = 1 << 20
_ROUND = 512
_SMALL = _MIB
"""Blocks up to this size come from the small pool."""
_SMALL_SEGMENT = 2 * _MIB
_MEDIUM = 10 * _MIB
"""Below this size, a large block is cut from a segment of 20 MiB."""
_MEDIUM_SEGMENT = 20 * _MIB
_LARGE_ROUND = 2 * _MIB


@final
class CachingAllocator:
    """Allocates blocks as the caching allocator does, and counts reserved bytes.

    >>> allocator = CachingAllocator()
    >>> allocator.allocate(0, 3 * 2**20)  # from a segment of 20 MiB
    >>> allocator.reserved // 2**20
    20
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated = self.peak_allocated = 0
        self.reserved = 0
        self._next_address = 0
        # Blocks by address: (size, segment, is small). A segment begins where a block of it does.
        self._used: dict[int, tuple[int, tuple[int, bool]]] = {}
        self._addresses: dict[int, int] = {}
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._segment_of: dict[int, int] = {}

    @property
    def peak_reserved(self) -> int:
        return self.reserved

    def allocate(self, key: int, size: int, stream: int = 0) -> bool:
        """Allocate a block for `key`."""
        if size == 0:
            return True
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        is_small = size <= _SMALL
        pool = stream, is_small
        block = self._take(size, pool=pool)
        if block is None:
            if self.limit is not None and self.reserved + _segment_size(size) > self.limit:
                return False
            self._reserve(_segment_size(size), pool=pool)
            block = self._take(size, pool=pool)
            assert block is not None
        address, found = block
        rest = found - size
        if rest >= _ROUND if is_small else rest > _SMALL:
            self._add_free(address + size, rest, self._segment_of[address], pool=pool)
        else:
            size = found
        self._used[address] = size, pool
        self._addresses[key] = address
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return True

    def free(self, key: int) -> None:
        """Free the block of `key` and merge it with free neighbours in its segment."""
        address = self._addresses.pop(key, None)
        if address is None:
            return  # an allocation of 0 bytes
        size, pool = self._used.pop(address)
        self.allocated -= size
        segment = self._segment_of[address]
        before = self._ends.get(address)
        if before is not None and self._segment_of[before] == segment:
            size += self._drop_free(before, pool=pool)
            address = before
        after = address + size
        if after in self._starts and self._segment_of.get(after) == segment:
            size += self._drop_free(after, pool=pool)
        self._add_free(address, size, segment, pool=pool)

    def _take(self, size: int, *, pool: tuple[int, bool]) -> tuple[int, int] | None:
        """Take the smallest free block that is large enough; of equals, the first."""
        blocks = self._free[pool]
        place = bisect.bisect_left(blocks, (size, -1))
        if place == len(blocks):
            return None
        found, address = blocks[place]
        self._drop_free(address, pool=pool)
        return address, found

    def _reserve(self, size: int, *, pool: tuple[int, bool]) -> None:
        address = self._next_address
        self._next_address += size + _LARGE_ROUND  # segments are never neighbours
        self.reserved += size
        self._add_free(address, size, address, pool=pool)

    def _add_free(self, address: int, size: int, segment: int, *, pool: tuple[int, bool]) -> None:
        bisect.insort(self._free[pool], (size, address))
        self._starts[address] = size
        self._ends[address + size] = address
        self._segment_of[address] = segment

    def _drop_free(self, address: int, *, pool: tuple[int, bool]) -> int:
        size = self._starts.pop(address)
        del self._ends[address + size]
        blocks = self._free[pool]
        del blocks[bisect.bisect_left(blocks, (size, address))]
        return size


def _segment_size(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _MEDIUM:
        return _MEDIUM_SEGMENT
    return -(-size // _LARGE_ROUND) * _LARGE_ROUND
