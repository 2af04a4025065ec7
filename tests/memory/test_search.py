"""The largest size that fits: against brute force, and never one that was not tried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import FitError
from stretto.memory.search import CandidateSizes, Found, search

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


class Trials:
    """Remembers what was tried."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sizes: list[int] = []

    def __call__(self, size: int) -> bool:
        self.sizes.append(size)
        return size <= self.limit


def checked(found: Found, sizes: CandidateSizes, tried: Trials) -> Found:
    assert found.size in tried.sizes
    assert found.size <= tried.limit
    assert len(set(tried.sizes)) == len(tried.sizes)
    assert set(tried.sizes) <= set(brute(sizes))
    failed = [size for size in tried.sizes if size > tried.limit]
    assert found.too_large == min(failed, default=None)
    return found


@given(wanted(), COUNTS, st.none() | COUNTS)
def test_bisection_finds_the_largest(sizes: CandidateSizes, limit: int, guess: int | None) -> None:
    truth = max((size for size in brute(sizes) if size <= limit), default=None)
    if truth is None:
        with pytest.raises(FitError, match=str(sizes.smallest)):
            search(lambda size: size <= limit, sizes, guess=guess)
        return
    tried = Trials(limit)
    found = checked(search(tried, sizes, guess=guess), sizes, tried)
    assert found.size == truth
    assert found.too_large == sizes.above(truth)
    assert len(tried.sizes) <= 2 * len(brute(sizes)).bit_length() + 8


@given(wanted(), COUNTS, st.none() | COUNTS)
def test_halving_finds_one_that_fits(sizes: CandidateSizes, limit: int, guess: int | None) -> None:
    if sizes.smallest > limit:
        with pytest.raises(FitError, match="not"):
            search(lambda size: size <= limit, sizes, guess=guess, halves=True)
        return
    tried = Trials(limit)
    found = checked(search(tried, sizes, guess=guess, halves=True), sizes, tried)
    truth = max(size for size in brute(sizes) if size <= limit)
    begin = (sizes.at_most(guess) if guess else None) or max(brute(sizes))
    # At most half is lost, and what rounding down to a wanted size costs.
    assert found.size >= min(truth, begin) // 2 - sizes.multiple_of or sizes.power_of_two
    assert sum(size <= limit for size in tried.sizes) == 1


@given(COUNTS, st.floats(0.01, 0.5))
def test_near_enough(limit: int, within: float) -> None:
    sizes = CandidateSizes(maximum=100_000)
    tried = Trials(limit)
    found = checked(search(tried, sizes, within=within), sizes, tried)
    assert found.size >= limit / (1 + within) - 1


def test_a_right_guess_takes_two_trials() -> None:
    tried = Trials(1_000)
    assert search(tried, CandidateSizes(), guess=1_000) == Found(1_000, 1_001)
    assert tried.sizes == [1_000, 1_001]


@pytest.mark.parametrize("guess", [990, 1_010])
def test_a_near_guess_takes_few(guess: int) -> None:
    tried = Trials(1_000)
    assert search(tried, CandidateSizes(), guess=guess).size == 1_000
    assert len(tried.sizes) <= 10


def test_what_does_not_end_is_bounded() -> None:
    found = search(lambda size: True, CandidateSizes(maximum=100))
    assert (found.size, found.too_large) == (100, None)


def test_a_size_is_never_returned_that_was_not_tried() -> None:
    # Not even where sizes fit or not without any order.
    tried = {}

    def fits(size: int) -> bool:
        tried[size] = size % 3 != 0
        return tried[size]

    for maximum in range(1, 60):
        for guess in (None, 7, 30):
            tried.clear()
            assert tried[search(fits, CandidateSizes(maximum=maximum), guess=guess).size]


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
