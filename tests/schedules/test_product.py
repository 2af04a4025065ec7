"""`Product`: several schedules multiplied."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.strategies import RUN, by_batch, leaves, samples_of_run, values

from stretto.errors import ConversionError, ScheduleError
from stretto.schedules import Cosine, Linear, MultiStep, Periods, Product, Schedule, StepDecay
from stretto.timing import Horizon, Timestamp


@given(st.lists(leaves(), min_size=1, max_size=3), samples_of_run())
def test_it_is_the_product_of_the_factors(parts: list[Schedule], timestamp: Timestamp) -> None:
    expected = math.prod((part.bind(RUN)(timestamp) for part in parts), start=1.0)
    assert Product(*parts).bind(RUN)(timestamp) == expected


def test_each_part_is_on_a_counter_of_its_own() -> None:
    # Epochs, batches and seconds can't be brought to one unit here, and needn't be.
    schedule = StepDecay("1ep", 0.5) * Linear(0, 1, over="4ba") * MultiStep(["1m"], 0.1)
    bound = schedule.bind(Horizon("9ep"))
    assert bound(Timestamp(epoch=1, batch=2, run_nanoseconds=10**9)) == 0.25
    assert bound(Timestamp(epoch=1, batch=2, run_nanoseconds=10**11)) == pytest.approx(0.025)


def test_in_a_period_the_parts_share_its_counter() -> None:
    product = StepDecay("1ep", 0.5) * MultiStep(["1m"], 0.1)
    with pytest.raises(ConversionError, match="batch"):
        Periods([("1ep", 1.0), ("rest", product)]).bind(Horizon("9ep", dataset_num_samples=3))


def test_a_warm_up_that_leaves_milestones_where_they_are() -> None:
    found = values(MultiStep(["5ba"], 0.5) * Linear(0, 1, over="4ba"), Horizon("10ba"), by_batch(7))
    assert found == [0.0, 0.25, 0.5, 0.75, 1.0, 0.5, 0.5]


def test_it_is_compared_by_its_parts() -> None:
    assert Cosine() * StepDecay("1ep") == Product(Cosine(), StepDecay("1ep"))
    assert Cosine() * StepDecay("1ep") != Product(StepDecay("1ep"), Cosine())


def test_a_product_of_nothing_is_refused() -> None:
    with pytest.raises(ScheduleError, match="product"):
        Product()


@pytest.mark.parametrize("other", ["cosine", None], ids=repr)
def test_what_is_no_schedule_is_refused(other: float) -> None:
    with pytest.raises(ScheduleError, match="schedule"):
        _ = Cosine() * other
