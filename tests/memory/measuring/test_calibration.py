"""What comes on top of tensors, extended to other sizes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.memory.measuring.calibration import CHANCE, Overhead, RetainedMemory


def test_nothing_is_known_at_first() -> None:
    overhead = Overhead()
    assert (overhead.at(5), overhead.is_known) == (0, True)
    overhead.note(4, took=None, predicted=7)
    assert not overhead.is_known


def test_less_than_foretold_is_nothing() -> None:
    overhead = Overhead()
    overhead.note(4, took=3, predicted=7)
    assert overhead.at(100) == 0


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**9)), min_size=1, max_size=4))
def test_what_is_no_chance_grows_in_proportion_and_the_last_measurement_is_met(
    noted: list[tuple[int, int]],
) -> None:
    overhead = Overhead()
    for size, extra in noted:
        overhead.note(size, took=extra, predicted=0)
    last = max(size for size, _ in noted)
    assert overhead.at(last) == dict(noted)[last]
    values = [overhead.at(last * times) for times in (1, 2, 5, 9)]
    assert values == sorted(values)
    sure = values[0] - math.ceil(CHANCE * values[0])
    assert all(
        value >= values[0] + (times - 1) * sure
        for value, times in zip(values, (1, 2, 5, 9), strict=True)
    )


def test_chance_is_not_extended() -> None:
    overhead = Overhead()
    overhead.note(10, took=1_009, predicted=1_000)
    assert [overhead.at(size) for size in (10, 20, 1_000)] == [9, 9, 9]
    # Of 50 bytes on top, 21 are chance; of the 41 that they have grown by, too.
    overhead.note(20, took=2_050, predicted=2_000)
    assert overhead.at(40) == 50 + 2 * (41 - 21)


@given(st.integers(1, 10**4), st.integers(1, 50))
def test_a_byte_more_never_makes_a_leap(predicted: int, times: int) -> None:
    """Chance that is a little over its bound is not extended as a whole."""
    bound = predicted // 99
    answers = []
    for extra in (bound, bound + 1):
        overhead = Overhead()
        overhead.note(10, took=predicted + extra, predicted=predicted)
        answers.append(overhead.at(10 * times))
    assert 0 <= answers[1] - answers[0] <= 1 + times


def test_what_grows_faster_goes_on_so() -> None:
    overhead = Overhead()
    overhead.note(10, took=0, predicted=0)
    overhead.note(20, took=100, predicted=0)
    assert overhead.at(40) == 100 + 2 * (100 - 1)


@pytest.mark.parametrize(("sizes", "room"), [(1, 880), (2, 880), (3, 900), (5, 940)])
def test_what_is_kept_for_sizes_that_a_run_does_not_have_is_there_for_it(
    sizes: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 120 bytes that are gone, a library keeps 20 for each size."""
    own = iter([500, 520])
    monkeypatch.setattr(
        "stretto.memory.measuring.calibration.process_status",
        lambda: {"VmData": next(own), "VmRSS": 0},
    )
    retained = RetainedMemory(lambda: 880, is_limited=True)
    assert retained.room_in_run(sizes) is None
    retained.watch(lambda: None)
    assert retained.room_in_run(sizes) == room


def test_what_others_give_back_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    own = iter([500, 400])
    monkeypatch.setattr(
        "stretto.memory.measuring.calibration.process_status", lambda: {"VmRSS": next(own)}
    )
    retained = RetainedMemory(lambda: 880, is_limited=False)
    retained.watch(lambda: None)
    assert retained.room_in_run(9) == 880
