"""`Periods`: one schedule after another, exactly."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.strategies import by_batch, values

from stretto.errors import ConversionError, ScheduleError, TimeError
from stretto.planning import plan
from stretto.schedules import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    MultiStep,
    Periods,
    Rest,
    Schedule,
    StepDecay,
)
from stretto.schedules.scope import Scope
from stretto.timing import Horizon, Time, Timestamp

N = 24
RUN = Horizon("10ep", dataset_num_samples=N)


class Growing:
    """Batch sizes 1, 2, 3, ..."""

    def sample_at_batch(self, batch: int, /) -> int:
        return batch * (batch + 1) // 2

    def batch_at_sample(self, sample: int, /) -> int:
        batch = 0
        while self.sample_at_batch(batch) < sample:
            batch += 1
        return batch


def test_the_periods_that_schedules_come_from() -> None:
    """90 epochs, a warm-up of 5% (4.5 epochs), then steps at 1/2 and 3/4 of the other 85.5."""
    schedule = Periods([("5%", Linear(0, 1)), ("rest", MultiStep(["0.5dur", "0.75dur"]))])
    run = Horizon("90ep", dataset_num_samples=1000)
    warmup, first, second = 4_500, 4_500 + 42_750, 4_500 + 64_125
    bound = schedule.bind(run)
    for sample in (0, 1, 2_250, 4_499, 4_500, first - 1, first, second - 1, second, 89_999):
        factor = min(sample / warmup, 1.0) * 0.1 ** sum(sample >= cut for cut in (first, second))
        assert bound(Timestamp(sample=sample)) == pytest.approx(factor, rel=1e-15)
    same = MultiStep(["0.5dur", "0.75dur"], warmup="5%").bind(run)
    assert all(same(stamp) == bound(stamp) for stamp in by_batch(90_000)[::97])


def parts_of(denominator: int, least: int, most: int) -> st.SearchStrategy[Fraction]:
    """Return fractions with one denominator: quicker to draw and to shrink than any fraction."""
    return st.integers(least, most).map(lambda number: Fraction(number, denominator))


Model = tuple[Fraction, Fraction, Fraction, list[Fraction]]  # length, start, end, milestones


@given(
    st.lists(
        st.tuples(
            parts_of(40, 0, 80),
            parts_of(9, 0, 9),
            parts_of(9, 0, 9),
            st.lists(parts_of(30, 1, 30), unique=True, max_size=4).map(sorted),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
    st.integers(0, N * 10 - 1),
)
def test_any_periods_against_a_model_in_fractions(
    models: list[Model], in_rest: bool, sample: int
) -> None:
    lengths = [length for length, *_ in models]
    position = Fraction(sample, N)
    starts = [Fraction(0), *accumulate(lengths)]
    if in_rest:
        lengths[-1] = 10 - sum(lengths[:-1], start=Fraction(0))
    # The model: which period, what part of it has passed, and the formula in exact fractions.
    number = min(bisect_right(starts[:-1], position) - 1, len(models) - 1)
    _, start, end, milestones = models[number]
    length = lengths[number]
    passed = min((position - starts[number]) / length, Fraction(1)) if length else Fraction(1)
    # A milestone on the end of a period is not reached in it.
    reached = sum(passed >= part for part in milestones if part < 1 and length)
    expected = (start + (end - start) * passed) * Fraction(1, 2) ** reached

    periods: list[tuple[Time | Rest, Schedule]] = []
    for length, start, end, milestones in models:
        schedule: Schedule = Linear(float(start), float(end))
        if milestones:
            schedule *= MultiStep([Time(part, "dur") for part in milestones], 0.5)
        periods.append((Time(length, "ep"), schedule))
    if in_rest:
        periods[-1] = "rest", periods[-1][1]
    found = Periods(periods).bind(RUN)(Timestamp(sample=sample))
    assert found == pytest.approx(float(expected), rel=1e-12, abs=1e-15)


WORDS: dict[str, Any] = {
    "pairs by name": {"warmup": ("5%", Linear(0, 1)), "main": ("rest", Cosine())},
    "a list of names": [{"warmup": ("5%", Linear(0, 1))}, {"main": ("rest", Cosine())}],
}


@pytest.mark.parametrize("given", WORDS.values(), ids=WORDS)
def test_periods_may_have_names(given: Any) -> None:
    periods, plain = Periods(given), Periods([("5%", Linear(0, 1)), ("rest", Cosine())])
    assert values(periods, RUN, by_batch(N * 10)) == values(plain, RUN, by_batch(N * 10))
    assert periods.names == ("warmup", "main")
    assert periods == Periods(WORDS["pairs by name"]) != plain
    assert eval(repr(periods)) == periods
    begin: list[Any] = [(mark.tick, mark.period) for mark in periods.borders(Scope.of(RUN))]
    assert (0, "warmup") in begin
    assert (12, "main") in begin


def test_the_plan_shows_the_names() -> None:
    inner = Periods({"high": ("50%", 1.0), "low": ("rest", 0.5)})
    periods = Periods({"warmup": ("2ep", Linear(0, 1)), "main": ("rest", inner)})
    planned = plan(RUN, N, schedules={"lr": periods * 1.0})
    said = [(one.at.batch, one.what) for one in planned.changes]
    assert said == [
        (0, "'warmup' begins"),
        (2, "'high' begins and warm-up ends"),
        (6, "'low' begins and changes to 0.5"),
    ]


NAMELESS: dict[str, Any] = {
    "some have none": [{"warmup": ("5%", 1)}, ("rest", 1)],
    "one is no text": {1: ("5%", 1)},
    "the same twice": [{"a": ("5%", 1)}, {"a": ("rest", 1)}],
    "no pair": {"a": 1},
    "none": {},
}


@pytest.mark.parametrize("given", NAMELESS.values(), ids=NAMELESS)
def test_names_that_do_not_fit_are_refused(given: Any) -> None:
    with pytest.raises(ScheduleError, match="period"):
        Periods(given)


@pytest.mark.parametrize("rest", [-1, "-1", -1.0])
def test_a_rest_of_minus_one_is_answered_by_its_name(rest: Any) -> None:
    with pytest.raises(ScheduleError, match="write 'rest'"):
        Periods({"warmup": ("5%", 1), "main": (rest, 1)})


@pytest.mark.parametrize("length", ["30m", "1h30m", "90s"])
@pytest.mark.parametrize("run", [RUN, Horizon("100ba"), Horizon("1Ktok")], ids=repr)
def test_wall_clock_in_another_run_names_a_product_that_works(length: str, run: Horizon) -> None:
    mixed = [Periods([(length, Linear(0, 1)), ("rest", Cosine())]), Cosine(warmup=length)]
    for schedule in mixed:
        with pytest.raises(ConversionError) as caught:
            schedule.bind(run)
        written = caught.value.message.instead.split("such as ")[1].split(", which")[0]
        factor = eval(written).bind(run)
        seconds = int(Time(length).amount)
        assert factor(Timestamp()) == 0.0
        assert factor(Timestamp(run_nanoseconds=seconds * 500_000_000)) == 0.5
        assert factor(Timestamp(run_nanoseconds=seconds * 10**9)) == 1.0


def test_a_wall_clock_at_the_end_of_another_run_is_answered_by_its_unit() -> None:
    at_the_end = Periods([("rest", Cosine()), ("30m", Linear(1, 0))])
    with pytest.raises(ConversionError, match="wall-clock time in 'ep', too"):
        at_the_end.bind(RUN)


def test_epochs_inside_are_counted_from_its_start() -> None:
    schedule = Periods([("1.5ep", 1.0), ("rest", MultiStep(["3ep"], 0.5))])
    bound = schedule.bind(RUN)
    assert bound(Timestamp(sample=N * 9 // 2 - 1)) == 1.0
    assert bound(Timestamp(sample=N * 9 // 2)) == 0.5


def test_periods_may_hold_periods() -> None:
    inner = Periods([("50%", Linear(0, 1)), ("rest", Linear(1, 0))])
    schedule = Periods([("50%", inner), ("rest", inner)])
    found = values(schedule, Horizon("16ba"), by_batch(17))
    rise_and_fall = [0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]
    assert found == [*rise_and_fall, *rise_and_fall, 0.0]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_rest_may_stand_anywhere(position: int) -> None:
    periods: list[tuple[str, float]] = [("2ep", 0.25), ("10%", 0.5)]
    periods.insert(position, ("rest", 1.0))
    bound = Periods(periods).bind(RUN)
    lengths = {"2ep": 2, "10%": 1, "rest": 7}
    expected = [factor for duration, factor in periods for _ in range(lengths[duration])]
    assert [bound(Timestamp(sample=epoch * N)) for epoch in range(10)] == expected


def test_what_follows_the_rest_is_measured_back_from_the_end() -> None:
    sizes = Growing()
    run = Horizon("10ep", dataset_num_samples=10, batch_sizes=sizes)
    bound = Periods([("rest", 1.0), ("4ba", 0.5), ("3ba", 0.25)]).bind(run)
    batches = sizes.batch_at_sample(100)
    for batch in range(batches):
        left = batches - batch
        expected = 0.25 if left <= 3 else 0.5 if left <= 7 else 1.0
        assert bound(Timestamp(batch=batch, sample=sizes.sample_at_batch(batch))) == expected


def test_periods_of_mixed_units_lie_where_a_walk_over_the_batches_finds_them() -> None:
    sizes = Growing()
    run = Horizon("10ep", dataset_num_samples=10, batch_sizes=sizes)
    bound = Periods([("3ba", 0.1), ("1ep", 0.2), ("2ba", 0.3), ("10%", 0.4), ("rest", 0.5)]).bind(
        run
    )
    cut, cuts = sizes.sample_at_batch(3), [sizes.sample_at_batch(3)]
    cuts.append(cut + 10)
    cuts.append(sizes.sample_at_batch(sizes.batch_at_sample(cuts[-1]) + 2))
    cuts.append(cuts[-1] + 10)
    for batch in range(sizes.batch_at_sample(100)):
        sample = sizes.sample_at_batch(batch)
        expected = (0.1, 0.2, 0.3, 0.4, 0.5)[bisect_right(cuts, sample)]
        assert bound(Timestamp(batch=batch, sample=sample)) == expected


def test_after_the_last_period_its_last_value_is_held() -> None:
    schedule = Periods([("2ba", 1.0), ("4ba", Linear(1, 0.25))])
    assert values(schedule, Horizon("20ba"), by_batch(30))[6:] == [0.25] * 24
    decay = Periods([("2ba", 1.0), ("4ba", Exponential("2ba", 0.5))])
    assert values(decay, Horizon("20ba"), by_batch(30))[6:] == [0.25] * 24
    stairs = Periods([("2ba", 1.0), ("4ba", StepDecay("2ba", 0.5))])
    assert values(stairs, Horizon("20ba"), by_batch(30))[6:] == [0.5] * 24


def test_a_period_of_no_length_is_passed_over() -> None:
    schedule = Periods([("0%", Linear(0, 1)), ("rest", MultiStep(["2ba"], 0.5)), ("0ba", Cosine())])
    assert values(schedule, Horizon("4ba"), by_batch(4)) == [1.0, 1.0, 0.5, 0.5]


def test_all_kinds_fit_a_period_of_no_length() -> None:
    for schedule in (
        Linear(warmup="5%"),
        MultiStep(["0.5dur", "0.75dur"]),
        StepDecay("0.5dur"),
        Exponential("0.5dur", 0.5),
    ):
        bound = Periods([("rest", 1.0), ("0%", schedule)]).bind(Horizon("4ba"))
        assert bound(Timestamp(batch=3)) == 1.0
        assert 0.0 <= bound(Timestamp(batch=9)) <= 1.0


def test_only_units_that_are_used_need_their_facts() -> None:
    unknown = Horizon("1h")
    schedule = Periods([("5ba", Linear(0, 1)), ("rest", StepDecay("3ba", 0.5))])
    bound = schedule.bind(unknown)
    assert [bound(Timestamp(batch=batch)) for batch in (0, 4, 5, 8, 11)] == [0, 0.8, 1, 0.5, 0.25]
    with pytest.raises(ConversionError, match="before the run"):
        Periods([("5ba", Linear(0, 1)), ("rest", Cosine())]).bind(unknown)
    with pytest.raises(ConversionError, match="before the run"):
        Periods([("rest", 1.0), ("5ep", Linear())]).bind(unknown)


def test_durations_are_read_at_the_edge() -> None:
    read = Periods([("5%", 0.5), ("rest", lambda timer: 1.0), [Time("1ep"), Cosine()]])  # type: ignore[list-item]
    durations = [duration for duration, _ in read.periods]
    assert durations == [Time("0.05dur"), "rest", Time("1ep")]
    assert read.periods[0][1] == Constant(0.5)
    assert repr(Periods([("rest", Cosine())])) == "Periods([('rest', Cosine())])"


@pytest.mark.parametrize(
    "periods",
    [
        [("6ep", 1.0), ("5ep", 1.0)],
        [("60%", 1.0), ("5ep", 1.0)],
        [("60%", 1.0), ("rest", 1.0), ("5ep", 1.0)],
        [("11ep", 1.0), ("rest", 1.0)],
        [("rest", 1.0), ("101%", 1.0)],
    ],
    ids=str,
)
def test_periods_are_not_longer_than_the_run(periods: list[tuple[str, float]]) -> None:
    with pytest.raises(ScheduleError, match="periods"):
        Periods(periods).bind(RUN)


def test_periods_are_not_longer_than_the_period_around_them() -> None:
    inner = Periods([("3ep", 1.0)])
    with pytest.raises(ScheduleError, match="periods"):
        Periods([("2ep", inner), ("rest", 1.0)]).bind(RUN)


@pytest.mark.parametrize("rest", ["10ep", "100%"])
def test_nothing_may_be_left_for_the_rest(rest: str) -> None:
    assert values(Periods([(rest, 0.5), ("rest", 1.0)]), RUN, by_batch(9)) == [0.5] * 9


@pytest.mark.parametrize(
    ("periods", "message"),
    [
        ([], "there are none"),
        ([("rest", 1.0), ("5%", 1.0), ("rest", 1.0)], "only one of them can take the rest"),
        ([Cosine()], "pair"),
        ([("5%", 1.0, 2.0)], "pair"),
        (["5%"], "pair"),
        ([("-5%", 1.0)], "it is negative"),
        ([("5%", "cosine")], "it is not a schedule, a number or a callable"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_are_no_periods_is_refused(periods: list[tuple[str, float]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Periods(periods)


@pytest.mark.parametrize("duration", [-2, "remainder", None], ids=repr)
def test_what_is_no_duration_is_refused(duration: str) -> None:
    with pytest.raises(TimeError, match="time"):
        Periods([(duration, Cosine())])


# ---------------------------------------------------------------------------------------- until


def tree(draw: Any, begin: Fraction, end: Fraction, depth: int) -> tuple[Schedule, Schedule]:
    """Return periods from `begin` to `end`, in epochs, with some `until`; and with none."""
    cuts = sorted(draw(st.sets(parts_of(7, 1, 6), max_size=3)))
    edges = [begin, *(begin + (end - begin) * cut for cut in cuts), end]
    mixed: list[tuple[Time | Rest | str, Schedule]] = []
    plain: list[tuple[Time | Rest | str, Schedule]] = []
    rest = draw(st.integers(0, len(edges) - 1))
    for number, (first, last) in enumerate(pairwise(edges)):
        inside = same = Linear(float(draw(parts_of(9, 0, 9))), float(draw(parts_of(9, 0, 9))))
        if depth and draw(st.booleans()):
            inside, same = tree(draw, first, last, depth - 1)  # type: ignore[assignment]
        length = Time(last - first, "ep")
        is_until = number < rest and draw(st.booleans())
        mixed.append((f"until {Time(last, 'ep')}" if is_until else length, inside))
        plain.append((length, same))
    if rest < len(mixed):
        mixed[rest] = "rest", mixed[rest][1]
    return Periods(mixed), Periods(plain)


@given(st.data(), st.lists(st.integers(0, 10 * N), min_size=1, max_size=6))
def test_until_is_the_duration_that_leads_there(data: st.DataObject, samples: list[int]) -> None:
    mixed, plain = tree(data.draw, Fraction(0), Fraction(10), depth=2)
    times = [Timestamp(sample=sample) for sample in samples]
    assert values(mixed, RUN, times) == values(plain, RUN, times)
    assert eval(repr(mixed)) == mixed
    doubled = Horizon("20ep", dataset_num_samples=N)
    later = [Timestamp(sample=2 * sample) for sample in samples]
    assert values(mixed.scaled(2), doubled, later) == values(plain, RUN, times)


def test_until_is_on_the_clock_of_the_run_in_any_unit() -> None:
    horizon = Horizon("100sp", tokens_per_sample=10, batch_sizes=5)
    inner = Periods([("until 600tok", 0.5), ("rest", Linear(1, 0))])
    bound = Periods([("until 4ba", 0.25), ("until 80%", inner), ("rest", 1.0)]).bind(horizon)
    at = [Timestamp(batch=n, sample=5 * n, token=50 * n) for n in (0, 3, 4, 11, 12, 14, 15, 16)]
    assert [bound(now) for now in at] == [0.25, 0.25, 0.5, 0.5, 1.0, 0.5, 0.25, 1.0]


@pytest.mark.parametrize(
    ("periods", "word"),
    [
        ([("until 5ep", 1), ("until 5ep", 1)], "begins at"),
        ([("6ep", 1), ("until 50%", 1)], "begins at"),
        ([("50%", 1), ("rest", Periods([("until 3ep", 1), ("rest", 1)]))], "begins at"),
        ([("until 11ep", 1), ("rest", 1)], "longer"),
        ([("until 5ep", Periods([("until 6ep", 1)])), ("rest", 1)], "longer"),
    ],
)
def test_an_until_that_does_not_fit_is_refused(periods: Any, word: str) -> None:
    with pytest.raises(ScheduleError, match=word):
        Periods(periods).bind(RUN)


@pytest.mark.parametrize(
    ("periods", "error", "word"),
    [
        ([("rest", 1), ("until 5ep", 1)], ScheduleError, "follows the rest"),
        ([("until 0ep", 1)], ScheduleError, "not longer"),
        ([("until", 1)], TimeError, "empty"),
        ([("until rest", 1)], TimeError, "rest"),
        ([({"until": "5ep"}, 1)], TimeError, "until"),
    ],
)
def test_what_is_no_until_is_refused(periods: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        Periods(periods)


def test_an_until_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ConversionError, match="batch"):
        Periods([("2ba", 1.0), ("until 3ep", 1.0), ("rest", 0.5)]).bind(RUN)
    with pytest.raises(ConversionError, match="token"):
        Periods([("1ep", 1.0), ("until 3tok", 1.0), ("rest", 0.5)]).bind(RUN)
