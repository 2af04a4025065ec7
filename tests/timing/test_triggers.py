"""Triggers: once for each boundary, however a run is cut into batches."""

from __future__ import annotations

import pickle
import re
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.timing.by_hand import count_by_hand
from tests.timing.strategies import horizons, lengths

from stretto.errors import ConversionError, TimeError
from stretto.timing import (
    AnyOf,
    At,
    Every,
    Horizon,
    Time,
    Timestamp,
    TimeUnit,
    Trigger,
    parse_trigger,
)

UNITS = st.sampled_from(TimeUnit)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Horizon, list[Timestamp]]:
    """A run, with the clock at a random choice of its batches, first and last included."""
    horizon = draw(horizons(has_batch_size=True))
    assert isinstance(horizon.batch_sizes, int)
    counted = count_by_hand(horizon, horizon.batch_sizes, batches=40)
    kept = draw(st.sets(st.integers(0, len(counted) - 1)))
    last = len(counted) - 1
    return horizon, [now for number, now in enumerate(counted) if number in {0, last, *kept}]


@st.composite
def triggers(draw: st.DrawFn) -> Trigger:
    if draw(st.booleans()):
        return Every(draw(intervals()))
    return At(*draw(st.lists(intervals(), min_size=1, max_size=4)))


def intervals() -> st.SearchStrategy[Time]:
    def near(unit: TimeUnit) -> st.SearchStrategy[Time]:
        amounts = st.integers(1, 50).map(Fraction)
        if unit in {"ep", "dur"}:
            amounts = st.fractions(Fraction(1, 40), 3, max_denominator=40)
        return amounts.map(lambda amount: Time(amount, unit))

    return UNITS.flatmap(near)


def is_placeable(horizon: Horizon, trigger: Trigger) -> bool:
    try:
        trigger.bind(horizon)
    except ConversionError:
        return False
    return True


@given(runs(), intervals())
def test_every_boundary_of_an_interval_once(
    run: tuple[Horizon, list[Timestamp]], interval: Time
) -> None:
    horizon, clock = run
    assume(is_placeable(horizon, Every(interval)))
    bound = Every(interval).bind(horizon)
    for before, after in pairwise(clock):
        start, end = (horizon.position(now, interval.unit) for now in (before, after))
        boundaries = [
            number
            for number in range(start // interval, end // interval + 2)
            if start < interval * number <= end
        ]
        assert bound.count(before, after) == len(boundaries)
        assert bound(before, after) is bool(boundaries)


@given(runs(), st.lists(intervals(), min_size=1, max_size=4))
def test_every_given_time_once(run: tuple[Horizon, list[Timestamp]], times: list[Time]) -> None:
    horizon, clock = run
    assume(is_placeable(horizon, At(*times)))
    bound = At(*times).bind(horizon)
    for before, after in pairwise(clock):
        passed = [
            time
            for time in times
            if horizon.position(before, time.unit) < time <= horizon.position(after, time.unit)
        ]
        assert bound.count(before, after) == len(passed)
        assert bound(before, after) is bool(passed)


@given(runs(), triggers(), triggers())
def test_cutting_a_run_changes_nothing(
    run: tuple[Horizon, list[Timestamp]], first: Trigger, second: Trigger
) -> None:
    horizon, clock = run
    assume(is_placeable(horizon, first | second))
    for trigger in (first, second, first | second):
        bound = trigger.bind(horizon)
        counts = [bound.count(before, after) for before, after in pairwise(clock)]
        assert sum(counts) == bound.count(clock[0], clock[-1])
        assert [bound(*pair) for pair in pairwise(clock)] == [count > 0 for count in counts]


@given(runs(), triggers(), triggers())
def test_it_fires_next_when_a_limit_is_reached(
    run: tuple[Horizon, list[Timestamp]], one: Trigger, other: Trigger
) -> None:
    horizon, clock = run
    assume(is_placeable(horizon, one) and is_placeable(horizon, other))
    bound = (one | other).bind(horizon)
    for number, before in enumerate(clock):
        limits = bound.next(before)
        for after in clock[number:]:
            is_reached = any(axis.read(after) >= tick for axis, tick in limits)
            assert bound(before, after) == is_reached


@given(runs(), triggers(), triggers())
def test_either_of_two(
    run: tuple[Horizon, list[Timestamp]], first: Trigger, second: Trigger
) -> None:
    horizon, clock = run
    assume(is_placeable(horizon, first | second))
    either, one, other = ((first | second).bind(horizon), first.bind(horizon), second.bind(horizon))
    for pair in pairwise(clock):
        assert either(*pair) == (one(*pair) or other(*pair))
    assert either.units == one.units | other.units


@given(horizons(is_sized=True, has_batch_size=True), st.integers(1, 40))
def test_a_share_of_the_run_fires_that_often(horizon: Horizon, share: int) -> None:
    assert isinstance(horizon.batch_sizes, int)
    counted = count_by_hand(horizon, horizon.batch_sizes, batches=300)
    assume(horizon.is_done(counted[-1]) and horizon.elapsed(counted[-2]) < 1)
    bound = Every(Time(Fraction(1, share), "dur")).bind(horizon)
    fired = sum(bound.count(before, after) for before, after in pairwise(counted))
    assert fired == horizon.position(counted[-1], "dur") // Time(Fraction(1, share), "dur")
    assert fired >= share


def test_boundaries_beyond_floats_are_exact() -> None:
    bound = At(Time(2**60 + 1, "tok")).bind(Horizon("2_000_000Ttok"))
    assert not bound(Timestamp(token=2**60 - 1), Timestamp(token=2**60))
    assert bound(Timestamp(token=2**60), Timestamp(token=2**60 + 1))


def test_epochs_of_unknown_size() -> None:
    bound = (Every("2ep") | At("3ep")).bind(Horizon("10ep"))
    fired = [e for e in range(6) if bound(Timestamp(epoch=e), Timestamp(epoch=e + 1))]
    assert fired == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("trigger", "run", "needs"),
    [
        (Every("30m"), "2ep", True),
        (Every("10ba"), "2ep", False),
        (Every("10%"), "20ep", False),
        (Every("10%"), "5h", True),
        (At("1ep", "1h"), "2ep", True),
        (At("1ep", "5ba"), "2ep", False),
        (At("50%"), "5h", True),
        (Every("1ep") | Every("30m"), "2ep", True),
        (Every("1ep") | At("2ba"), "2ep", False),
    ],
)
def test_which_triggers_need_the_wall_clock(trigger: Trigger, run: str, needs: bool) -> None:
    assert (TimeUnit.SECOND in trigger.bind(Horizon(run)).units) is needs


