from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import DataError
from stretto.ordering import SampleOrder

SIZES = st.integers(1, 400)
SEEDS = st.integers(-(2**70), 2**70)


@given(SIZES, SEEDS, st.integers(0, 2**40), st.booleans())
def test_every_epoch_holds_every_sample_once(n: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = SampleOrder(n, seed, shuffle)
    start = epoch * n
    assert sorted(order[p] for p in range(start, start + n)) == list(range(n))
    assert order.epoch_of(start) == order.epoch_of(start + n - 1) == epoch


@given(st.integers(1, 2**62), SEEDS, st.integers(0, 2**80))
def test_an_index_lies_in_the_data_set_for_any_size_and_position(
    n: int, seed: int, position: int
) -> None:
    assert 0 <= SampleOrder(n, seed)[position] < n


def test_the_order_is_pinned_for_ever() -> None:
    # A saved run resumes only if a later version gives the same order.
    assert [SampleOrder(10, seed=7)[p] for p in range(20)] == PINNED_10
    assert [SampleOrder(10**9, seed=7)[p] for p in (0, 1, 10**9, 10**12)] == PINNED_1E9
    assert [SampleOrder(5000, seed=0)[p] for p in (0, 1, 5000)] == PINNED_5000


PINNED_10 = [9, 3, 6, 8, 4, 7, 1, 0, 2, 5, 0, 9, 8, 7, 2, 6, 5, 4, 3, 1]
PINNED_1E9 = [460396808, 714612204, 240962552, 37003578]
PINNED_5000 = [2211, 1289, 2956]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_order_of_a_few_samples_comes_equally_often(n: int) -> None:
    orders = list(permutations(range(n)))
    draws = 200 * len(orders)
    counts = Counter(
        tuple(SampleOrder(n, seed)[p] for p in range(n, 2 * n)) for seed in range(draws)
    )
    # Each count is binomial with mean 200 and deviation below 15; five of them are 75.
    assert all(abs(counts[order] - 200) < 75 for order in orders)


def test_epochs_and_seeds_differ() -> None:
    one, other = SampleOrder(1000, seed=1), SampleOrder(1000, seed=2)
    first = [one[p] for p in range(1000)]
    for second in ([one[p] for p in range(1000, 2000)], [other[p] for p in range(1000)]):
        # Two random orders agree in one place on average.
        assert sum(a == b for a, b in zip(first, second, strict=True)) < 10


def test_a_billion_samples_take_no_memory() -> None:
    tracemalloc.start()
    order = SampleOrder(10**9, seed=3)
    _ = [order[p] for p in range(0, 10**9, 10**7)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("n", [0, -1, 1.0, True, None, 2**63])
def test_what_is_no_number_of_samples_is_refused(n: object) -> None:
    with pytest.raises(DataError, match="integer"):
        SampleOrder(n)  # type: ignore[arg-type]


def test_a_seed_is_an_integer() -> None:
    with pytest.raises(DataError, match="integer"):
        SampleOrder(3, "7")  # type: ignore[arg-type]


def test_there_are_no_positions_before_the_start() -> None:
    with pytest.raises(IndexError, match="counted"):
        SampleOrder(3)[-1]
