from __future__ import annotations

import math
import random

import pytest

from stretto.errors import TrainingError
from stretto.experiments.critical_batch_size import (
    Branch,
    CriticalBatchSize,
    check_sizes,
    check_tolerance,
)

SIZES = (8, 16, 32, 64, 128)


def branches(excess: dict[int, float], *, noise: float = 0.0, seeds: int = 3) -> list[Branch]:
    chance = random.Random(7)
    return [
        Branch(size, seed, 1024 // size, 1e-3, 2.0 + 0.1 * seed + value + chance.gauss(0, noise))
        for size, value in excess.items()
        for seed in range(seeds)
    ]


def test_the_size_is_where_the_excess_passes_the_tolerance() -> None:
    excess = {8: 0.0, 16: 0.0, 32: 0.0, 64: 0.02, 128: 0.08}
    found = CriticalBatchSize.of(branches(excess), samples=1024, tolerance=0.01)
    assert found.size == pytest.approx(32 * math.sqrt(2))
    assert (found.low, found.high) == (32, 64)
    assert [row.verdict for row in found.rows] == ["below", "below", "below", "above", "above"]


def test_differences_are_by_seed() -> None:
    # The seeds differ by 0.1, ten times the tolerance; what they share does not count.
    found = CriticalBatchSize.of(
        branches({8: 0.0, 16: 0.001, 32: 0.05}), samples=1024, tolerance=0.01
    )
    assert (found.low, found.high) == (16, 32)
    assert found.rows[1].reach < 1e-9


def test_noise_widens_the_answer() -> None:
    excess = {8: 0.0, 16: 0.0, 32: 0.005, 64: 0.02, 128: 0.2}
    found = CriticalBatchSize.of(branches(excess, noise=0.005), samples=1024, tolerance=0.01)
    assert found.low < 64
    assert found.high is not None
    assert found.high >= 64
    assert found.low < found.high


def test_no_size_is_too_large() -> None:
    found = CriticalBatchSize.of(branches(dict.fromkeys(SIZES, 0.0)), samples=1024, tolerance=0.01)
    assert (found.size, found.low, found.high) == (None, 128, None)
    assert str(found).startswith("critical batch size: at least 128 (loss within 0.01 of that at 8")


def test_seeds_that_are_the_same_run_tell_no_interval() -> None:
    same = [
        Branch(size, seed, 1024 // size, 1e-3, 2.0 + size / 100)
        for size in (8, 16)
        for seed in range(3)
    ]
    found = CriticalBatchSize.of(same, samples=1024, tolerance=0.01)
    assert found.rows[1].verdict == "open"
    assert "undecided (the same with every seed)" in found.table()


def by_size(*losses: tuple[int, list[float]]) -> CriticalBatchSize:
    one = [
        Branch(size, seed, 1024 // size, 1e-3, loss)
        for size, all_seeds in losses
        for seed, loss in enumerate(all_seeds)
    ]
    return CriticalBatchSize.of(one, samples=1024, tolerance=0.01)


def test_the_interval_is_students() -> None:
    found = by_size((8, [2.0, 2.1, 2.2]), (16, [2.01, 2.12, 2.23]))
    assert found.rows[1].excess == pytest.approx(0.02)
    # Two degrees of freedom: 2.920 standard errors hold 90 percent; sd of .01, .02 and .03 is .01.
    assert found.rows[1].reach == pytest.approx(2.920 * 0.01 / 3**0.5, rel=1e-3)


def test_a_size_is_within_only_where_all_smaller_ones_are() -> None:
    sure, unsure = [2.0, 2.1, 2.2], [2.0, 2.13, 2.18]
    found = by_size((8, sure), (16, [2.0001, 2.1, 2.2]), (32, unsure), (64, [2.0, 2.1001, 2.2]))
    assert [row.verdict for row in found.rows] == ["below", "below", "open", "below"]
    assert (found.low, found.high) == (16, None)


@pytest.mark.parametrize(("times", "diverges"), [(9.0, False), (11.5, True)])
def test_ten_times_the_loss_is_a_divergence(times: float, diverges: bool) -> None:
    found = by_size((8, [2.0, 2.0]), (16, [2.0 * (1 + times), 2.0 * (1 + times) + 0.01]))
    assert math.isinf(found.rows[1].excess) == diverges


def test_a_single_seed_tells_no_interval() -> None:
    found = CriticalBatchSize.of(
        branches({8: 0.0, 16: 0.0, 32: 0.05}, seeds=1), samples=1024, tolerance=0.01
    )
    assert found.size == pytest.approx(16 * 2**0.2)
    assert (found.low, found.high) == (8, None)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 4.3e15])
def test_a_size_that_diverges_is_beyond(loss: float) -> None:
    excess = {8: 0.0, 16: 0.0, 32: loss}
    found = CriticalBatchSize.of(branches(excess), samples=1024, tolerance=0.01)
    assert found.size == 16
    assert found.low == 16
    assert found.rows[-1].verdict == "above"
    assert found.high == 32


def test_one_seed_that_diverges_is_enough() -> None:
    """However far the others are from it, which no interval would survive."""
    several = branches({8: 0.0, 16: 0.0, 32: 0.005})
    several[-1] = several[-1]._replace(loss=1e9)
    found = CriticalBatchSize.of(several, samples=1024, tolerance=0.01)
    assert (found.low, found.high) == (16, 32)
    assert found.table().splitlines()[-1].endswith("  diverges")


def test_losses_near_zero_may_be_many_times_as_large() -> None:
    """What counts then is the tolerance."""
    losses = {8: 1e-9, 16: 1e-7}
    few = [
        Branch(size, seed, 9, 1.0, losses[size] * (1 + seed)) for size in losses for seed in (0, 1)
    ]
    found = CriticalBatchSize.of(few, samples=1024, tolerance=0.01)
    assert (found.low, found.high) == (16, None)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_baseline_that_diverges_is_refused(loss: float) -> None:
    excess = {8: loss, 16: 0.0}
    with pytest.raises(TrainingError, match="diverged"):
        CriticalBatchSize.of(branches(excess), samples=1024, tolerance=0.01)


@pytest.mark.parametrize("tolerance", [math.nan, math.inf, -0.01])
def test_a_tolerance_is_a_number(tolerance: float) -> None:
    with pytest.raises(TrainingError, match=r"write for example --tolerance 0\.01"):
        check_tolerance(tolerance)
    with pytest.raises(TrainingError, match=r"write for example --tolerance 0\.01"):
        CriticalBatchSize.of(branches({8: 0.0, 16: 0.01}), samples=1024, tolerance=tolerance)


@pytest.mark.parametrize("sizes", [(8,), (16, 8), (8, 8), (0, 8), ()])
def test_sizes_are_two_or_more_in_order(sizes: tuple[int, ...]) -> None:
    with pytest.raises(TrainingError, match="not two or more in ascending order"):
        check_sizes(sizes, 1024)


def test_the_largest_size_has_some_steps() -> None:
    check_sizes((8, 256), 1024)
    with pytest.raises(TrainingError, match="that is less than 4 steps"):
        check_sizes((8, 257), 1024)
