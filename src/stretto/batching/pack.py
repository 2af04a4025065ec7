"""`pack`: the samples of a batch in micro-batches of at most so many tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapreplace
from itertools import pairwise
from operator import index

from stretto.batching.policy import Tokens, checked_size, checked_world_size
from stretto.batching.split import Split, in_rows
from stretto.errors import BatchSizeError, shown
from stretto.timing import Horizon
from stretto.timing.batches import Lengths

Piece = tuple[int, list[int]]
"""The tokens of a micro-batch as it is run, and the indices of its samples."""


def pack(
    lengths: Sequence[int], budget: int, world_size: int = 1, *, packed: bool = False
) -> list[list[list[int]]]:
    """Share samples over ranks and micro-batches, with a budget of tokens per micro-batch.

    Returns indices into `lengths`, by rank and pass. Each index occurs once, and all ranks have as
    many passes. An empty list is a dummy: run any sample with weight 0. The result depends only on
    the arguments, so each rank can compute it alone.

    A micro-batch costs its number of rows times its longest sample. There are as few passes as the
    budget allows. Samples of similar length are together, and the micro-batches of one pass cost
    alike.

    >>> pack([900, 120, 100, 500, 480, 110], budget=1000, world_size=2)
    [[[0], [1, 5, 2]], [[3], [4]]]

    Args:
        lengths: the tokens of each sample.
        budget: the most tokens of a micro-batch, padding included.
        world_size: how many ranks share the samples.
        packed: whether samples are joined without padding. Then a micro-batch costs their sum.

    Raises:
        BatchSizeError: a sample alone exceeds the budget, or a number is not valid.
    """
    budget = int(checked_size(budget, "a token budget", instead="write a number such as 4096"))
    world_size = checked_world_size(world_size)
    counts, order = _sorted(lengths)
    longest = [*map(counts.__getitem__, order)]
    if order and longest[0] > budget:
        raise too_long(order[0], longest[0], budget)
    cut = _joined if packed else _padded
    return _dealt(cut(order, longest, budget, world_size), world_size)


def too_long(sample: int, length: int, budget: int) -> BatchSizeError:
    """Return the error for a sample that is longer than a micro-batch may be."""
    what = f"run sample {sample} of {length:,} tokens in a micro-batch of {int(budget):,} tokens"
    instead = f"write a budget of at least {length}, or cut or leave out longer samples"
    return BatchSizeError.cannot(what, why="it exceeds the budget alone", instead=instead)


def checked_micro_batch(value: object, facts: Horizon) -> int | None:
    """Return the most samples of a micro-batch, or its budget of tokens, for one run.

    A budget for samples of equally many tokens becomes a number of samples.

    >>> checked_micro_batch("4_096tok", Horizon("1ep", tokens_per_sample=1000))
    4

    Raises:
        BatchSizeError: it is neither; or the longest sample, or the longest row of samples, alone
            exceeds it.
    """
    if value is None:
        return None
    size, each, lengths = (
        checked_size(value, "a micro-batch size"),
        facts.tokens_per_sample,
        facts.lengths,
    )
    if lengths is not None and isinstance(size, Tokens) and lengths.longest > size:
        raise too_long(lengths.longest_sample, lengths.longest, size)
    if each is not None and isinstance(size, Tokens):
        if each > size:
            raise too_long(0, each, size)
        size //= each
    if facts.group is not None and size < facts.group:
        why = f"the longest sequence alone takes {facts.group} samples"
        instead = f"write {facts.group} or more"
        raise BatchSizeError.bad("micro_batch_size", str(value), why, instead)
    return size


def num_passes(
    batch: range, world_size: int, micro: int | None, lengths: Lengths | None, *, row: int = 1
) -> int | None:
    """Return the micro-batches of each rank in a batch; None if they follow unknown lengths.

    >>> num_passes(range(13), 4, 2, None)
    2

    Args:
        batch: the positions of its samples.
        world_size: how many ranks share it.
        micro: the most samples that a rank takes at once, or a budget of tokens.
        lengths: the tokens of each sample.
        row: how many samples are joined to a row.
    """
    if not isinstance(micro, Tokens):
        size, micro = in_rows(batch.stop - batch.start, micro, row)  # `len` has a limit
        return Split(size, world_size, micro).accumulation
    if lengths is None:
        return None
    found = lengths.of(batch.start, batch.stop)
    return len(pack(found, micro, world_size, packed=lengths.packed)[0])


def _sorted(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the lengths as a list, and their places from the longest to the shortest."""
    try:
        counts = [*map(index, lengths)]
        order = sorted(range(len(counts)), key=counts.__getitem__, reverse=True)
        least = counts[order[-1]] if order else 1
    except TypeError:
        least = -1
    if least < 0:
        why, instead = "it is no sequence of whole numbers from 0", "pass the tokens of each sample"
        raise BatchSizeError.cannot(f"use lengths={shown(lengths)}", why=why, instead=instead)
    return counts if least else [count or 1 for count in counts], order  # an empty one is padded


