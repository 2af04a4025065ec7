from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import (
    NO_SIGNALS,
    AtMost,
    BatchSizePolicy,
    DoublingRamp,
    Fixed,
    IncreaseFunction,
    LinearRamp,
    PeriodSizes,
    PiecewiseConstant,
    SizeFunction,
)
from stretto.errors import BatchSizeError, ConversionError, TimeError
from stretto.planning import walk
from stretto.timing import Horizon, Time, Timestamp, advance


def decided(policy: BatchSizePolicy, horizon: Horizon) -> list[tuple[int, int]]:
    """The start and size of every batch, each decision made anew from a state out of JSON."""
    bound, now, found = policy.bind(horizon), Timestamp(), []
    state = bound.start
    while not horizon.is_done(now):
        size, state = bound.decide(now, state, NO_SIGNALS)
        state = json.loads(json.dumps(state))
        found.append((now.sample, size))
        now = advance(horizon, now, size)
    return found


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
def test_fixed_periods_are_steps(pairs: list[tuple[int, int]]) -> None:
    # Sevenths of an epoch: exact, so that they add up without rounding.
    horizon = Horizon("6ep", dataset_num_samples=23)
    periods = PeriodSizes([(Time(Fraction(part, 7), "ep"), size) for part, size in pairs])
    edges, start = {}, Fraction(0)
    for part, size in pairs:
        edges[Time(start, "ep")] = size
        start += Fraction(part, 7)
    assert decided(periods, horizon) == decided(PiecewiseConstant(edges), horizon)


def test_the_rest_is_what_the_others_leave() -> None:
    horizon = Horizon("100sp")
    first = PeriodSizes([("rest", 5), ("20%", 10)])
    middle = PeriodSizes([("20sp", 10), ("rest", 5), ("20%", 10)])
    last = PeriodSizes([("20sp", 10), ("rest", 5)])
    assert decided(first, horizon) == decided(PiecewiseConstant("0sp:5 80sp:10"), horizon)
    assert decided(middle, horizon) == decided(PiecewiseConstant("0sp:10 20sp:5 80sp:10"), horizon)
    assert decided(last, horizon) == decided(PiecewiseConstant("0sp:10 20sp:5"), horizon)


def test_times_inside_are_relative_to_the_period() -> None:
    horizon = Horizon("4ep", dataset_num_samples=50)
    policy = PeriodSizes([("1ep", 10), ("50%", LinearRamp(1, 5, "100%")), ("rest", "0ep:2 50%:4")])
    by_hand = PiecewiseConstant("0ep:10 1ep:1 1.5ep:2 2ep:3 2.5ep:4 3ep:2 3.5ep:4")
    assert decided(policy, horizon) == decided(by_hand, horizon)


def test_without_a_rest_the_last_policy_goes_on() -> None:
    horizon = Horizon("100sp")
    policy = PeriodSizes([("20sp", 4), ("20sp", DoublingRamp(5, 20, "100%"))])
    assert decided(policy, horizon) == decided(
        PiecewiseConstant("0sp:4 20sp:5 30sp:10 40sp:20"), horizon
    )


def test_batches_mix_with_samples_from_where_they_meet() -> None:
    horizon = Horizon("200sp", dataset_num_samples=1000)
    policy = PeriodSizes([("3ba", 10), ("35sp", 20), ("4ba", 5), ("rest", "0ba:7 8ba:11")])
    sizes = [size for _, size in decided(policy, horizon)]
    # 3 batches to sample 30; until 65 two of 20, to 70; 4 of 5, to 90; then 8 of 7.
    assert sizes == [10, 10, 10, 20, 20, 5, 5, 5, 5, *[7] * 8, *[11] * 5]


def test_a_ramp_in_batches_starts_with_its_period() -> None:
    horizon = Horizon("100sp")
    policy = PeriodSizes([("25sp", 10), ("rest", LinearRamp(1, 4, "6ba"))])
    assert [size for _, size in decided(policy, horizon)][:10] == [10] * 3 + [1, 1, 2, 2, 3, 3, 4]


