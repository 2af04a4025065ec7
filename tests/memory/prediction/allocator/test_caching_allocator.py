"""The model of the caching allocator: its rules, and that it never loses a block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.memory.prediction.allocator.caching_allocator import CachingAllocator
from stretto.memory.prediction.allocator.settings import AllocatorSettings

MIB = 1 << 20
# Random traces, and the answers of torch 2.13: `python bench/cuda_allocator.py --golden`.
GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "caching_allocator.json").read_text(encoding="utf-8")
)


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


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["settings"] or "default")
def test_golden_traces(row: dict[str, Any]) -> None:
    allocator = CachingAllocator(row["limit"], AllocatorSettings.from_text(row["settings"]))
    failed = []
    for place, event in enumerate(row["events"].split()):
        if event.startswith("-"):
            allocator.free(int(event[1:]))
            continue
        key, _, rest = event.partition(":")
        size, _, stream = rest.partition("@")
        if not allocator.allocate(int(key), int(size), int(stream)):
            failed.append(place)
    used = [allocator.allocated, allocator.peak_allocated]
    assert [allocator.reserved, allocator.peak_reserved, *used, *failed] == row["answer"]


def filled(allocator: CachingAllocator, *mebibytes: int) -> CachingAllocator:
    """Allocate blocks and free them all."""
    for key, size in enumerate(mebibytes):
        assert allocator.allocate(key, size * MIB)
    for key in range(len(mebibytes)):
        allocator.free(key)
    return allocator


def test_what_is_in_use_is_counted_in_blocks() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(0, 1)
    assert allocator.allocate(1, 0)
    assert allocator.allocated == 512
    allocator.free(0)
    allocator.free(1)
    allocator.free(2)
    assert (allocator.allocated, allocator.peak_allocated) == (0, 512)
    assert (allocator.reserved, allocator.peak_reserved) == (2 * MIB, 2 * MIB)


def test_unused_segments_are_released_before_it_fails() -> None:
    allocator = filled(CachingAllocator(100 * MIB), 40, 50)
    assert allocator.allocate(5, 60 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (60 * MIB, 90 * MIB)
    assert not allocator.allocate(6, 50 * MIB)
    assert allocator.allocate(7, 40 * MIB)
    assert allocator.reserved == 100 * MIB


def test_the_driver_hands_out_whole_pages() -> None:
    settings = AllocatorSettings(large_segment_size=21 * MIB)
    allocator = CachingAllocator(43 * MIB, settings)
    assert allocator.allocate(0, 9 * MIB)
    assert allocator.reserved == 21 * MIB
    assert allocator.allocate(1, 9 * MIB)
    assert not allocator.allocate(2, 9 * MIB)  # 22 MiB are taken, and 22 more do not fit


def test_a_stream_reuses_only_its_own_blocks() -> None:
    allocator = filled(CachingAllocator(100 * MIB), 60)
    assert allocator.allocate(5, 30 * MIB, stream=1)
    assert allocator.reserved == 90 * MIB
    assert allocator.allocate(6, 20 * MIB, stream=0)
    assert allocator.reserved == 90 * MIB
    assert not allocator.allocate(7, 40 * MIB, stream=1)  # the segment of stream 0 is in use
    allocator.free(6)
    assert allocator.allocate(7, 40 * MIB, stream=1)
    assert allocator.reserved == 70 * MIB


def test_expandable_segments_grow_and_shrink() -> None:
    settings = AllocatorSettings(expandable_segments=True)
    allocator = filled(CachingAllocator(100 * MIB, settings), 16, 16)
    assert allocator.reserved == 40 * MIB
    assert allocator.allocate(5, 41 * MIB)
    assert allocator.reserved == 60 * MIB
    assert allocator.allocate(6, 40 * MIB)
    assert allocator.reserved == 100 * MIB
    allocator.free(5)
    assert allocator.allocate(7, 512)  # the first pages are given back for it
    assert allocator.reserved == 62 * MIB


def test_large_blocks_are_not_split() -> None:
    settings = AllocatorSettings(max_split_size=30 * MIB)
    allocator = filled(CachingAllocator(settings=settings), 40)
    assert allocator.allocate(5, 20 * MIB)
    assert allocator.reserved == 60 * MIB
    assert allocator.allocate(6, 32 * MIB)  # takes all of the 40 MiB
    assert allocator.allocated == 60 * MIB


def test_sizes_are_rounded_up() -> None:
    settings = AllocatorSettings(roundup_power2_divisions=(4,) * 16)
    allocator = CachingAllocator(settings=settings)
    assert allocator.allocate(0, 33 * MIB)
    assert allocator.allocated == 40 * MIB


def test_old_segments_are_collected() -> None:
    settings = AllocatorSettings(garbage_collection_threshold=0.3, memory_fraction=0.9)
    allocator = filled(CachingAllocator(1100 * MIB, settings), 100, 200, 300)
    assert allocator.allocate(5, 400 * MIB)
    assert allocator.reserved == 400 * MIB


def test_a_fraction_is_a_limit() -> None:
    allocator = CachingAllocator(100 * MIB, AllocatorSettings(memory_fraction=0.5))
    assert allocator.allocate(0, 40 * MIB)
    assert not allocator.allocate(1, 12 * MIB)
    assert allocator.allocate(2, 10 * MIB)
