"""What is accepted as an argument of a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from stretto._foreign import arguments_of
from stretto.errors import ScheduleError, TimeError
from stretto.schedules import BoundSchedule, Constant, Schedule, Scope
from stretto.schedules.fields import (
    Factor,
    Interval,
    Length,
    checked_factor,
    checked_interval,
    checked_length,
    one_of,
)
from stretto.timing import Time

NUMBERS = [0, 1, 0.25, Fraction(1, 4), Decimal("0.25"), np.float32(0.25), np.int64(3)]
NO_FACTORS = [-1, -0.1, math.nan, math.inf, -math.inf, "1", None, True, 1j, [1.0], 10**400]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_any_number_is_a_factor(number: float) -> None:
    assert type(Constant(number).value) is float
    assert Constant(number).value == number


@pytest.mark.parametrize("value", NO_FACTORS, ids=lambda value: repr(value)[:20])
def test_what_is_not_a_factor_is_refused_by_name(value: object) -> None:
    with pytest.raises(ScheduleError, match="finite"):
        Constant(value)  # type: ignore[arg-type]


def test_a_negative_zero_becomes_a_plain_one() -> None:
    assert math.copysign(1, Constant(-0.0).value) == 1


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_a_function_may_return_any_number(number: float) -> None:
    assert type(checked_factor(number, len)) is float


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", None, [1.0], 10**400])
def test_what_else_a_function_returns_is_refused(value: object) -> None:
    with pytest.raises(ScheduleError, match="factor"):
        checked_factor(value, len)


@pytest.mark.parametrize("value", ["0ba", "5%", Time("5ep"), timedelta(hours=1)], ids=str)
def test_a_length_may_be_nothing(value: str | Time | timedelta) -> None:
    assert checked_length(value, "over") == Time(value)


def test_lengths_are_not_negative() -> None:
    with pytest.raises(ScheduleError, match="negative"):
        checked_length("-5ba", "over")


@pytest.mark.parametrize("value", ["0ba", "-1ep", "0%"])
def test_intervals_are_longer_than_nothing(value: str) -> None:
    with pytest.raises(ScheduleError, match="longer"):
        checked_interval(value, "every")


@pytest.mark.parametrize("value", [5, None, 0.5, "5", "5epochs"], ids=repr)
def test_what_is_not_a_time_is_refused(value: str) -> None:
    for read in (checked_length, checked_interval):
        with pytest.raises(TimeError, match="read"):
            read(value, "over")


@dataclass(frozen=True, slots=True, repr=False)
class Sawtooth(Schedule):
    """A schedule of somebody's own: its fields say all but the values."""

    every: Interval
    low: Factor = 0.0
    wait: Length | None = None

    def within(self, scope: Scope) -> BoundSchedule:
        return lambda timestamp: self.low


def test_times_stretching_and_repr_follow_from_the_fields() -> None:
    mine = Sawtooth("2ba", wait="10%")
    assert mine.times() == (Time("2ba"), Time("10%"))
    assert mine.scaled(2) == Sawtooth("4ba", wait="10%")
    assert (mine * 0.5).times() == mine.times()
    assert repr(mine) == "Sawtooth('2ba', wait='0.1dur')"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Sawtooth("0ba"), "use every='0ba': it is not longer than 0"),
        (lambda: Sawtooth("1ba", low=-1), "use low=-1"),
        (lambda: Sawtooth("1ba", wait="-1ba"), "use wait='-1ba'"),
    ],
)
def test_fields_are_checked_by_their_annotation(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        make()


def test_a_choice_that_does_not_exist_names_the_nearest() -> None:
    assert one_of("up", "rounding", ("down", "up")) == "up"
    with pytest.raises(ScheduleError, match="rounding"):
        one_of("dwon", "rounding", ("down", "up"))


def test_the_arguments_of_a_class_are_those_of_its_init() -> None:
    """Which of the two a signature shows depends on Python's version."""

    class Made(Constant):  # type: ignore[misc]
        def __new__(cls, *_: object, **named: object) -> Made:
            return object.__new__(cls)

    assert [*arguments_of(Made)] == [*arguments_of(Constant)] == ["value", "warmup", "warmup_start"]
    assert eval(repr(Made(0.5)), {"Made": Made}) == Made(0.5)
