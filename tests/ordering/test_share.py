from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import split
from stretto.ordering import share, stream_start

POSITIONS = st.integers(0, 10**12)
WORLDS = st.integers(1, 64)


@given(POSITIONS, st.integers(1, 300), WORLDS)
def test_shares_cover_the_batch_once_and_differ_by_at_most_one(
    start: int, size: int, world: int
) -> None:
    shares = [share(start, size, rank, world) for rank in range(world)]
    assert sorted(p for one in shares for p in one) == list(range(start, start + size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert tuple(map(len, shares)) == split(size, world, start=start).shares


@given(POSITIONS, WORLDS, st.data())
def test_a_stream_is_one_line_whatever_the_batches(
    position: int, world: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    place = stream_start(position, rank, world)
    assert place == len(range(rank, position, world))
    # The first position of the stream at or after `position` is the first of any share from there.
    assert share(position, world, rank, world)[0] == rank + place * world
