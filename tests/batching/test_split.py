from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import split
from stretto.errors import BatchSizeError

sizes, worlds = st.integers(1, 500), st.integers(1, 64)


@given(sizes, worlds, st.integers(0, 10**20))
def test_each_rank_owns_the_positions_of_its_remainder(size: int, world: int, start: int) -> None:
    shares = split(size, world, start=start).shares
    owned = [0] * world
    for position in range(start, start + size):
        owned[position % world] += 1
    assert list(shares) == owned
    assert max(shares) - min(shares) <= 1


@given(sizes, worlds, st.integers(1, 100), st.integers(0, 1000))
def test_micro_batches_multiply_back(size: int, world: int, micro: int, start: int) -> None:
    shared = split(size, world, micro, start=start)
    for rank in range(world):
        sizes = shared.micro_batch_sizes(rank)
        assert sum(sizes) == shared.share(rank)
        assert len(sizes) == shared.accumulation
        assert max(sizes) <= micro
        assert max(sizes) - min(sizes) <= 1
    # As few as the largest share allows.
    assert (shared.accumulation - 1) * micro < max(shared.shares)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(0, 100))
def test_even_splits_are_full_micro_batches(world: int, micro: int, steps: int, start: int) -> None:
    shared = split(world * micro * steps, world, micro, even=True, start=start)
    assert shared.accumulation == steps
    assert {shared.micro_batch_sizes(rank) for rank in range(world)} == {(micro,) * steps}


def test_without_a_micro_batch_size_a_share_is_one() -> None:
    shared = split(10, 4)
    assert shared.shares == (3, 3, 2, 2)
    assert shared.accumulation == 1
    assert shared.micro_batch_sizes(3) == (2,)


def test_it_is_a_value() -> None:
    shared = split(13, 4, 2, start=5)
    assert eval(repr(shared), {"Split": type(shared)}) == shared


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: split(0, 2), "use 0 as a batch size"),
        (lambda: split(8, 0), "use 0 as a world size"),
        (lambda: split(8, 2, 0), "use 0 as a micro-batch size"),
        (lambda: split(8, 2, start=-1), "start=-1"),
        (lambda: split(8, 2, start=0.5), "start=0.5"),  # type: ignore[arg-type]
        (
            lambda: split(40, 4, 4, even=True),
            "32 or 48",
        ),
        (lambda: split(3, 4, even=True), "a multiple such as 4 or 8"),
    ],
)
def test_wrong_splits_are_refused(make: object, match: str) -> None:
    assert callable(make)
    with pytest.raises(BatchSizeError, match=match):
        make()
