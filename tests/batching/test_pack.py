"""`pack`: the samples of a batch in micro-batches of at most so many tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import pack
from stretto.errors import BatchSizeError


def price(piece: list[int], lengths: list[int], *, packed: bool) -> int:
    """Return the tokens of a micro-batch as it is run."""
    tokens = [lengths[sample] for sample in piece]
    return sum(tokens) if packed else len(tokens) * max(tokens, default=0)


batches = st.lists(st.integers(0, 300), min_size=0, max_size=120)


@given(batches, st.integers(300, 2000), st.integers(1, 9), st.booleans())
def test_each_sample_occurs_once_within_the_budget(
    lengths: list[int], budget: int, world_size: int, packed: bool
) -> None:
    ranks = pack(lengths, budget, world_size, packed=packed)
    assert len(ranks) == world_size
    assert len({len(passes) for passes in ranks}) == 1
    pieces = [piece for passes in ranks for piece in passes]
    assert sorted(sample for piece in pieces for sample in piece) == [*range(len(lengths))]
    assert all(price(piece, lengths, packed=packed) <= budget for piece in pieces)
    assert ranks == pack(tuple(lengths), budget, world_size, packed=packed)
    assert all(any(passes[number] for passes in ranks) for number in range(len(ranks[0])))


@given(batches.filter(bool), st.integers(300, 2000), st.integers(1, 9))
def test_padded_passes_are_as_few_as_the_budget_allows(
    lengths: list[int], budget: int, world_size: int
) -> None:
    left, least = sorted(lengths), 0
    while left:  # as many of the longest as fit: no cut needs fewer pieces
        rows = budget // max(1, left[-1])
        left, least = left[: max(0, len(left) - rows)], least + 1
    assert len(pack(lengths, budget, world_size)[0]) == -(-least // world_size)


@given(batches.filter(bool), st.integers(300, 2000), st.integers(1, 9))
def test_joined_passes_are_at_most_twice_the_least(
    lengths: list[int], budget: int, world_size: int
) -> None:
    least = max(1, sum(lengths) / budget, sum(2 * one > budget for one in lengths))
    passes = len(pack(lengths, budget, world_size, packed=True)[0])
    assert passes <= -(-(2 * least + 1) // world_size)


def test_passes_cost_alike_on_all_ranks() -> None:
    lengths = [10 + 7 * place % 990 for place in range(2000)]
    ranks = pack(lengths, 4000, 8)
    costs = [[price(piece, lengths, packed=False) for piece in passes] for passes in ranks]
    waiting = sum(map(max, zip(*costs, strict=True)))
    assert waiting * 8 <= 1.05 * sum(lengths)


def test_joined_sums_are_alike() -> None:
    lengths = [10 + 7 * place % 990 for place in range(2000)]
    ranks = pack(lengths, 4000, 8, packed=True)
    tokens = [sum(lengths[sample] for piece in passes for sample in piece) for passes in ranks]
    assert max(tokens) * 8 <= 1.001 * sum(lengths)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_too_long_a_sample_is_named(packed: bool) -> None:
    with pytest.raises(BatchSizeError, match=r"sample 2 of 4,097 tokens .* at least 4097"):
        pack([1, 2, 4097, 3], 4096, packed=packed)


@pytest.mark.parametrize("lengths", [[1, -2], [1.5], 3, ["a"]], ids=str)
def test_lengths_are_whole_numbers(lengths: list[int]) -> None:
    with pytest.raises(BatchSizeError, match="lengths"):
        pack(lengths, 10)


@pytest.mark.long
def test_a_million_micro_batches_are_within_the_budget() -> None:
    chance, count = random.Random(), 0
    while count < 1_000_000:
        longest = chance.choice([64, 512, 4096])
        lengths = [chance.randint(0, longest) for _ in range(chance.randint(1, 5000))]
        budget = chance.randint(longest, 8 * longest)
        world_size, packed = chance.choice([1, 2, 7, 8, 64]), chance.random() < 0.3
        ranks = pack(lengths, budget, world_size, packed=packed)
        assert len({len(passes) for passes in ranks}) == 1
        pieces = [piece for passes in ranks for piece in passes]
        assert all(price(piece, lengths, packed=packed) <= budget for piece in pieces)
        assert sorted(sample for piece in pieces for sample in piece) == [*range(len(lengths))]
        count += len(pieces)
