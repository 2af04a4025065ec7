"""Warm-up: a period of its own before a schedule."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.strategies import RUN, by_batch, leaves, samples_of_run, values

from stretto.errors import ConversionError, ScheduleError
from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    InverseSqrt,
    Linear,
    Periods,
    Polynomial,
    Schedule,
)
from stretto.schedules.fields import fill
from stretto.schedules.schedule import WarmedUp
from stretto.timing import Horizon, Timestamp


@given(leaves(with_functions=False), st.lists(samples_of_run(), min_size=1, max_size=9))
def test_a_warm_up_is_a_period_before_the_rest(
    schedule: Schedule, timestamps: list[Timestamp]
) -> None:
    if not isinstance(schedule, WarmedUp) or schedule.warmup is None:
        return
    if isinstance(schedule, (InverseSqrt, WSD)):  # they also measure the run with the warm-up
        return
    bare = copy.copy(schedule)
    fill(bare, warmup=None)
    rise = Linear(schedule.warmup_start, schedule.first_factor())
    periods = Periods([(schedule.warmup, rise), ("rest", bare)])
    assert values(schedule, RUN, timestamps) == values(periods, RUN, timestamps)


@pytest.mark.parametrize(
    "schedule",
    [
        Constant(0.5, warmup="4ba"),
        Linear(0.5, warmup="4ba"),
        Cosine(0.5, warmup="4ba"),
        Polynomial(0.5, warmup="4ba"),
        CosineRestarts("3ba", start=0.5, warmup="4ba"),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_it_rises_to_the_first_value(schedule: Schedule) -> None:
    assert values(schedule, Horizon("10ba"), by_batch(5)) == [0.0, 0.125, 0.25, 0.375, 0.5]


def test_it_may_fall() -> None:
    found = values(Constant(1, warmup="4ba", warmup_start=3), Horizon("10ba"), by_batch(5))
    assert found == [3.0, 2.5, 2.0, 1.5, 1.0]


def test_it_may_end_between_two_batches() -> None:
    run = Horizon("10ep", dataset_num_samples=10)
    found = values(Constant(warmup="0.25ep"), run, by_batch(4))
    assert found == pytest.approx([0.0, 0.4, 0.8, 1.0])


def test_it_may_be_in_another_unit_than_the_run() -> None:
    run = Horizon("10ep", dataset_num_samples=12, batch_sizes=5)
    bound = Linear(warmup="4ba").bind(run)
    # Batches 5, 5, 2, 5 of the first epochs: four of them are 17 samples.
    starts = [Timestamp(batch=b, sample=s) for b, s in ((0, 0), (3, 12), (4, 17), (17, 68))]
    assert [bound(now) for now in starts] == [0.0, 0.75, 1.0, 52 / 103]


def test_batches_are_refused_while_sizes_are_not_known() -> None:
    adaptive = Horizon("10ep", dataset_num_samples=12)
    assert values(Constant(warmup="4ba"), adaptive, by_batch(5))[-1] == 1.0
    with pytest.raises(ConversionError, match="advance"):
        Cosine(warmup="4ba").bind(adaptive)


@pytest.mark.parametrize("warmup", ["11ba", "101%", "1.5dur"])
def test_it_is_not_longer_than_the_run(warmup: str) -> None:
    with pytest.raises(ScheduleError, match="long"):
        Cosine(warmup=warmup).bind(Horizon("10ba"))


def test_it_is_not_longer_than_its_period() -> None:
    schedule = Periods([("4ba", Cosine(warmup="5ba")), ("rest", Constant())])
    with pytest.raises(ScheduleError, match="warm"):
        schedule.bind(Horizon("10ba"))


def test_it_may_be_all_of_the_run() -> None:
    assert values(Constant(warmup="100%"), Horizon("4ba"), by_batch(5)) == [0, 0.25, 0.5, 0.75, 1]


def test_how_long_a_way_is_does_not_include_the_warm_up() -> None:
    """Megatron's `--lr-decay-samples` does: it is `warmup` and `over` together."""
    found = values(Linear(1, 0, warmup="10ba", over="20ba"), Horizon("50ba"), by_batch(50))
    decay_steps, warmup_steps = 30, 10
    for step in range(50):
        if step <= warmup_steps:
            expected = step / warmup_steps
        else:
            expected = 1 - min(1, (step - warmup_steps) / (decay_steps - warmup_steps))
        assert found[step] == pytest.approx(expected)
