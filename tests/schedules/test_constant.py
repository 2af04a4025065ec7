"""`Constant`: one factor throughout."""

from __future__ import annotations

from hypothesis import given
from tests.schedules.strategies import RUN, factors, samples_of_run

from stretto.schedules import Constant
from stretto.timing import Horizon, Timestamp


@given(factors(), samples_of_run())
def test_it_is_the_same_at_any_time(value: float, timestamp: Timestamp) -> None:
    assert Constant(value).bind(RUN)(timestamp) == value


def test_it_needs_to_know_nothing() -> None:
    assert Constant(0.5).bind(Horizon("1h"))(Timestamp(batch=10**9)) == 0.5
