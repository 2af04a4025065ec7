"""`CosineRestarts`: cosine decay that starts anew."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.strategies import by_batch, values

from stretto.errors import ScheduleError
from stretto.schedules import CosineRestarts
from stretto.timing import Horizon, Time, Timestamp


@given(
    st.fractions(Fraction(1, 9), 12, max_denominator=20),
    st.integers(1, 4),
    st.integers(0, 299),
)
def test_it_is_the_formula_cycle_by_cycle(first: Fraction, multiplier: int, sample: int) -> None:
    bound = CosineRestarts(Time(first, "ep"), multiplier, end=0.1).bind(
        Horizon("10ep", dataset_num_samples=30)
    )
    passed, cycle = Fraction(sample, 30), first
    while passed >= cycle:
        passed -= cycle
        cycle *= multiplier
    expected = 0.1 + 0.9 * (1 + math.cos(math.pi * float(passed / cycle))) / 2
    assert bound(Timestamp(sample=sample)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("first", "multiplier"), [("5ba", 1), ("10ba", 1), ("2ba", 4), ("10ba", 2)]
)
def test_a_restart_on_the_end_is_not_taken(first: str, multiplier: int) -> None:
    schedule = CosineRestarts(first, multiplier, end=0.25)
    assert values(schedule, Horizon("10ba"), by_batch(30))[10:] == [0.25] * 20


def test_a_cycle_that_the_end_cuts_is_held_there() -> None:
    schedule = CosineRestarts("4ba")
    assert values(schedule, Horizon("10ba"), by_batch(30))[10:] == pytest.approx([0.5] * 20)


def test_without_an_end_it_goes_on() -> None:
    bound = CosineRestarts("1ba", 2).bind(Horizon("1h"))
    assert bound(Timestamp(batch=2**40 - 1)) == 1.0
    assert bound(Timestamp(batch=2**40 - 2)) == pytest.approx(0.0)


@pytest.mark.parametrize("multiplier", [0, -1, 1.5, True, "2", None], ids=repr)
def test_cycles_grow_by_whole_numbers(multiplier: int) -> None:
    with pytest.raises(ScheduleError, match="integer"):
        CosineRestarts("1ep", multiplier)
