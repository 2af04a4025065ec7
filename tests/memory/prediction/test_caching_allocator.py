"""The model of the caching allocator: its rules, and that it never loses a block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stretto.memory.prediction.caching_allocator import CachingAllocator, reserved
from stretto.memory.prediction.fit import fit
from stretto.memory.prediction.recording import Allocation, Event, Place, Recording

MIB = 1 << 20


def reserved_for(*sizes: int) -> int:
    allocator = CachingAllocator()
    for key, size in enumerate(sizes):
        allocator.allocate(key, size)
    return allocator.reserved


def test_segments() -> None:
    assert reserved_for(1) == 2 * MIB
    assert reserved_for(MIB) == 2 * MIB
    assert reserved_for(MIB, MIB) == 2 * MIB
    assert reserved_for(MIB, MIB, 1) == 4 * MIB
    assert reserved_for(MIB + 1) == 20 * MIB
    assert reserved_for(9 * MIB, 9 * MIB) == 20 * MIB
    assert reserved_for(10 * MIB) == 10 * MIB
    assert reserved_for(11 * MIB + 1) == 12 * MIB


def test_a_large_block_is_split_only_for_more_than_a_mebibyte() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 40 * MIB)
    allocator.free(0)
    allocator.allocate(1, 39 * MIB)
    allocator.allocate(2, 2 * MIB)
    assert allocator.reserved == 60 * MIB  # the rest of the first segment went with block 1


def test_the_smallest_that_is_large_enough() -> None:
    allocator = CachingAllocator()
    for key, size in enumerate((40, 30, 50)):
        allocator.allocate(key, size * MIB)
    for key in range(3):
        allocator.free(key)
    allocator.allocate(3, 29 * MIB)
    allocator.allocate(4, 40 * MIB)
    allocator.allocate(5, 50 * MIB)
    assert allocator.reserved == 120 * MIB


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 64 * MIB)), max_size=60))
def test_all_is_merged_when_all_is_free(wanted: list[tuple[int, int]]) -> None:
    allocator, live = CachingAllocator(), set()
    for key, size in wanted:
        if key in live:
            allocator.free(key)
            live.discard(key)
        else:
            allocator.allocate(key, size)
            live.add(key)
    for key in live:
        allocator.free(key)
    pools = [*allocator._small.values(), *allocator._large.values()]
    assert sum(size for pool in pools for size, _, _ in pool.free) == allocator.reserved
    assert allocator.allocated == 0


def test_a_step_reserves_at_least_what_is_live() -> None:
    before, forward = Place("before", ""), Place("forward", "")

    def recording(size: int) -> Recording:
        counts = [
            Allocation(5 * MIB, before, "parameters"),
            Allocation(size * MIB, forward, "activations"),
            Allocation(3 * size * MIB, forward, "temporaries"),
        ]
        events = [Event(i, is_free=False, place=one.place) for i, one in enumerate(counts)]
        return Recording(size, counts, [*events, Event(1, is_free=True, place=forward)])

    curve = fit([recording(2), recording(3)])
    for size in (1, 7, 50):
        assert reserved(curve, size) >= curve.peak(size)
