"""A model of PyTorch's caching allocator for CUDA: reserved memory, not only live memory.

It follows `c10/cuda/CUDACachingAllocator.cpp` of torch 2.13. Memory outside the allocator (context,
NCCL) is not included. `bench/cuda_allocator.py` compares it with torch's own allocator.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import final

from stretto.memory.prediction.allocator.blocks import Block, Pool
from stretto.memory.prediction.allocator.expandable_segments import ExpandableSegments
from stretto.memory.prediction.allocator.settings import AllocatorSettings

_MIB = 1 << 20
_MIN_BLOCK = 512
_SMALL = _MIB
"""Blocks up to this size come from the small pool."""
_SMALL_SEGMENT = 2 * _MIB
_MEDIUM = 10 * _MIB
"""Below this size, a large block is cut from a segment of `large_segment_size`."""
_PAGE = 2 * _MIB
"""The driver hands out whole pages, and torch rounds large segments up to them."""


@final
class CachingAllocator:
    """Allocates blocks as the caching allocator does, and counts reserved bytes.

    Args:
        limit: bytes that the device has for this process; None for any number.
        settings: options of `PYTORCH_ALLOC_CONF`.

    >>> allocator = CachingAllocator()
    >>> allocator.allocate(0, 3 * 2**20)  # from a segment of 20 MiB
    True
    >>> allocator.reserved // 2**20
    20
    """

    def __init__(self, limit: int | None = None, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings = settings or AllocatorSettings()
        self.reserved = self.peak_reserved = 0
        """Bytes of segments."""
        self.allocated = self.peak_allocated = 0
        """Bytes of blocks in use; a block may be larger than its request."""
        self._limit = limit
        self._taken = 0
        """Bytes of the driver's pages."""
        self._allowed = None
        if limit is not None and settings.memory_fraction is not None:
            self._allowed = int(settings.memory_fraction * limit)
        self._collects = (
            self._allowed is not None and settings.garbage_collection_threshold is not None
        )
        self._num_searches = 0
        """Number of searches of large blocks; unused blocks age by it."""
        self._next_address = 0
        self._used: dict[int, Block] = {}
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._unsplit = float("inf")
        """Blocks of this size are not split."""
        self._expandable = None
        if settings.expandable_segments:
            self._expandable = ExpandableSegments(
                large_page=settings.large_segment_size, device_memory=limit
            )
        elif settings.max_split_size is not None:
            self._unsplit = settings.max_split_size

    def allocate(self, key: int, size: int, stream: int = 0) -> bool:
        """Allocate a block for `key`; return False if out of memory."""
        if size <= 0:
            return True
        size = self.settings.round_up(size)
        pools = self._small if size <= _SMALL else self._large
        pool = pools.get(stream) or self._new_pool(pools, stream)
        block = self._take(pool, size) or self._reserve(pool, size)
        if block is None:
            return False
        rest = block.size - size
        if rest >= pool.least_rest and size < self._unsplit:
            block.size = size
            following = Block(pool, block.address + size, rest)
            following.insert(block, block.next)
            following.age = self._num_searches
            pool.add(following)
        block.is_free = False
        self._used[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return True

    def free(self, key: int) -> None:
        """Free the block of `key`, if it has one, and merge it with free neighbours."""
        block = self._used.pop(key, None)
        if block is None:
            return  # an allocation of 0 bytes, or one that failed
        self.allocated -= block.size
        block.age = self._num_searches
        block.pool.merge(block)
        block.pool.add(block)

    def _new_pool(self, pools: dict[int, Pool], stream: int) -> Pool:
        is_small = pools is self._small
        splits_all = is_small or self._expandable is not None
        least_rest = _MIN_BLOCK if splits_all else _SMALL + _MIN_BLOCK
        pool = pools[stream] = Pool(is_small=is_small, least_rest=least_rest)
        return pool

    def _take(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that is large enough; of equals, the first."""
        if self._collects and not pool.is_small:
            self._num_searches += 1
        free = pool.free
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        block = free[place][2]
        if self._expandable is not None:
            # The size that a block can grow to counts.
            while place + 1 < len(free) and _room(free[place + 1][2]) < _room(block):
                place += 1
                block = free[place][2]
        most = self.settings.max_split_size
        if most is not None:
            if size < most <= block.size:
                return None
            if size >= most and block.size >= size + self.settings.max_non_split_rounding:
                return None
        del free[place]
        return block

    def _reserve(self, pool: Pool, size: int) -> Block | None:
        """Reserve memory for a block; if there is not enough, release unused blocks first."""
        if self._collects:
            self._collect_garbage()
        block = self._new_block(pool, size)
        if block is None and self._release_large(pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self._release_all()
            block = self._new_block(pool, size)
        return block

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        segment_size = self._segment_size(size)
        if self._allowed is not None and self.reserved + segment_size > self._allowed:
            return None
        if self._expandable is not None:
            return self._expandable.expand(pool, size, self._count)
        if not self._count(segment_size):
            return None
        # Segments are never neighbours, and later ones lie higher.
        block = Block(pool, self._next_address, segment_size)
        self._next_address += segment_size
        return block

    def _segment_size(self, size: int) -> int:
        if size <= _SMALL:
            return _SMALL_SEGMENT
        if size < _MEDIUM:
            return self.settings.large_segment_size
        return -(-size // _PAGE) * _PAGE

    def _count(self, size: int) -> bool:
        """Count the bytes of a segment; return False if the device has not so many left."""
        pages = -(-size // _PAGE) * _PAGE
        if self._limit is not None and self._taken + pages > self._limit:
            return False
        self._taken += pages
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _release_all(self) -> None:
        """Give back all memory that no block uses."""
        for pool in (*self._large.values(), *self._small.values()):
            if self._expandable is not None:
                size = self._expandable.release(pool)
                self.reserved -= size
                self._taken -= size
            else:
                self._release([block for _, _, block in pool.free if block.is_segment])

    def _release(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.pool.remove(block)
            self.reserved -= block.size
            self._taken -= -(-block.size // _PAGE) * _PAGE

    def _release_large(self, pool: Pool, size: int) -> bool:
        """Release enough of the blocks that are never split; return whether that was possible."""
        most = self.settings.max_split_size
        if most is None or self._expandable is not None:
            return False
        wanted = max(size, most)
        place = bisect_left(pool.free, (wanted,))
        if place < len(pool.free):
            self._release([pool.free[place][2]])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= most:
            released += pool.free[-1][0]
            self._release([pool.free[-1][2]])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Release old unused segments until reserved memory is below the threshold."""
        assert self._allowed is not None
        threshold = self.settings.garbage_collection_threshold
        assert threshold is not None
        target = self.reserved - int(threshold * self._allowed)
        candidates = [
            block for pool in self._large.values() for _, _, block in pool.free if block.is_segment
        ]
        while candidates and target > 0:
            ages = [self._num_searches - block.age for block in candidates]
            mean = sum(ages) / len(ages)
            old = [block for block, age in zip(candidates, ages, strict=True) if age >= mean]
            self._release(old)
            target -= sum(block.size for block in old)
            candidates = [block for block, age in zip(candidates, ages, strict=True) if age < mean]


def _room(block: Block) -> int:
    """Return the size that a block can grow to."""
    following = block.next
    if following is None or following.is_mapped:
        return block.size
    return block.size + following.size