def _padded(order: list[int], longest: list[int], budget: int, world_size: int) -> list[Piece]:
    """Cut samples in descending order of length into pieces of at most one price.

    The smallest price that needs no more pieces makes them equal; a piece below it only has rows of
    its own length left over.
    """

    def borders(price: int) -> list[int]:
        first, found, end = 0, [0], len(longest)
        while first < end:
            first = min(end, first + price // longest[first])
            found.append(first)
        return found

    most = -(-(len(borders(budget)) - 1) // world_size) * world_size
    least = max(*longest[:1], -(-sum(longest) // max(1, most)), 0)
    prices = range(least, budget, 1 + budget // 512)  # closer is slower and pads no less
    enough = bisect_left(prices, -most, key=lambda price: 1 - len(borders(price)))
    found = borders(prices[enough] if enough < len(prices) else budget)
    if world_size == 1 and most < 64:  # more of them pad little
        _move_borders(found, longest, budget)
    return [(longest[a] * (b - a), order[a:b]) for a, b in pairwise(found)]


def _move_borders(found: list[int], longest: list[int], budget: int) -> None:
    """Move each border to where the two pieces beside it pad least: one rank waits for no other."""
    for number in range(1, len(found) - 1):
        first, place, end = found[number - 1 : number + 2]
        step = max(1, (end - first) // 8)
        least = longest[first] * (place - first) + longest[place] * (end - place)
        while step:
            moved = place
            for other in (place - step, place + step):
                if first < other < end:
                    prices = longest[first] * (other - first), longest[other] * (end - other)
                    if sum(prices) < least and max(prices) <= budget:
                        moved, least = other, sum(prices)
            step = step if moved != place else step // 2
            place = found[number] = moved


def _joined(order: list[int], longest: list[int], budget: int, world_size: int) -> list[Piece]:
    """Give each sample, the longest first, to the piece with the fewest tokens.

    Not the differencing of Karmarkar and Karp: with many samples a piece the sums differ as
    little, in a tenth of the time.
    """
    least = -(-sum(longest) // budget)
    for number in range(1, 8):  # no piece has more than `number` of those longer than this
        length = budget // (number + 1)
        longer = bisect_left(longest, -length, key=lambda count: -count)
        least = max(least, -(-longer // number))
    parts = -(-least // world_size) * world_size
    while True:
        pieces: list[list[int]] = [[] for _ in range(parts)]
        sums = [*range(parts)]  # of each piece, times `parts`, plus its number
        for sample, count in zip(order, longest, strict=True):
            lightest = sums[0]
            pieces[lightest % parts].append(sample)
            heapreplace(sums, lightest + count * parts)
        found = [(sum_ // parts, pieces[sum_ % parts]) for sum_ in sums]
        if max(found, default=(0,))[0] <= budget:
            return found
        parts = -(-(parts + 1 + parts // 128) // world_size) * world_size


def _dealt(pieces: list[Piece], world_size: int) -> list[list[list[int]]]:
    """Give each rank one piece of each pass: pieces that cost alike, the lightest rank first."""
    pieces = sorted(pieces, key=lambda piece: -piece[0])
    if world_size == 1:
        return [[piece for _, piece in pieces]]
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    sums = [0] * world_size
    for first in range(0, len(pieces), world_size):
        dealt = pieces[first : first + world_size]
        dealt += [(0, [])] * (world_size - len(dealt))
        lightest = sorted(range(world_size), key=sums.__getitem__)
        for rank, (price, piece) in zip(lightest, dealt, strict=True):
            ranks[rank].append(piece)
            sums[rank] += price
    return ranks
