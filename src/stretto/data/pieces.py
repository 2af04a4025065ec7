"""Micro-batches with a budget of tokens: how a batch of known lengths is cut."""

from __future__ import annotations

from itertools import count, islice

from stretto.batching import pack
from stretto.batching.metrics import NOISE
from stretto.data.fetch import Cut, Piece
from stretto.data.map_style import MapSource
from stretto.errors import DataError
from stretto.ordering import evenly
from stretto.planning import Prepared


def cut_by_tokens(source: MapSource, run: Prepared) -> Cut:
    """Return how this rank cuts the batches of a run into micro-batches within the token budget.

    All ranks know all lengths, so each finds the number of passes alone.

    - Sizes known before the run: `pack` gives each rank its samples.
    - Sizes decided during the run: each rank packs its own share, which workers read ahead.
    - Sizes that follow the gradient noise: the parts of a share are of equal size and in the order
      of the run. The noise is measured by comparing micro-batches, and those sorted by length
      differ more than random ones.
    """
    part, packed, is_compared = source.part, source.loading.packed, NOISE in run.bound_policy.reads
    rank, world, budget = part.rank, part.world_size, part.micro_batch_size
    lengths = source.spec.ordered_lengths(source.loading)
    if lengths is None or budget is None:
        raise DataError.cannot(
            f"cut batches into micro-batches of {budget}",
            why="how many tokens each sample has is not known",
            instead="pass DataSpec(data, lengths=...), or tokens_per_sample=... if all are equal",
        )

    def passes(tokens: list[int], start: int) -> list[list[int]]:
        if run.is_planned:
            return pack(tokens, budget, world, packed=packed)[rank]
        shares = [range((one - start) % world, len(tokens), world) for one in range(world)]
        each = [[tokens[place] for place in share] for share in shares]
        if is_compared:
            places, parts = iter(shares[rank]), _parts(each, budget, packed=packed)
            return [list(islice(places, size)) for size in evenly(len(shares[rank]), parts=parts)]
        cuts = [pack(one, budget, packed=packed)[0] for one in each]
        own = [[shares[rank][place] for place in piece] for piece in cuts[rank]]
        return own + [[]] * (max(map(len, cuts)) - len(own))

    def cut(size: int, start: int) -> list[Piece]:
        tokens = list(lengths.of(start, start + size))
        shortest = [tokens.index(min(tokens))]
        return [
            Piece(places or shortest, len(places), sum(map(tokens.__getitem__, places)))
            for places in passes(tokens, start)
        ]

    return cut


def _parts(shares: list[list[int]], budget: int, *, packed: bool) -> int:
    """Return into how many parts of equal size each share is cut: as few as the budget allows."""

    def fits(share: list[int], parts: int) -> bool:
        rest = iter(share)
        pieces = (list(islice(rest, size)) for size in evenly(len(share), parts=parts))
        prices = (sum(one) if packed else len(one) * max(one, default=0) for one in pieces)
        return all(price <= budget for price in prices)

    least = max(1, *(-(-sum(share) // budget) for share in shares))
    return next(parts for parts in count(least) if all(fits(share, parts) for share in shares))
