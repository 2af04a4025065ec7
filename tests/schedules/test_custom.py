"""`Custom`, and how anything becomes a schedule."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.strategies import by_batch, values

from stretto.errors import ConversionError, PlanWarning, ScheduleError, TimeError
from stretto.schedules import Constant, Cosine, Custom, MultiStep, Periods, Product, as_schedule
from stretto.timing import Horizon, Time, Timer, Timestamp


def test_it_reads_the_clock_at_the_timestamp() -> None:
    seen: list[Timer] = []

    def function(timer: Timer) -> float:
        seen.append(timer)
        return timer.get_elapsed_duration()

    run = Horizon("4ep", dataset_num_samples=10)
    stamp = Timestamp(epoch=1, batch=7, sample=13, token=99, sample_in_epoch=3)
    assert Custom(function).bind(run)(stamp) == 13 / 40
    assert seen[0].timestamp == stamp
    assert seen[0].get("ep") == Time("1.3ep")
    assert seen[0].get("tok") == Time("99tok")


def test_it_says_what_it_reads() -> None:
    def by_tokens(timer: Timer) -> float:
        return 0.5 ** float(timer.get("tok").amount)

    run = Horizon("4Ktok")
    assert Custom(by_tokens).reads(run) == {"ep", "ba", "sp", "tok"}  # "dur" is of the run's length
    schedule = Custom(by_tokens, reads="tok sec")
    assert schedule.reads(run) == {"tok", "sec"}
    assert repr(schedule).endswith(", reads='tok sec')")
    assert schedule.scaled(2) == schedule != Custom(by_tokens)
    with pytest.raises(TimeError, match="'hours'"):
        Custom(by_tokens, reads="hours")


def test_in_a_period_it_still_reads_the_clock_of_the_run() -> None:
    schedule = Periods([("4ba", 1.0), ("rest", lambda timer: timer.get_elapsed_duration())])
    assert values(schedule, Horizon("8ba"), by_batch(6))[4:] == [0.5, 0.625]


def test_in_a_period_it_can_read_the_time_in_the_period() -> None:
    """The design that periods come from: milestones and a triangle inside a period."""

    def milestones(timer: Timer) -> float:
        passed = timer.get_current_period_time()
        return 0.1 ** sum(passed >= Time(milestone) for milestone in ("0.5dur", "0.75dur"))

    def triangle(timer: Timer) -> float:
        passed = timer.get_current_period_frac_elapsed()
        return passed if passed <= 0.5 else 1 - passed

    run = Horizon("90ep", dataset_num_samples=100)
    stairs = Periods([("5%", triangle), ("rest", milestones)]).bind(run)
    marks = (0, 225, 360, 450, 4724, 4725, 6862, 6863)
    found = [stairs(Timestamp(sample=sample)) for sample in marks]
    assert found == pytest.approx([0.0, 0.5, 0.2, 1.0, 1.0, 0.1, 0.1, 0.01])


class TriangleScheduler:
    """The first of the two classes of that design, as it was written there."""

    def get_factor(self, timer: Timer) -> float:
        frac = timer.get_current_period_frac_elapsed()
        return frac if frac <= 0.5 else (1 - frac)


class MilestoneDecayScheduler:
    """The second; the list of drops is summed."""

    def __init__(self, milestones: list[Time], decay: float) -> None:
        super().__init__()
        self.milestones = milestones
        self.decay = decay

    def get_factor(self, timer: Timer) -> float:
        period_time = timer.get_current_period_time()
        num_drops = [m <= period_time for m in self.milestones]
        return self.decay ** sum(num_drops)


@pytest.mark.parametrize("inside", [True, False], ids=["in a period", "alone"])
@given(st.lists(st.sampled_from(["0.5dur", "25%", "2ep", "30ba", "201sp", "3.5ep", "1sp", "0ba"])))
def test_milestones_of_a_class_may_be_in_any_unit(inside: bool, milestones: list[str]) -> None:
    """In the same batches as `MultiStep`, also where a period begins inside a sample."""
    run = Horizon("7ep", dataset_num_samples=101, batch_sizes=10)
    written = MilestoneDecayScheduler([Time(one) for one in milestones], 0.5)
    steps = [MultiStep([one], 0.5) if Time(one) else Constant(0.5) for one in milestones]
    ours = Product(1.0, *steps)
    both = [as_schedule(one) for one in (written, ours)]
    if inside:
        both = [Periods([("5%", TriangleScheduler()), ("rest", one)]) for one in both]
    starts = [(batch, min(10 * batch - batch // 11 * 9, 706)) for batch in range(77)]
    stamps = [
        Timestamp(batch=b, sample=s, epoch=s // 101, sample_in_epoch=s % 101) for b, s in starts
    ]
    found, expected = ([bound(stamp) for stamp in stamps] for bound in (s.bind(run) for s in both))
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_time_of_a_period_compares_on_either_side_with_any_unit() -> None:
    stamp = Timestamp(batch=5, sample=50, sample_in_epoch=50)
    run = Horizon("2ep", dataset_num_samples=100)
    passed = Timer.at(stamp, run).get_current_period_time()
    assert Time("5ba") >= passed >= Time("50sp")
    assert Time("6ba") > passed < Time("0.6ep")
    assert Time("4ba") < passed > Time("20%")
    assert Time("0.5ep") <= passed <= Time("25%")
    assert passed == Time("25%")
    assert passed + Time("25%") == Time("50%")
    assert str(passed) == "0.25dur"
    with pytest.warns(UserWarning, match="no unit"):
        assert passed < 1


def test_a_fraction_of_a_run_that_only_counts_epochs_is_warned_of_once() -> None:
    stairs = Horizon("4ep")
    for read in (Timer.get_elapsed_duration, Timer.get_current_period_frac_elapsed):
        bound = as_schedule(lambda timer, read=read: 1 - read(timer)).bind(stairs)
        with pytest.warns(PlanWarning, match="'sp', 'ba' or 'tok'") as caught:
            assert [bound(Timestamp(epoch=epoch)) for epoch in (0, 1, 3)] == [1, 0.75, 0.25]
        assert len(caught) == 1
    for run in (Horizon("40ba"), Horizon("4ep", dataset_num_samples=10)):
        as_schedule(Timer.get_elapsed_duration).bind(run)(Timestamp())  # a warning is an error
    as_schedule(lambda timer: 0.5**timer.epoch).bind(stairs)(Timestamp(epoch=2))


def test_in_a_period_it_can_read_each_counter_from_where_the_period_began() -> None:
    seen: list[Time] = []

    def look(timer: Timer) -> float:
        seen[:] = [timer.get_current_period_time(unit) for unit in ("ep", "ba", "sp", "dur")]
        return 1.0

    inner = Periods([("50%", 1.0), ("rest", look)])
    run = Horizon("4ep", dataset_num_samples=10, batch_sizes=5)
    bound = Periods([("1ep", 1.0), ("2ep", inner), ("rest", 1.0)]).bind(run)
    bound(Timestamp(epoch=2, batch=5, sample=25, sample_in_epoch=5))
    assert seen == [Time("0.5ep"), Time("1ba"), Time("5sp"), Time("0.5dur")]


def test_outside_of_periods_the_period_is_the_run() -> None:
    schedule = as_schedule(lambda timer: timer.get_current_period_frac_elapsed())
    assert values(schedule, Horizon("8ba"), by_batch(4)) == [0.0, 0.125, 0.25, 0.375]


def test_the_fraction_of_a_period_whose_end_is_unknown_is_refused() -> None:
    schedule = Periods([("4ba", 1.0), ("rest", lambda t: t.get_current_period_frac_elapsed())])
    bound = schedule.bind(Horizon("2ep", dataset_num_samples=10))
    with pytest.raises(ConversionError, match="batch size"):
        bound(Timestamp(batch=4))


def test_it_may_return_any_number() -> None:
    for number in (1, 1.0, Fraction(1)):
        found = as_schedule(lambda _, number=number: number).bind(Horizon("8ba"))(Timestamp())
        assert type(found) is float
        assert found == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, None, "1"], ids=repr)
def test_what_is_not_a_factor_is_refused_when_it_is_returned(value: float) -> None:
    bound = as_schedule(lambda _: value).bind(Horizon("8ba"))
    with pytest.raises(ScheduleError, match="factor"):
        bound(Timestamp())


def test_a_number_is_a_constant() -> None:
    assert as_schedule(1) == as_schedule(Fraction(1)) == Constant(1.0)


def test_a_schedule_is_itself() -> None:
    schedule = Cosine()
    assert as_schedule(schedule) is schedule


def test_a_callable_object_is_a_schedule() -> None:
    class Halving:
        def __call__(self, timer: Timer) -> float:
            return 0.5**timer.batch

    schedule = as_schedule(Halving())
    assert values(schedule, Horizon("8ba"), by_batch(3)) == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("value", [None, True, "cosine", [1.0], 1j], ids=repr)
def test_what_is_no_schedule_is_refused(value: object) -> None:
    with pytest.raises(ScheduleError, match="schedule"):
        as_schedule(value)


def test_a_class_instead_of_a_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match="schedule"):
        as_schedule(Cosine)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf], ids=str)
def test_a_number_that_is_no_factor_is_refused(value: float) -> None:
    with pytest.raises(ScheduleError, match="finite"):
        as_schedule(value)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ScheduleError, match="called"):
        Custom(5)  # type: ignore[arg-type]


def test_scaling_leaves_the_callable_as_it_is() -> None:
    def function(timer: Timer) -> float:
        return 1.0

    assert Custom(function).scaled(2) == Custom(function)