def test_epochs_inside_a_period_are_counted_from_its_start() -> None:
    horizon = Horizon("4ep", dataset_num_samples=20)
    seen = []

    def look(now: Timestamp, current: int | None) -> int:
        seen.append((now.epoch, now.sample, now.sample_in_epoch, now.batch))
        return 10

    policy = PeriodSizes([("1.5ep", 10), ("rest", SizeFunction(look))])
    decided(policy, horizon)
    assert seen == [(0, 0, 0, 0), (0, 10, 10, 1), (1, 20, 0, 2), (1, 30, 10, 3), (2, 40, 0, 4)]
    grown = PeriodSizes([("1ep", 10), ("rest", IncreaseFunction(lambda epoch, size: 5, 5, 100))])
    assert [size for _, size in decided(grown, horizon)] == [10, 10, 10, 10, 15, 15, 20]


def test_a_batch_may_pass_a_whole_period() -> None:
    horizon = Horizon("100sp")
    policy = PeriodSizes([("10sp", 30), ("5sp", 7), ("10sp", 9), ("rest", 10)])
    assert [size for _, size in decided(policy, horizon)] == [30] + [10] * 7


def test_periods_inside_periods() -> None:
    horizon = Horizon("100sp")
    inner = PeriodSizes([("50%", 5), ("rest", 10)])
    assert decided(PeriodSizes([("40sp", 20), ("rest", inner)]), horizon) == decided(
        PiecewiseConstant("0sp:20 40sp:5 70sp:10"), horizon
    )


def test_wall_time_and_tokens_are_followed_as_they_pass() -> None:
    bound = PeriodSizes([("60sec", 8), ("1m", LinearRamp(8, 12, "100%")), ("rest", 64)]).bind(
        Horizon("1h")
    )
    assert not bound.is_static
    state, got = bound.start, []
    for second in (0, 59, 60, 89, 90, 119, 120):
        now = Timestamp(run_nanoseconds=second * 10**9)
        size, state = bound.decide(now, state, NO_SIGNALS)
        got.append(size)
    assert got == [8, 8, 8, 9, 10, 11, 64]
    assert PeriodSizes([("10ba", 8), ("5m", 16)]).bind(Horizon("9ep")).is_static  # it goes on
    tokens = PeriodSizes([("100tok", 8), ("rest", 64)]).bind(Horizon("1ep"))
    assert tokens.is_static
    assert tokens.units == {"tok"}


def test_an_unsized_run_may_have_periods_of_whole_epochs() -> None:
    bound = PeriodSizes([("1ep", 8), ("rest", "0ep:16 1ep:32")]).bind(Horizon("3ep"))
    state, got = bound.start, []
    for epoch in range(4):
        size, state = bound.decide(Timestamp(epoch=epoch, sample=7 * epoch), state, NO_SIGNALS)
        got.append(size)
        hold = bound.holds_until(Timestamp(epoch=epoch, sample=7 * epoch), state)
        assert hold is not None
        assert hold.covers(Timestamp(epoch=epoch)) or epoch == 3
        assert hold.covers(Timestamp(epoch=epoch + 1)) == (epoch >= 2)
    assert got == [8, 16, 32, 32]


def test_the_walk_ends_with_the_periods_of_every_kind_of_end() -> None:
    for length in ("2ep", "40sp", "9ba"):
        horizon = Horizon(length, dataset_num_samples=20)
        policy = PeriodSizes([("3ba", 2), ("rest", "0ba:3 2ba:5")])
        sizes = [step.decided for step in walk(horizon, policy.bind(horizon))]
        assert sizes[:6] == [2, 2, 2, 3, 3, 5]


def test_fractions_of_a_rest_whose_length_nobody_knows_are_refused() -> None:
    policy = PeriodSizes([("3ba", 2), ("rest", "0dur:3 50%:5")])
    policy.bind(Horizon("9ba"))
    with pytest.raises(BatchSizeError, match="units"):
        policy.bind(Horizon("40sp"))


def test_values() -> None:
    policy = PeriodSizes([("10%", 8), ("2ep", LinearRamp(8, 64, "1ep")), ("rest", 64)])
    assert eval(repr(policy)) == policy
    assert policy.times() == (Time("10%"), Time("2ep"), Time("1ep"))
    scaled = PeriodSizes([("10%", 8), ("4ep", LinearRamp(8, 64, "2ep")), ("rest", 64)])
    assert policy.scaled(2) == scaled
    assert PeriodSizes([("1ba", 8), ("rest", Fixed(64))]).bind(Horizon("9ba")).is_static


