"""The search for the largest number that fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phantomgpu.searching import bisect


@given(
    constant=st.integers(0, 1000),
    slope=st.floats(0, 10),
    jump=st.sampled_from([1, 64, 500]),
    allocated=st.floats(0.1, 1),
    available=st.integers(0, 5000),
    first=st.integers(1, 5),
    last=st.integers(5, 3000),
)
def test_the_answer_is_the_largest_that_fits(
    *,
    constant: int,
    slope: float,
    jump: int,
    allocated: float,
    available: int,
    first: int,
    last: int,
) -> None:
    tried: list[int] = []

    def reserved(index: int) -> int:
        return int(constant + slope * (index // jump * jump))

    def used(index: int) -> tuple[int, int]:
        return int(allocated * reserved(index)), reserved(index)

    def fits(index: int) -> bool:
        tried.append(index)
        return reserved(index) <= available

    found = bisect(fits, used, available, first=first, last=last)
    expected = [index for index in range(first, last + 1) if reserved(index) <= available]
    assert found == (expected[-1] if expected else None)
    assert all(first <= index <= last for index in tried)
    assert len(tried) == len(set(tried)) <= 40
    if found is not None:
        assert {found, min(found + 1, last)} <= set(tried)


def test_a_straight_line_takes_few_trials() -> None:
    tried: list[int] = []

    def fits(index: int) -> bool:
        tried.append(index)
        return index <= 29_184

    def used(index: int) -> tuple[int, int]:
        return 10**6 + 4999 * index // 10, 10**6 + 500 * index

    assert bisect(fits, used, 10**6 + 500 * 29_184, first=1, last=1 << 20) == 29_184
    assert len(tried) <= 7


def test_a_single_sample_is_tried_last() -> None:
    """Batch normalisation refuses it."""
    tried: list[int] = []

    def fits(index: int) -> bool:
        tried.append(index)
        return index <= 1

    assert bisect(fits, lambda n: (n, n), 1, first=1, last=8) == 1
    assert tried == [2, 1]


@given(st.integers(1, 1 << 24))
def test_powers_of_two_grow_by_a_few_doublings(most: int) -> None:
    def fits(index: int) -> bool:
        assert 1 << index <= 32 * max(most, 4)
        return 1 << index <= most

    def used(index: int) -> tuple[int, int]:
        return 1 << index, 1 << index

    found = bisect(fits, used, most, first=0, last=24, farthest=lambda index: index + 5)
    assert found == most.bit_length() - 1
