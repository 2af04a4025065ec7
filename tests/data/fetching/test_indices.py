from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.data.indices import IndexStream, permuted_block
from stretto.ordering import SampleOrder

SIZES = st.one_of(st.integers(1, 50), st.sampled_from([255, 256, 4000, 65535, 65536, 10**9, 2**62]))


@given(SIZES, st.integers(-(2**70), 2**70), st.integers(0, 10**6), st.data())
def test_a_block_is_the_same_order_as_one_index_at_a_time(
    n: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    order = SampleOrder(n, seed)
    start = data.draw(st.integers(0, max(0, n - 64)))
    within = torch.arange(start, min(n, start + 64))
    expected = [order[epoch * n + i] for i in within.tolist()]
    assert permuted_block(within, order, epoch).tolist() == expected


@given(st.integers(1, 2000), st.booleans(), st.booleans(), st.integers(1, 9), st.data())
def test_a_stream_gives_its_ranks_positions_however_it_is_read(
    n: int, shuffle: bool, with_epoch: bool, world: int, data: st.DataObject
) -> None:
    order = SampleOrder(n, 5, shuffle)
    reads = data.draw(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 99)), max_size=5))
    reads.append((0, 1200))  # more than the first block
    rank = data.draw(st.integers(0, world - 1))
    stream = IndexStream(order, rank=rank, world_size=world, with_epoch=with_epoch)
    place = data.draw(st.integers(0, 10_000))
    for skipped, count in reads:
        place += skipped
        shown = {0, 1, count // 2, count - 2, count - 1} & set(range(count))
        taken, tensor = stream.take(place, count), stream.tensor(place, count)
        assert len(taken) == len(tensor) == count
        for i in shown:
            position = rank + (place + i) * world
            before = order.epoch_of(position) * n if with_epoch else 0
            assert taken[i] == tensor[i] == before + order[position]
        assert stream.at(rank + place * world) == taken[0]
        place += count


def test_a_stream_can_be_read_backwards() -> None:
    stream = IndexStream(SampleOrder(100, 3))
    later = stream.take(50, 20)
    assert stream.take(10, 60)[40:] == later


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 4), st.integers(1, 4), st.data())
def test_groups_stay_together_in_both_forms_of_the_order(
    groups: int, group: int, seed: int, world_size: int, data: st.DataObject
) -> None:
    """Groups are permuted as single samples would be, and the tensors agree with the numbers."""
    order = SampleOrder(groups * group, seed, group=group)
    plain = SampleOrder(groups, seed)
    row = data.draw(st.sampled_from([one for one in range(1, group + 1) if group % one == 0]))
    for position in range(2 * groups * group):
        number, inside = divmod(position, group)
        assert order[position] == plain[number] * group + inside
        assert order.in_rows(row)[position // row] * row == order[position // row * row]
    rank = data.draw(st.integers(0, world_size - 1))
    count = groups * group
    taken = IndexStream(order, rank=rank, world_size=world_size).take(0, count)
    assert taken == [order[rank + at * world_size] for at in range(count)]
