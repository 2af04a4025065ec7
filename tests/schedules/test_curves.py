"""`Linear`, `Cosine`, `Polynomial` and `Curve`."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.strategies import by_batch, values

from stretto.errors import ScheduleError
from stretto.schedules import Cosine, Curve, Linear, Periods, Polynomial
from stretto.timing import Horizon, Timestamp

CURVES = [Linear, Cosine, Polynomial]


class Ramp:
    """Batch sizes 2, 3, 4, ..., 8, 8, 8, ..."""

    def sample_at_batch(self, batch: int, /) -> int:
        return sum(min(2 + number, 8) for number in range(batch))

    def batch_at_sample(self, sample: int, /) -> int:
        batch = 0
        while self.sample_at_batch(batch) < sample:
            batch += 1
        return batch


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("over", ["1dur", "50%", "7ba", "0ba", "20ba"])
def test_it_starts_at_its_start_and_ends_at_its_end(curve: type[Linear], over: str) -> None:
    found = values(curve(0.9, 0.2, over=over), Horizon("20ba"), by_batch(30))
    assert found[0] == (0.2 if over == "0ba" else 0.9)
    assert set(found[20:]) == {0.2}


@given(st.floats(0, 5), st.floats(0, 5), st.integers(1, 40))
def test_it_is_monotone(start: float, end: float, steps: int) -> None:
    for curve in CURVES:
        found = values(curve(start, end), Horizon(f"{steps}ba"), by_batch(steps + 2))
        assert found == sorted(found, reverse=start > end)


def test_a_way_longer_than_the_run_is_not_finished() -> None:
    assert values(Linear(over="40ba"), Horizon("20ba"), by_batch(99))[-1] == 0.5


def test_under_a_ramp_a_curve_over_the_run_ends_where_the_run_does() -> None:
    # Composer's linear decay to 0 ends at 0.69 under a ramp from 2 to 8, as it counts batches.
    ramp, samples = Ramp(), 96
    run = Horizon("8ep", dataset_num_samples=12, batch_sizes=ramp)
    batches = ramp.batch_at_sample(samples)
    starts = [ramp.sample_at_batch(batch) for batch in range(batches)]
    stamps = [Timestamp(batch=batch, sample=start) for batch, start in enumerate(starts)]
    assert values(Linear(), run, stamps) == [1 - start / samples for start in starts]
    assert values(Linear(over="96sp"), run, stamps) == values(Linear(), run, stamps)
    # Said in batches it is even in batches, which is what was asked for.
    assert values(Linear(over=f"{batches}ba"), run, stamps) == [
        1 - batch / batches for batch in range(batches)
    ]


@pytest.mark.parametrize("power", [0, -1, math.nan, math.inf], ids=str)
def test_a_power_is_above_nothing(power: float) -> None:
    with pytest.raises(ScheduleError, match="power"):
        Polynomial(power=power)


@pytest.mark.parametrize("curve", CURVES)
def test_factors_are_not_negative(curve: type[Linear]) -> None:
    with pytest.raises(ScheduleError, match="start"):
        curve(-1.0)
    with pytest.raises(ScheduleError, match="use"):
        curve(1.0, -0.1)
    with pytest.raises(ScheduleError, match="warmup_start"):
        curve(warmup_start=math.nan)


def triangle(passed: float) -> float:
    """Rise, then fall: the example of the discussion that schedules come from."""
    return passed if passed <= 0.5 else 1 - passed


def test_a_function_moves_with_its_period() -> None:
    found = values(
        Periods([("4ba", Curve(triangle)), ("rest", Curve(triangle))]),
        Horizon("12ba"),
        by_batch(13),
    )
    assert found[:5] == [0.0, 0.25, 0.5, 0.25, 0.0]
    assert found[4:] == [0.0, 0.125, 0.25, 0.375, 0.5, 0.375, 0.25, 0.125, 0.0]


def test_a_function_gets_parts_from_nothing_to_one() -> None:
    seen: list[float] = []

    def function(passed: float) -> float:
        seen.append(passed)
        return passed

    bound = Curve(function, over="8ba").bind(Horizon("10ba"))
    for stamp in by_batch(12):
        bound(stamp)
    assert min(seen) == 0.0
    assert max(seen) == 1.0


def test_a_function_may_be_left_before_its_end() -> None:
    bound = Curve(lambda passed: passed, over="20ba").bind(Horizon("10ba"))
    assert [bound(stamp) for stamp in by_batch(14)[9:]] == [0.45, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("function", [None, 5, "cosine"], ids=repr)
def test_what_cannot_be_called_is_refused(function: object) -> None:
    with pytest.raises(ScheduleError, match="called"):
        Curve(function)  # type: ignore[arg-type]


def test_a_function_that_returns_nonsense_is_refused_at_binding() -> None:
    with pytest.raises(ScheduleError, match="factor"):
        Curve(lambda _: math.nan).bind(Horizon("10ba"))


def test_a_function_that_returns_nonsense_in_the_middle_is_refused_there() -> None:
    bound = Curve(lambda passed: 1.0 if passed in (0, 1) else -1.0).bind(Horizon("10ba"))
    with pytest.raises(ScheduleError, match="factor"):
        bound(Timestamp(batch=5))
