"""The price of a step, from made clocks: known where it can be, and never guessed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from stretto.batching.step_cost import StepCost, StepSeconds, ladder, measured
from stretto.errors import BatchSizeError

WIDE = (4, 27, 181, 1218, 8192)


def made_clock(ratio: float, seed: int) -> tuple[Callable[[int], float], list[int]]:
    """Steps of `ratio + size` ms: 5 percent jitter, 1 percent stalls, a slow start."""
    chance, run = random.Random(seed), list[int]()

    def seconds_of(size: int) -> float:
        run.append(size)
        seconds = 1e-3 * (ratio + size) * math.exp(0.05 * chance.gauss(0, 1))
        return seconds * (20 if len(run) <= 5 else 1) * (10 if chance.random() < 0.01 else 1)

    return seconds_of, run


def rows_of(sizes: tuple[int, ...], ratio: float) -> list[StepSeconds]:
    return [StepSeconds(size, ratio + size) for size in sizes for _ in range(3)]


@pytest.mark.parametrize(
    ("sizes", "share", "size"),
    [
        (WIDE, 0.1, 4),
        (WIDE, 0.5, 4),
        (WIDE, 0.5, 181),
        (WIDE, 0.5, 8192),
        (WIDE, 0.85, 8192),
        ((16, 64, 256), 0.1, 16),
        ((16, 64, 256), 0.5, 64),
        ((16, 64, 256), 0.85, 256),
    ],
)
def test_the_ratio_is_within_20_percent_in_95_of_100_runs(
    sizes: tuple[int, ...], share: float, size: int
) -> None:
    ratio = size * share / (1 - share)
    found = [measured(made_clock(ratio, seed)[0], sizes).line for seed in range(100)]
    ratios = [line.ratio if line else None for line in found]
    assert sum(one is not None and abs(one / ratio - 1) <= 0.2 for one in ratios) >= 95
    covered = [line is not None and line.interval[0] <= ratio <= line.interval[1] for line in found]
    assert sum(covered) >= 90


@pytest.mark.parametrize("ratio", [0.01, 0.1, 1e6])
def test_elsewhere_it_is_within_a_factor_of_2_or_not_known(ratio: float) -> None:
    found = [measured(made_clock(ratio, seed)[0], WIDE).line for seed in range(100)]
    ratios = [line.ratio for line in found if line is not None]
    assert len(ratios) == 100
    assert all(one is None or 0.5 <= one / ratio <= 2 for one in ratios)


@pytest.mark.parametrize("sizes", [WIDE, (16, 64, 256), (32, 64), (32,)])
@pytest.mark.parametrize("ratio", [0.1, 64, 1e5])
def test_it_takes_the_time_of_100_steps_of_the_largest_size_at_most(
    sizes: tuple[int, ...], ratio: float
) -> None:
    run = list[int]()

    def seconds_of(size: int) -> float:
        run.append(size)
        return ratio + size

    measured(seconds_of, sizes)
    assert sum(ratio + size for size in run) <= 100 * (ratio + max(run))


def test_one_size_without_accumulation_is_never_an_answer() -> None:
    for seed in range(20):
        cost = measured(made_clock(64, seed)[0], [32])
        assert cost.line is None
        assert cost.bounded_ratio() is None
        assert "no split" in str(cost.unknown)
        assert "not known" in str(cost)


def test_one_size_with_accumulation_is_enough() -> None:
    cost = StepCost([StepSeconds(64, 0.1, 0.001 * part) for part in (0.98, 1, 1.02)])
    assert cost.line is not None
    assert cost.line.ratio == pytest.approx(36, rel=0.01)
    assert "micro-batches" in str(cost)


def test_seconds_are_those_measured_and_the_line_beyond_them() -> None:
    bent = [StepSeconds(8, 1.0), StepSeconds(16, 1.0), StepSeconds(32, 2.0), StepSeconds(64, 4.0)]
    cost = StepCost(bent)
    assert [cost.seconds(size) for size in (8, 12, 16, 24, 64)] == [1, 1, 1, 1.5, 4]
    assert cost.line is not None
    assert cost.line.misfit > 0.1
    assert cost.seconds(128) == pytest.approx(7.5, rel=0.1)


def test_what_disturbs_only_adds() -> None:
    rows = rows_of((8, 32, 128), 40)
    disturbed = [*rows, StepSeconds(8, 500.0), StepSeconds(128, 900.0)]
    assert StepCost(disturbed).sizes == StepCost(rows).sizes
    assert StepCost(rows).fastest == {8: 48, 32: 72, 128: 168}


def test_a_part_too_small_to_be_seen_counts_as_a_tenth() -> None:
    assert StepCost(rows_of((8, 32, 128), 1e-6)).bounded_ratio() == pytest.approx(0.8)
    assert StepCost(rows_of((8, 32, 128), 1e9)).bounded_ratio() == pytest.approx(1280)


def test_rows_that_are_none_are_refused() -> None:
    for rows in ([], [StepSeconds(8, 0.0)], [StepSeconds(8, math.nan)]):
        with pytest.raises(BatchSizeError, match="pass rows"):
            StepCost(rows)
    with pytest.raises(BatchSizeError, match="measure more sizes"):
        StepCost([StepSeconds(8, 1.0)]).seconds(16)


def test_a_ladder_has_equal_ratios() -> None:
    assert ladder(8, 128) == [8, 16, 32, 64, 128]
    assert ladder(8, 16) == [8, 16]
    assert ladder(8, 8) == [8]


@pytest.mark.parametrize("fits", [0, 31, 64])
def test_sizes_without_memory_are_left_out_and_none_at_all_is_refused(fits: int) -> None:
    def seconds_of(size: int) -> float:
        return 1.0 + size if size <= fits else math.inf

    if fits < 32:
        with pytest.raises(BatchSizeError, match="smaller"):
            measured(seconds_of, [32, 64, 128])
    else:
        assert [*measured(seconds_of, [32, 64, 128]).sizes] == [32, 64]


@pytest.mark.parametrize("sizes", [[], [8, 4], [4, 4], [0, 4], [1, 2, 3, 4, 5, 6]])
def test_sizes_that_would_not_all_be_timed_are_refused(sizes: list[int]) -> None:
    with pytest.raises(BatchSizeError, match="rising"):
        measured(lambda _: 1.0, sizes)
