"""`Sum` and `Floor`: schedules added, and never below a factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.strategies import RUN, factors, leaves, samples_of_run

from stretto.errors import ConversionError, ScheduleError
from stretto.schedules import (
    Cosine,
    Custom,
    Floor,
    Linear,
    MultiStep,
    Periods,
    Schedule,
    StepDecay,
    Sum,
)
from stretto.timing import Horizon, Timestamp

Model = tuple[Schedule, Callable[[Timestamp], float]]
"""A schedule, and the same as plain arithmetic on what its leaves return."""


def added(one: Model, other: Model) -> Model:
    return one[0] + other[0], lambda now: one[1](now) + other[1](now)


def multiplied(one: Model, other: Model) -> Model:
    return one[0] * other[0], lambda now: one[1](now) * other[1](now)


def floored(one: Model, least: float) -> Model:
    return Floor(one[0], least), lambda now: max(one[1](now), least)


MODELS = st.recursive(
    leaves(with_functions=False).map(lambda leaf: (leaf, leaf.bind(RUN))),
    lambda inner: (
        st.builds(added, inner, inner)
        | st.builds(multiplied, inner, inner)
        | st.builds(floored, inner, factors())
    ),
    max_leaves=5,
)


@given(MODELS, st.lists(samples_of_run(), min_size=1, max_size=5))
def test_it_is_plain_arithmetic(model: Model, times: list[Timestamp]) -> None:
    schedule, expected = model
    bound = schedule.bind(RUN)
    assert [bound(now) for now in times] == [expected(now) for now in times]


def test_a_number_may_come_first() -> None:
    assert 0.1 + Cosine() == Sum(0.1, Cosine())
    assert Cosine() + 0.1 == Sum(Cosine(), 0.1)


def test_each_part_is_on_a_counter_of_its_own() -> None:
    bound = (StepDecay("1ep", 0.5) + MultiStep(["1m"], 0.25)).bind(Horizon("9ep"))
    assert bound(Timestamp(epoch=1)) == 1.5
    assert bound(Timestamp(epoch=1, run_nanoseconds=10**11)) == 0.75


def test_what_a_part_reads_is_read() -> None:
    tokens = Custom(lambda timer: 1.0, reads="tok")
    horizon = Horizon("9ep")
    for schedule in (1.0 + tokens, Floor(tokens, 0.1)):
        assert schedule.reads(horizon) == tokens.reads(horizon)


def test_a_part_that_does_not_fit_is_refused() -> None:
    for schedule in (1.0 + Linear(over="9ba"), Floor(Linear(over="9ba"), 0.5)):
        with pytest.raises(ConversionError):
            Periods([("1ep", 1.0), ("rest", schedule)]).bind(Horizon("9ep"))


@pytest.mark.parametrize("join", [lambda a, b: a + b, lambda a, b: a * b], ids=["sum", "product"])
def test_a_factor_beyond_all_floats_is_refused(join: Callable[[Any, Any], Schedule]) -> None:
    huge = Linear(1e308, 1.7e308)
    with pytest.raises(ScheduleError, match="finite"):
        join(huge, huge).bind(Horizon("9ba"))(Timestamp(batch=8))


def test_what_is_no_sum_or_floor_is_refused() -> None:
    with pytest.raises(ScheduleError, match="at least one"):
        Sum()
    with pytest.raises(ScheduleError, match="not a schedule"):
        Floor("cosine", 0.1)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="least"):
        Floor(Cosine(), -0.1)
