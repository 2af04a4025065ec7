"""The critical batch size and the plan that follow from what branches have found."""

from __future__ import annotations

import math
import random

import pytest

from stretto.report.critical import Critical, Tried, compared, critical, static_plan


def rows(*excess: tuple[float, float]) -> list[Tried]:
    return [Tried(8 * 2**n, 2.0, one, reach) for n, (one, reach) in enumerate(excess)]


def test_the_crossing_is_interpolated_in_the_logarithm_of_the_size() -> None:
    known = rows((0.0, 0.0), (0.0, 0.001), (0.005, 0.001), (0.025, 0.001))
    found = critical(known, 0.01)
    assert found.size == 32
    assert found.interval is not None
    ends = (found.interval[0], found.crossing, found.interval[1])
    assert ends == pytest.approx((32 * 2**0.2, 32 * 2**0.25, 32 * 2**0.3))
    assert critical(known[:3], 0.01) == Critical(32, None, (32, None))


def test_a_size_counts_only_if_all_smaller_ones_do() -> None:
    assert critical(rows((0.0, 0.0), (0.02, 0.0), (0.0, 0.0)), 0.01).size == 8


def test_a_size_that_diverged_is_surely_beyond() -> None:
    found = critical(rows((0.0, 0.0), (math.inf, 0.0)), 0.01)
    assert found == Critical(8, 8.0, (8, 8))


def test_a_single_order_decides_nothing() -> None:
    found = critical(compared({8: [2.0], 16: [2.5]}), 0.01)
    assert (found.size, found.interval) == (8, None)
    assert "one order" in str(found)


def test_differences_are_taken_within_one_order() -> None:
    found = compared({8: [1.0, 2.0, 3.0], 16: [1.01, 2.01, 3.01]})
    assert found[1].excess == pytest.approx(0.01)
    assert found[1].reach == pytest.approx(0, abs=1e-9)


def test_the_interval_covers_a_difference_in_nine_of_ten() -> None:
    chance = random.Random(5)
    covered = 0
    for _ in range(1000):
        base = [chance.gauss(2, 1) for _ in range(4)]
        row = compared({8: base, 16: [one + chance.gauss(0.02, 0.03) for one in base]})[1]
        covered += abs(row.excess - 0.02) <= row.reach
    assert 870 <= covered <= 930


@pytest.mark.parametrize(
    ("points", "plan"),
    [
        ([(64, (64, 64)), (64, (32, 128))], {"0%": 64}),
        ([(32, (16, 64)), (64, (32, 128))], {"0%": 32}),
        ([(32, (16, 32)), (128, (64, None))], {"0%": 16, "20%": 32, "50%": 128}),
        ([(16, (16, 16)), (128, (64, None))], {"0%": 16, "50%": 128}),
        ([(32, None), (64, None)], {"0%": 16, "20%": 32, "50%": 64}),
        ([(64, (64, None)), (16, (16, 32))], {"0%": 16, "20%": 64, "50%": 16}),
    ],
    ids=["equal", "no growth is shown", "grows", "the run's own", "no intervals", "falls"],
)
def test_the_plan_grows_only_if_that_is_shown(
    points: list[tuple[int, tuple[int, int | None] | None]], plan: dict[str, int]
) -> None:
    times = ("20%", "50%")
    found = {at: Critical(size, None, sure) for at, (size, sure) in zip(times, points, strict=True)}
    assert static_plan(found, 16) == plan