@pytest.mark.parametrize(
    ("periods", "match"),
    [
        ([], "there are none"),
        ([("0ep", 8), ("rest", 16)], "longer"),
        ([("rest", 8), ("rest", 16)], "only one"),
        ([("10%", 8, 9)], "it is not a pair"),
        (["10%"], "it is not a pair"),
        ([("10%", 0)], "use 0 as a batch size"),
    ],
    ids=repr,
)
def test_wrong_periods_are_refused(periods: list[tuple[str, Any]], match: str) -> None:
    with pytest.raises(BatchSizeError, match=match):
        PeriodSizes(periods)


@pytest.mark.parametrize(
    ("periods", "match"),
    [
        ([("2ep", 8), ("rest", 16)], "nothing"),
        ([("60%", 8), ("1ep", 8), ("rest", 16)], "nothing"),
        ([("10ba", 8), ("rest", 16), ("10ba", 32)], "put the 'rest' last"),
    ],
    ids=repr,
)
def test_what_is_left_must_be_known_and_be_something(
    periods: list[tuple[str, Any]], match: str
) -> None:
    with pytest.raises(BatchSizeError, match=match):
        PeriodSizes(periods).bind(Horizon("2ep", dataset_num_samples=100))


def test_wrong_times_are_refused() -> None:
    with pytest.raises(TimeError, match="ressst"):
        PeriodSizes([("10%", 8), ("ressst", 8)])
    with pytest.raises(ConversionError, match="dataset_num_samples"):
        PeriodSizes([("0.5ep", 8), ("rest", 16)]).bind(Horizon("2ep"))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(1, 9)), min_size=1),
    st.integers(0, 20),
)
def test_until_is_the_length_that_leads_there(
    drawn: list[tuple[int, bool, int]], rest: int
) -> None:
    horizon = Horizon("12ep", dataset_num_samples=23)
    mixed: list[tuple[Any, int]] = []
    plain: list[tuple[Any, int]] = []
    end = Fraction(0)
    for number, (part, is_until, size) in enumerate(drawn):
        length = Fraction(part, 7)
        end += length
        until = f"until {Time(end, 'ep')}"
        mixed.append((until if is_until and number < rest else Time(length, "ep"), size))
        plain.append((Time(length, "ep"), size))
    if rest < len(drawn) and end < 12:
        mixed[rest], plain[rest] = ("rest", mixed[rest][1]), ("rest", plain[rest][1])
    policy = PeriodSizes(mixed)
    assert decided(policy, horizon) == decided(PeriodSizes(plain), horizon)
    assert eval(repr(policy)) == policy
    doubled = Horizon("24ep", dataset_num_samples=23)
    assert decided(policy.scaled(2), doubled) == decided(PeriodSizes(plain).scaled(2), doubled)


def test_after_an_until_lengths_may_be_in_another_unit() -> None:
    horizon = Horizon("100sp", tokens_per_sample=10)
    policy = PeriodSizes([("100tok", 5), ("until 32sp", "0dur:4 50%:6"), ("2ba", 3), ("rest", 7)])
    sizes = [size for _, size in decided(policy, horizon)]
    assert sizes == [5, 5, 4, 4, 4, 6, 6, 3, 3, *[7] * 9]


@pytest.mark.parametrize(
    "periods",
    [
        [("until 20sp", 1), ("until 20sp", 2)],
        [("5ba", 1), ("until 90sp", 2)],
        [("until 5ba", 1), ("until 90sp", 2)],
        [("rest", 1), ("until 90sp", 2)],
        [("50sp", PeriodSizes([("until 20sp", 1)])), ("rest", 2)],
        [("50sp", AtMost(PeriodSizes([("until 20sp", 1)]), 4)), ("rest", 2)],
    ],
)
def test_an_until_that_is_not_known_to_be_later_is_refused(periods: Any) -> None:
    with pytest.raises(BatchSizeError, match="until"):
        PeriodSizes(periods).bind(Horizon("100sp"))
