"""What holds for every schedule."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import fields
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.strategies import RUN, by_batch, leaves, samples_of_run, schedules, values

from stretto import schedules as face
from stretto.errors import ConversionError, ScheduleError, TimeError
from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Curve,
    Custom,
    Exponential,
    Floor,
    InverseSqrt,
    Linear,
    MultiStep,
    Periods,
    Polynomial,
    Product,
    Schedule,
    StepDecay,
    Sum,
    as_schedule,
)
from stretto.timing import Horizon, Time, Timer, Timestamp
from stretto.timing.epochs import known_counts, unknown_counters

ENDLESS = 10**30


def bounds(schedule: Schedule) -> tuple[float, float]:
    """Return the least and the greatest factor that a schedule of the strategies may have."""
    match schedule:
        case Product(schedules=parts):
            return (
                math.prod(bounds(part)[0] for part in parts),
                math.prod(bounds(part)[1] for part in parts),
            )
        case Sum(schedules=parts):
            return sum(bounds(part)[0] for part in parts), sum(bounds(part)[1] for part in parts)
        case Floor(schedule=Schedule() as inside, least=least):
            return max(bounds(inside)[0], least), max(bounds(inside)[1], least)
        case Periods(periods=parts):
            inner = [bounds(part) for _, part in parts]
            return min(low for low, _ in inner), max(high for _, high in inner)
        case Constant(value=value):
            ends = [value]
        case Linear() | Cosine() | Polynomial() | CosineRestarts():
            ends = [schedule.start, schedule.end]
        case WSD(end=end):
            ends = [1.0, end]
        case InverseSqrt(end=end, floor=floor):
            ends = [max(end, floor), 1.0]
        case Custom():
            ends = [0.5, 1.0]
        case Curve():
            ends = [0.0, 0.5]
        case _:  # the other decays from 1
            ends = [0.0, 1.0]
    warmup = getattr(schedule, "warmup", None)
    ends += [schedule.warmup_start] if warmup else []  # type: ignore[attr-defined]
    return min(ends), max(ends)


@given(schedules(), samples_of_run())
def test_a_factor_is_in_its_declared_range_at_any_time(
    schedule: Schedule, timestamp: Timestamp
) -> None:
    low, high = bounds(schedule)
    factor = schedule.bind(RUN)(timestamp)
    assert type(factor) is float
    # Two shapes of WSD are functions to the schedule, so they may round by one unit.
    assert low * (1 - 1e-15) <= factor <= high * (1 + 1e-15)


@given(schedules(), st.integers(0, 10**18))
def test_after_the_end_a_factor_stays(schedule: Schedule, later: int) -> None:
    bound = schedule.bind(RUN)
    at_end, after = (Timestamp(sample=360 + late, epoch=12 + late) for late in (0, later))
    assert bound(at_end) == bound(after)


@given(schedules(), samples_of_run())
def test_before_the_start_a_factor_stays(schedule: Schedule, before: Timestamp) -> None:
    earlier = Timestamp(sample=-before.sample, epoch=-before.epoch)
    if "Custom" not in repr(schedule):
        bound = schedule.bind(RUN)
        assert bound(earlier) == bound(Timestamp())


@given(schedules(with_functions=False))
def test_the_repr_evaluates_back(schedule: Schedule) -> None:
    again = eval(repr(schedule), {**vars(face), "Time": Time})
    assert again == schedule
    assert hash(again) == hash(schedule)


@given(schedules())
def test_it_survives_copying_and_pickling(schedule: Schedule) -> None:
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert copy.deepcopy(schedule) == schedule


@given(leaves(), leaves())
def test_frozen_values_are_equal_only_to_their_like(one: Schedule, other: Schedule) -> None:
    assert (one == other) == (repr(one) == repr(other))
    with pytest.raises(AttributeError, match="assign"):
        setattr(one, fields(one)[0].name, None)


@given(
    schedules(),
    st.fractions(Fraction(1, 3), 4, max_denominator=6),
    st.integers(0, 70),
)
def test_a_scaled_schedule_is_the_same_curve_over_a_scaled_run(
    schedule: Schedule, ratio: Fraction, steps: int
) -> None:
    # 720 is a multiple of all denominators, so both runs stand on whole samples.
    sample, n = steps * ratio.denominator, 720
    run = Horizon("12ep", dataset_num_samples=n)
    before = Timestamp(sample=sample, epoch=sample // n)
    later = Timestamp(sample=steps * ratio.numerator, epoch=steps * ratio.numerator // n)
    scaled = schedule.scaled(ratio).bind(run.scaled(ratio))
    assert scaled(later) == schedule.bind(run)(before)


@given(schedules())
def test_scaling_by_one_changes_nothing(schedule: Schedule) -> None:
    assert schedule.scaled(1) == schedule


def test_scaling_reads_a_float_as_the_decimal_it_prints_as() -> None:
    schedule = Periods([("100ep", StepDecay("30ep", warmup="5%")), ("rest", Cosine(over="10ba"))])
    assert schedule.scaled(0.29) == Periods(
        [("29ep", StepDecay("8.7ep", warmup="5%")), ("rest", Cosine(over="3ba"))]
    )


@pytest.mark.parametrize("ratio", [0, -1, -0.5], ids=str)
def test_a_ratio_that_is_not_positive_is_refused(ratio: float) -> None:
    with pytest.raises(ScheduleError, match="positive"):
        Cosine().scaled(ratio)


@pytest.mark.parametrize("ratio", [math.nan, math.inf, True, "2"], ids=str)
def test_a_ratio_that_is_not_a_number_is_refused(ratio: float) -> None:
    with pytest.raises(TimeError, match="finite"):
        Cosine().scaled(ratio)


def test_a_warm_up_of_nothing_divides_by_nothing() -> None:
    # As OLMo-core's schedulers do.
    run = Horizon("2ep", dataset_num_samples=5, batch_sizes=1)
    for nothing in ("0ba", "0ep", "0sp", "0s", "0%", "0dur"):
        found = values(Cosine(warmup=nothing), run, by_batch(10))
        assert found == values(Cosine(), run, by_batch(10))


def test_a_run_of_one_batch() -> None:
    for schedule in (Cosine(warmup="50%"), Linear(warmup="1ba"), WSD("50%", warmup="50%")):
        assert values(schedule, Horizon("1ba"), by_batch(1)) == [0.0]


def test_a_clock_beyond_the_floats_is_compared_exactly() -> None:
    run = Horizon(Time(ENDLESS, "tok"))
    bound = MultiStep([Time(ENDLESS // 2, "tok")]).bind(run)
    assert bound(Timestamp(token=ENDLESS // 2 - 1)) == 1.0
    assert bound(Timestamp(token=ENDLESS // 2)) == 0.1


def test_wall_clock_is_a_unit_like_the_others() -> None:
    bound = Linear(warmup="15m").bind(Horizon("1h15m"))
    minutes = [Timestamp(run_nanoseconds=60 * 10**9 * minute) for minute in (0, 5, 15, 45, 75)]
    assert [bound(stamp) for stamp in minutes] == [0.0, 1 / 3, 1.0, 0.5, 0.0]


def test_an_epoch_of_unknown_size_is_fine_until_a_part_of_it_is_needed() -> None:
    assert MultiStep(["30ep"]).bind(Horizon("90ep"))(Timestamp(epoch=30)) == 0.1
    for schedule in (MultiStep(["0.5ep"]), Cosine(warmup="5%"), Constant(warmup="4.5ep")):
        with pytest.raises(ConversionError, match="dataset_num_samples"):
            schedule.bind(Horizon("90ep"))


SMOOTH = [
    Cosine(),
    Linear(1, 0),
    Linear(0, 1, over="2ep"),
    Polynomial(power=2),
    Curve(lambda passed: 1 - passed),
    Exponential("1ep", 0.5),
    CosineRestarts("1ep"),
    InverseSqrt("1ep"),
    WSD("1ep"),
    Constant(warmup="1ep"),
    Periods([("1ep", 1.0), ("rest", Cosine())]),
]


@pytest.mark.parametrize("schedule", SMOOTH, ids=str)
def test_a_curve_over_epochs_of_unknown_size_is_refused(schedule: Schedule) -> None:
    """It would stand still through each epoch: through the whole run of one epoch."""
    with pytest.raises(ConversionError, match="dataset_num_samples"):
        schedule.bind(Horizon("4ep"))
    schedule.bind(Horizon("4ep", dataset_num_samples=10))


def test_what_needs_no_size_of_an_epoch_works_without_it() -> None:
    run = Horizon("4ep")
    first, later = Timestamp(batch=3, sample=30), Timestamp(epoch=2, batch=9, sample=90)
    for schedule, expected in (
        (Constant(0.5), (0.5, 0.5)),
        (Linear(0.5, 0.5), (0.5, 0.5)),
        (Linear(1, 0, over="10ba"), (0.7, 0.1)),
        (Cosine(1, 0, over="90sp"), (0.75, 0.0)),
        (Constant(warmup="10ba"), (0.3, 0.9)),
        (StepDecay("1ep", 0.5), (1.0, 0.25)),
        (MultiStep(["50%"]), (1.0, 0.1)),
        (Periods([("2ep", 1.0), ("rest", 0.1)]), (1.0, 0.1)),
        (as_schedule(lambda timer: 0.5**timer.epoch), (1.0, 0.25)),
    ):
        bound = schedule.bind(run)
        assert (bound(first), bound(later)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "schedule",
    [Constant(warmup="5ba"), MultiStep(["5ep"]), StepDecay("5ep"), InverseSqrt(warmup="5ba")],
    ids=str,
)
def test_a_schedule_that_needs_no_end_runs_without_one(schedule: Schedule) -> None:
    # The run ends by the wall clock, so how many batches it will have is not known.
    bound = schedule.bind(Horizon("1h"))
    assert bound(Timestamp(epoch=5, batch=5)) in (1.0, 0.1)
    assert bound(Timestamp(epoch=10**6, batch=10**6)) >= 0.0


@pytest.mark.parametrize(
    "schedule",
    [Cosine(warmup="5ep"), MultiStep(["5ep", "50%"]), WSD("5ep"), Exponential("5ep", 1.1)],
    ids=str,
)
def test_a_schedule_that_needs_the_end_says_so(schedule: Schedule) -> None:
    with pytest.raises(ConversionError, match="not known"):
        schedule.bind(Horizon("1h"))


def test_a_schedule_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Schedule()  # type: ignore[abstract]


def test_products_are_written_with_a_star() -> None:
    def half(timer: Timer) -> float:
        return 0.5 if timer.batch else 0.25

    assert Linear() * 0.5 == Product(Linear(), 0.5)
    assert 0.5 * Linear() == Product(0.5, Linear())
    assert values(Linear() * half, Horizon("4ba"), by_batch(2)) == [0.25, 0.375]
    assert values(half * Linear(), Horizon("4ba"), by_batch(2)) == [0.25, 0.375]


@given(schedules(), samples_of_run())
def test_a_schedule_reads_no_more_than_it_says(schedule: Schedule, timestamp: Timestamp) -> None:
    hidden = unknown_counters(Horizon("1ba"), but=schedule.reads(RUN))
    schedule.bind(RUN)(known_counts(timestamp, hidden))
