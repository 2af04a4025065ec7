"""`InverseSqrt`: decay with the square root of time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import ScheduleError
from stretto.schedules import InverseSqrt, Periods
from stretto.testing.schedules import by_batch, values
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
    with pytest.raises(ScheduleError, match="neither a warm-up nor a time scale"):
        InverseSqrt(warmup=warmup)


def test_it_is_described_in_words() -> None:
    text = "inverse square root of time"
    assert str(InverseSqrt("4ba")) == f"{text} on the scale of 4ba"
    assert str(InverseSqrt(warmup="4ba")) == f"{text}, after a warm-up from 0 over 4ba"
