"""The sizes that are candidates, against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import FitError
from stretto.memory.search import CandidateSizes

COUNTS = st.integers(1, 3_000)


@st.composite
def wanted(draw: st.DrawFn) -> CandidateSizes:
    minimum = draw(st.integers(1, 200))
    power_of_two = draw(st.booleans())
    multiple_of = draw(st.sampled_from([1, 2, 8]) if power_of_two else st.integers(1, 50))
    maximum = draw(st.integers(minimum, 2_000))
    try:
        return CandidateSizes(minimum, maximum, multiple_of, power_of_two)
    except FitError:
        return CandidateSizes(minimum, 2_048, multiple_of, power_of_two)


def brute(sizes: CandidateSizes) -> list[int]:
    return [
        size
        for size in range(sizes.minimum, sizes.maximum + 1)
        if size % sizes.multiple_of == 0 and (not sizes.power_of_two or size & (size - 1) == 0)
    ]


@given(wanted(), COUNTS)
def test_sizes(sizes: CandidateSizes, size: int) -> None:
    every = brute(sizes)
    assert (sizes.smallest, sizes.at_most(sizes.maximum)) == (every[0], every[-1])
    assert sizes.at_most(size) == max((one for one in every if one <= size), default=None)
    assert sizes.above(size) == min((one for one in every if one > size), default=None)


@given(wanted())
def test_indices_count_the_sizes(sizes: CandidateSizes) -> None:
    first, last = sizes.indices
    assert [sizes.number(index) for index in range(first, last + 1)] == brute(sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minimum": 0}, "minimum=0"),
        ({"maximum": 2.5}, r"maximum=2\.5"),
        ({"multiple_of": True}, "multiple_of=True"),
        ({"multiple_of": 3, "power_of_two": True}, "power of two that is a multiple of 3"),
        ({"minimum": 5, "maximum": 7, "multiple_of": 4}, "no multiple of 4 among them"),
        ({"minimum": 5, "maximum": 7, "power_of_two": True}, "no power of two among them"),
        ({"minimum": 9, "maximum": 7}, "no integer among them"),
    ],
)
def test_wishes_that_nothing_meets(options: dict[str, int], message: str) -> None:
    with pytest.raises(FitError, match=message):
        CandidateSizes(**options)  # type: ignore[arg-type]