def test_wall_clock_intervals_count_from_the_start_of_the_run_across_resumes() -> None:
    bound = Every("30m").bind(Horizon("2ep"))
    minute = 60 * 10**9
    before = Timestamp(run_nanoseconds=29 * minute, job_nanoseconds=2 * minute)
    after = Timestamp(run_nanoseconds=31 * minute, job_nanoseconds=4 * minute)
    assert bound(before, after)


@pytest.mark.parametrize(
    ("trigger", "message"),
    [
        (Every("0.5ep"), "has passed"),
        (Every("0.1dur"), "has passed"),
        (At("1ep", "0.5ep"), "has passed"),
        (Every("1ep") | At("0.5ep"), "has passed"),
    ],
)
def test_missing_facts_are_found_when_binding(trigger: Trigger, message: str) -> None:
    with pytest.raises(ConversionError, match=re.escape(message)):
        trigger.bind(Horizon("2ep"))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Every("0ep"), "interval='0ep'"),
        (lambda: Every("-1ba"), "interval='-1ba'"),
        (lambda: Every("0.0dur"), "interval='0dur'"),
        (lambda: At("0ep"), "time='0ep'"),
        (lambda: At("1ep", "-1ep"), "time='-1ep'"),
        (At, "times=()"),
        (lambda: Every("soon"), "cannot read 'soon' as a time"),
        (lambda: parse_trigger("10"), "it has no unit"),
        (lambda: parse_trigger(10), "it has no unit"),  # type: ignore[arg-type]
        (lambda: parse_trigger(None), "unit"),  # type: ignore[arg-type]
    ],
)
def test_triggers_that_cannot_be(build: Any, message: str) -> None:
    with pytest.raises(TimeError, match=re.escape(message)):
        build()


def test_triggers_join_only_with_triggers() -> None:
    with pytest.raises(TypeError, match="unsupported"):
        Every("1ep") | "10ba"  # type: ignore[operator]


@pytest.mark.parametrize(
    ("trigger", "text"),
    [
        (Every("10%"), "Every('0.1dur')"),
        (At("0.5ep", "75sp"), "At('0.5ep', '75sp')"),
        (Every("1ep") | At("2ba"), "AnyOf(triggers=(Every('1ep'), At('2ba')))"),
    ],
)
def test_repr_evaluates_back(trigger: Trigger, text: str) -> None:
    assert repr(trigger) == text
    assert eval(text, {"Every": Every, "At": At, "AnyOf": AnyOf}) == trigger
    assert pickle.loads(pickle.dumps(trigger)) == trigger
    assert len({trigger, eval(text, {"Every": Every, "At": At, "AnyOf": AnyOf})}) == 1


@given(lengths())
def test_a_time_is_a_trigger_for_every_so_much(interval: Time) -> None:
    assert parse_trigger(interval) == parse_trigger(str(interval)) == Every(interval)
    assert parse_trigger(At(interval)) == At(interval)


@pytest.mark.parametrize(
    ("trigger", "ratio", "expected"),
    [
        (Every("10ba"), 0.5, Every("5ba")),
        (Every("5ba"), 0.5, Every("3ba")),
        (Every("1ba"), 0.001, Every("1ba")),
        (Every("10%"), 0.5, Every("10%")),
        (Every("100ep"), np.float64(0.29), Every("29ep")),
        (At("1ep", "50%", "1h"), 2, At("2ep", "50%", "2h")),
        (Every("2ep") | At("50%"), Fraction(1, 3), Every("2/3ep") | At("50%")),
    ],
)
def test_stretching(trigger: Trigger, ratio: float, expected: Trigger) -> None:
    assert trigger.scaled(ratio) == expected


@pytest.mark.parametrize("ratio", [0, -1])
def test_ratios_that_cannot_be(ratio: int) -> None:
    with pytest.raises(TimeError, match="longer"):
        Every("2ep").scaled(ratio)
