"""What comes on top of tensors, extended to other sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stretto.memory.calibration import Overhead


def test_nothing_is_known_at_first() -> None:
    overhead = Overhead()
    assert (overhead.at(5), overhead.is_known) == (0, True)
    overhead.note(4, took=None, foretold=7)
    assert not overhead.is_known


def test_less_than_foretold_is_nothing() -> None:
    overhead = Overhead()
    overhead.note(4, took=3, foretold=7)
    assert overhead.at(100) == 0


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**9)), min_size=1, max_size=4))
def test_it_grows_at_least_in_proportion_and_meets_the_last_measurement(
    noted: list[tuple[int, int]],
) -> None:
    overhead = Overhead()
    for size, extra in noted:
        overhead.note(size, took=100 + extra, foretold=100)
    last = max(size for size, _ in noted)
    assert overhead.at(last) == dict(noted)[last]
    values = [overhead.at(last * times) for times in (1, 2, 5, 9)]
    assert values == sorted(values)
    assert all(
        value >= times * values[0] for value, times in zip(values, (1, 2, 5, 9), strict=True)
    )


def test_what_grows_faster_goes_on_so() -> None:
    overhead = Overhead()
    overhead.note(10, took=0, foretold=0)
    overhead.note(20, took=100, foretold=0)
    assert overhead.at(40) == 300
