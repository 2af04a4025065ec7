"""The reactive way on any number of ranks, its samples fetched in this process."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from stretto.data import DataSpec
from stretto.data.fetch import Fetch, FetchedStep, Plans, RankShare
from stretto.data.map_style import MapSource, sample_steps
from stretto.ordering import SampleOrder, evenly, share
from stretto.planning import PlannedBatch
from stretto.runtime import Ranks
from stretto.settings import Loading
from stretto.timing import Timestamp


def plans(start: int, sizes: list[tuple[int, int]]) -> Plans:
    """Batches of some sizes, with some samples passed over before each."""
    for skipped, size in sizes:
        start += skipped
        yield PlannedBatch(Timestamp(sample=start), size, size, 0, 0, {}), start
        start += size


def fetched_steps(
    n: int, part: RankShare, bundle_size: int, end: int | None, batches: Plans
) -> list[FetchedStep]:
    data = TensorDataset(torch.arange(n))
    order = SampleOrder(n, 1)
    source = MapSource(DataSpec(data), order, part, Fetch(data), Loading())
    return list(sample_steps(source, bundle_size, end, batches))


@given(
    st.integers(1, 50),
    st.sampled_from([1, 2, 3, 8, 24]),
    st.sampled_from([None, 1, 3, 10]),
    st.integers(1, 12),
    st.data(),
)
def test_ranks_have_equally_many_micro_batches(
    n: int, world: int, micro: int | None, bundle_size: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, 200))
    batch = st.tuples(st.sampled_from([0, 0, 5]), st.integers(1, 99))
    sizes = data.draw(st.lists(batch, min_size=1, max_size=4))
    end = start + sum(skipped + size for skipped, size in sizes)
    known_end = data.draw(st.sampled_from([None, end, end + 7]))
    by_rank = [
        fetched_steps(
            n, RankShare(Ranks.of(rank, world), micro), bundle_size, known_end, plans(start, sizes)
        )
        for rank in range(world)
    ]
    order = SampleOrder(n, 1)
    for one_batch in zip(*by_rank, strict=True):
        assert len({len(fetched.micro_batches) for fetched in one_batch}) == 1
        for rank, fetched in enumerate(one_batch):
            taken: list[Any] = []
            for batch, count in fetched.micro_batches:
                values = batch[0].tolist()
                assert len(values) == max(1, count) <= (micro or len(values))
                taken += values if count else []
            owned = share(fetched.plan.timestamp.sample, fetched.size, rank, world)
            assert taken == [order[p] for p in owned]


@given(st.integers(1, 500), st.one_of(st.none(), st.integers(1, 50)))
def test_pieces_are_even(count: int, most: int | None) -> None:
    sizes = evenly(count, most=most)
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (most or count)
    assert len(sizes) == (1 if most is None else -(-count // most))
