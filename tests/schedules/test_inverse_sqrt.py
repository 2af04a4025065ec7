"""`InverseSqrt`: decay with the square root of time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.strategies import by_batch, values

from stretto.errors import ScheduleError
from stretto.schedules import InverseSqrt, Periods
from stretto.timing import Horizon, Time, Timestamp


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 200))
def test_it_is_the_formula(timescale: int, warmup: int, batch: int) -> None:
    schedule = InverseSqrt(Time(timescale, "ba"), warmup=Time(warmup, "ba"))
    found = schedule.bind(Horizon("200ba"))(Timestamp(batch=batch))
    if batch < warmup:
        expected = batch / warmup
    else:
        expected = math.sqrt(timescale / (timescale + batch - warmup))
    assert found == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("least", [0.0, 0.1, 0.4, 1.0])
def test_a_floor_is_megatrons_and_levanters_and_an_end_is_olmo_cores(least: float) -> None:
    floored = values(InverseSqrt(warmup="4ba", floor=least), Horizon("200ba"), by_batch(200))
    tending = values(InverseSqrt(warmup="4ba", end=least), Horizon("200ba"), by_batch(200))
    for batch in range(4, 200):
        root = math.sqrt(4 / batch)
        assert floored[batch] == pytest.approx(max(root, least), rel=1e-14)
        assert tending[batch] == pytest.approx(least + (1 - least) * root, rel=1e-14)
    assert floored[:5] == tending[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_floor_is_no_more_than_the_decay_begins_with() -> None:
    with pytest.raises(ScheduleError, match="begins"):
        InverseSqrt("4ba", floor=1.5)


@pytest.mark.parametrize("warmup", ["4ba", "20%", "0.2dur"])
def test_the_warm_up_is_the_time_scale_where_none_is_given(warmup: str) -> None:
    found = values(InverseSqrt(warmup=warmup), Horizon("20ba"), by_batch(20))
    assert found[16] == 0.5
    assert found == values(InverseSqrt("4ba", warmup=warmup), Horizon("20ba"), by_batch(20))


def test_in_a_period_it_is_relative_to_the_period() -> None:
    schedule = Periods([("10ba", 0.5), ("rest", InverseSqrt(warmup="10%"))])
    found = values(schedule, Horizon("50ba"), by_batch(50))
    assert found[10:] == values(InverseSqrt(warmup="10%"), Horizon("40ba"), by_batch(40))


@pytest.mark.parametrize("warmup", [None, "0ba", "0%"])
def test_there_is_something_to_measure_by(warmup: str | None) -> None:
    with pytest.raises(ScheduleError, match="timescale"):
        InverseSqrt(warmup=warmup)
