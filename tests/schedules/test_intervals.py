"""`Exponential`, `StepDecay` and `MultiStep`."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.strategies import by_batch, values

from stretto.errors import ConversionError, ScheduleError
from stretto.schedules import Exponential, MultiStep, Periods, StepDecay
from stretto.timing import Horizon, Time, Timestamp


class Doubling:
    """Four batches of 2, four of 4, four of 8, and so on."""

    def sample_at_batch(self, batch: int, /) -> int:
        rounds, within = divmod(batch, 4)
        return 8 * ((1 << rounds) - 1) + within * (2 << rounds)

    def batch_at_sample(self, sample: int, /) -> int:
        batch = 0
        while self.sample_at_batch(batch) < sample:
            batch += 1
        return batch


@given(st.fractions(Fraction(1, 7), 3, max_denominator=30), st.integers(0, 299))
def test_steps_fall_exactly_on_their_intervals(every: Fraction, sample: int) -> None:
    run = Horizon("10ep", dataset_num_samples=30)
    bound = StepDecay(Time(every, "ep"), 0.5).bind(run)
    expected = Fraction(sample, 30) // every
    assert bound(Timestamp(sample=sample)) == 0.5**expected


@given(
    st.sets(st.fractions(Fraction(1, 50), 1, max_denominator=50), min_size=1, max_size=6),
    st.integers(0, 299),
)
def test_milestones_are_reached_exactly(parts: set[Fraction], sample: int) -> None:
    run = Horizon("10ep", dataset_num_samples=30)
    bound = MultiStep([Time(part, "dur") for part in sorted(parts)], 0.5).bind(run)
    reached = sum(Fraction(sample, 300) >= part for part in parts)
    assert bound(Timestamp(sample=sample)) == 0.5**reached


@given(st.fractions(Fraction(1, 7), 3, max_denominator=30), st.integers(0, 300))
def test_exponential_decay_is_smooth(every: Fraction, sample: int) -> None:
    bound = Exponential(Time(every, "ep"), 0.5).bind(Horizon("10ep", dataset_num_samples=30))
    expected = 0.5 ** float(Fraction(sample, 30) / every)
    assert bound(Timestamp(sample=sample)) == pytest.approx(expected, rel=1e-13)


def test_milestones_may_be_of_any_units() -> None:
    run = Horizon("10ep", dataset_num_samples=30, batch_sizes=10, tokens_per_sample=2)
    bound = MultiStep(["3ba", "2ep", "75sp", "300tok", "60%"], 0.5).bind(run)
    for sample in range(0, 300, 10):
        reached = sum(sample >= mark for mark in (30, 60, 75, 150, 180))
        now = Timestamp(batch=sample // 10, sample=sample, token=2 * sample)
        assert bound(now) == 0.5**reached


def test_an_interval_in_batches_is_even_in_batches_under_a_ramp() -> None:
    sizes = Doubling()
    run = Horizon("20ep", dataset_num_samples=12, batch_sizes=sizes)
    step = Periods([("1ep", 1.0), ("rest", StepDecay("3ba", 0.5))]).bind(run)
    smooth = Periods([("1ep", 1.0), ("rest", Exponential("3ba", 0.5))]).bind(run)
    # The first epoch ends at sample 12, where the sixth batch (number 5) begins.
    for batch in range(16):
        stamp = Timestamp(batch=batch, sample=sizes.sample_at_batch(batch))
        assert step(stamp) == 0.5 ** (max(batch - 5, 0) // 3)
        assert smooth(stamp) == pytest.approx(0.5 ** (max(batch - 5, 0) / 3))


def test_an_interval_that_cannot_be_counted_is_refused() -> None:
    adaptive = Horizon("20ep", dataset_num_samples=12)
    assert values(StepDecay("3ba", 0.5), adaptive, by_batch(4)) == [1, 1, 1, 0.5]
    with pytest.raises(ConversionError, match="advance"):
        Periods([("1ep", 1.0), ("rest", StepDecay("3ba"))]).bind(adaptive)


@pytest.mark.parametrize(
    "schedule", [StepDecay("5ba", 0.5), MultiStep(["5ba", "10ba"], 0.5)], ids=str
)
def test_a_step_on_the_end_is_not_taken(schedule: StepDecay) -> None:
    assert values(schedule, Horizon("10ba"), by_batch(20))[5:] == [0.5] * 15


def test_milestones_beyond_the_end_are_not_reached() -> None:
    # A short trial run of a long schedule is a thing to want.
    schedule = MultiStep(["30ep", "60ep"])
    assert schedule.bind(Horizon("1ep", dataset_num_samples=5))(Timestamp(sample=10**6)) == 1.0


@pytest.mark.parametrize(
    "milestones",
    [["60ep", "30ep"], ["30ep", "30ep"], ["60ep", "50%"], ["3ba", "1ep"]],
    ids=str,
)
def test_milestones_come_in_order(milestones: list[str]) -> None:
    run = Horizon("90ep", dataset_num_samples=10, batch_sizes=5)
    with pytest.raises(ScheduleError, match="later"):
        MultiStep(milestones).bind(run)


@pytest.mark.parametrize("milestones", ["30ep", [], None, Time("30ep"), {"30ep"}], ids=repr)
def test_milestones_are_a_list(milestones: list[str]) -> None:
    with pytest.raises(ScheduleError, match="times"):
        MultiStep(milestones)


def test_a_milestone_is_not_the_start() -> None:
    with pytest.raises(ScheduleError, match="milestone='0ep'"):
        MultiStep(["0ep", "30ep"])


def test_growth_is_bounded_by_the_end() -> None:
    # The learning rate range test: from 1e-3 to 1e3 over the run.
    found = values(0.001 * Exponential("1dur", 1e6), Horizon("100ba"), by_batch(200))
    assert found[50] == pytest.approx(1.0)
    assert found[-1] == pytest.approx(1000.0)
    assert values(StepDecay("5ba", 2), Horizon("10ba"), by_batch(99))[-1] == 2.0


def test_growth_beyond_all_floats_is_refused() -> None:
    for schedule in (Exponential("1ba", 2), StepDecay("1ba", 2)):
        with pytest.raises(ScheduleError, match="beyond"):
            schedule.bind(Horizon("2_000ba"))
    with pytest.raises(ScheduleError, match="beyond"):
        MultiStep(["1ep", "2ep", "3ep", "4ep"], 1e100)


def test_a_gamma_of_nothing_turns_off() -> None:
    assert values(StepDecay("2ba", 0), Horizon("9ba"), by_batch(4)) == [1, 1, 0, 0]
    assert values(MultiStep(["2ba"], 0), Horizon("9ba"), by_batch(4)) == [1, 1, 0, 0]
    assert values(Exponential("2ba", 0), Horizon("9ba"), by_batch(4)) == [1, 0, 0, 0]


def test_a_decay_goes_on_for_ever_where_there_is_no_end() -> None:
    bound = Exponential("1ba", 0.5).bind(Horizon("1h"))
    assert [bound(Timestamp(batch=batch)) for batch in (0, 1, 10, 10**6)] == [1, 0.5, 2**-10, 0]
