"""Steps of map-style data: which samples a rank reads, and in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from operator import methodcaller
from typing import Any, final

from torch import Tensor

from stretto.batching.split import in_rows
from stretto.data.containers import count_samples, may_hold
from stretto.data.fetch import (
    CountedBatch,
    Cut,
    Fetch,
    FetchedStep,
    Piece,
    Plans,
    RankShare,
    share_sizes,
)
from stretto.data.indices import IndexStream
from stretto.data.spec import DataSpec
from stretto.data.workers import Element, fetched_ahead
from stretto.errors import DataError
from stretto.ordering import SampleOrder, stream_start
from stretto.planning import PlannedBatch
from stretto.settings import Loading

_MOST_AHEAD = 1 << 14
"""Indices that are cut into batches at once."""


@final
@dataclass(frozen=True, slots=True)
class MapSource:
    """A map-style data set, its order, and this rank's part of it."""

    spec: DataSpec
    order: SampleOrder
    part: RankShare
    fetch: Fetch
    loading: Loading
    """Its settings, with those of a given `DataLoader`."""
    cut: Cut | None = None
    """States the micro-batches sample by sample; None: they have equally many."""

    def stream(self) -> IndexStream:
        """Return the indices that this rank reads."""
        return IndexStream(
            self.order,
            rank=self.part.rank,
            world_size=self.part.world_size,
            with_epoch=self.loading.keyed_randomness,
        )

    def order_stream(self) -> IndexStream:
        """Return the indices that all ranks read, by position."""
        return IndexStream(self.order, with_epoch=self.loading.keyed_randomness)

    def place(self, position: int) -> int:
        """Return the place of a position in this rank's stream."""
        return stream_start(position, self.part.rank, self.part.world_size)

    def in_rows(self, row: int) -> MapSource:
        """Return the same data with rows of `row` consecutive samples for samples."""
        _, micro = in_rows(1, self.part.micro_batch_size, row)
        return replace(
            self,
            order=self.order.in_rows(row),
            part=self.part._replace(micro_batch_size=micro),
            fetch=self.fetch.in_rows(row, self.spec.tokens_per_sample or 0),
        )

    def check(self, batch: Any, num_samples: int) -> None:
        """Refuse a batch with another number of samples than requested."""
        count, is_joined = self.spec.get_num_samples_in_batch, self.cut and self.loading.packed
        if is_joined or (count is None and may_hold(batch, num_samples)):
            return
        found = count_samples(batch) if count is None else count(batch)
        if found is not None and found != num_samples:
            why = f"it was collated from {num_samples} samples and has {found}"
            all_count = "get_num_samples_in_batch=lambda batch: None"
            instead = f"keep all in collate_fn; or count all of them: DataSpec(data, {all_count})"
            raise DataError.cannot("use a batch", why=why, instead=instead)

    def pieces(self, plan: PlannedBatch, start: int) -> list[Piece]:
        """Return this rank's micro-batches of the batch at a position."""
        if self.cut is not None:
            return self.cut(plan.size, start)
        world, found = self.part.world_size, list[Piece]()
        first = (self.part.rank - start) % world
        for count in share_sizes(self.part, plan.size, start):
            after = first + count * world
            found.append(Piece(range(first, after, world) or (0,), count))
            first = after
        return found

    def step(self, plan: PlannedBatch, pieces: list[Piece], batches: list[Any]) -> FetchedStep:
        """Return a step of these micro-batches."""
        counted = [(batch, one.num_samples) for batch, one in zip(batches, pieces, strict=True)]
        for batch, count in counted:
            self.check(batch, count or 1)
        tokens = [one.num_tokens for one in pieces if one.num_tokens is not None]
        return FetchedStep(plan, counted, plan.size, tokens=tokens if self.cut else None)


def by_rows(steps: Callable[..., Iterator[FetchedStep]]) -> Callable[..., Iterator[FetchedStep]]:
    """Let a reader of samples read rows too: anew for each length of them."""

    def rows(source: MapSource, *given: Any) -> Iterator[FetchedStep]:
        *settings, plans = given
        for row, alike in groupby(plans, key=lambda planned: planned[0].row):
            own = ((plan._replace(size=plan.size // row), start // row) for plan, start in alike)
            for plan, micro_batches, size, *_ in steps(source.in_rows(row), *settings, own):
                counted = [(batch, count * row) for batch, count in micro_batches]
                yield FetchedStep(plan._replace(size=size * row), counted, size * row)

    return lambda source, *given: (steps if source.order.group == 1 else rows)(source, *given)


@by_rows
def direct_steps(source: MapSource, plans: Plans) -> Iterator[FetchedStep]:
    """Fetch each micro-batch in the main process, at the step."""
    stream, fetch, part = source.stream(), source.fetch, source.part
    world = part.world_size
    size = after = 0
    rows: Iterator[Tensor] = iter(())
    for plan, start in plans:
        if plan.size != size or start != after or world > 1:
            size, sizes = plan.size, share_sizes(part, plan.size, start)
            ahead, rows = 1, iter(())
        after = start + size
        place = start if world == 1 else source.place(start)
        micro_batches: list[CountedBatch] = []
        for count in sizes:
            if fetch.tensors is not None and count == plan.size:
                indices = next(rows, None)
                if indices is None:  # cutting many at once takes a fifth of the time
                    rows = iter(stream.tensor(place, ahead * count).split(count))
                    indices, ahead = next(rows), min(2 * ahead, 1 + _MOST_AHEAD // count)
                batch: Any = [*map(methodcaller("index_select", 0, indices), fetch.tensors)]
            else:
                batch = fetch.read(stream, place, count) if count else fetch([stream.at(start)])
                if fetch.tensors is None:
                    source.check(batch, count or 1)
            place += count
            micro_batches.append((batch, count))
        yield FetchedStep(plan, micro_batches, plan.size)


def direct_pieces(source: MapSource, plans: Plans) -> Iterator[FetchedStep]:
    """Do the same for micro-batches that are stated sample by sample."""
    stream = source.order_stream()
    for plan, start in plans:
        indices, pieces = stream.take(start, plan.size), source.pieces(plan, start)
        batches = [source.fetch([indices[one] for one in piece.places]) for piece in pieces]
        yield source.step(plan, pieces, batches)


@by_rows
def planned_steps(source: MapSource, plans: Plans) -> Iterator[FetchedStep]:
    """Let workers collate micro-batches ahead: for sizes that are known before the run."""
    first = next(plans, None)
    if first is None:
        return
    stream, ahead = source.stream(), deque[tuple[PlannedBatch, list[Piece]]]()
    order = source.order_stream()

    def elements() -> Iterator[Element]:
        for plan, start in chain((first,), plans):
            pieces = source.pieces(plan, start)
            ahead.append((plan, pieces))
            if source.cut is not None:
                indices = order.take(start, plan.size)
                for piece in pieces:
                    # Its first sample is in no other piece, so the seed of a worker is its own.
                    yield start + piece.places[0], [indices[one] for one in piece.places]
                continue
            place = source.place(start)
            for _, count, _ in pieces:
                yield place, stream.take(place, count) if count else [stream.at(start)]
                place += count

    batches = fetched_ahead(source.fetch, elements(), source.spec, source.loading, source.part.rank)
    for batch in batches:
        plan, pieces = ahead.popleft()
        yield source.step(plan, pieces, [batch, *islice(batches, len(pieces) - 1)])


@by_rows
def sample_steps(
    source: MapSource, bundle_size: int, end: int | None, plans: Plans
) -> Iterator[FetchedStep]:
    """Let workers fetch samples ahead; the main process collates each micro-batch at the step.

    For sizes decided during the run. Workers fetch bundles of one size, independent of batch
    sizes. So a resumed run has the same bundles, and workers draw the same random numbers.

    Args:
        source: the data.
        bundle_size: the samples of a bundle.
        end: the position at which the run ends; None if unknown.
        plans: the decided batches.
    """
    stream, part, unpinned = source.stream(), source.part, replace(source.loading, pin_memory=False)
    last = None if end is None else source.place(end)
    bundles: Iterator[Any] | None = None
    samples: deque[Any] = deque()

    def elements(place: int) -> Iterator[Element]:
        while last is None or place < last:
            count = bundle_size if last is None else min(bundle_size, last - place)
            yield place, stream.take(place, count)
            place += bundle_size

    def taken(count: int) -> list[Any]:
        """Remove and return the next samples; read more bundles if there are too few."""
        assert bundles is not None, "begun"
        while len(samples) < count:
            samples.extend(next(bundles).samples())
        return [samples.popleft() for _ in range(count)]

    for plan, start in plans:
        place = source.place(start)
        if bundles is None:
            next_place = place - place % bundle_size  # place of the first sample in `samples`
            bundles = fetched_ahead(
                source.fetch.uncollated(), elements(next_place), source.spec, unpinned, part.rank
            )
        taken(place - next_place)  # skipped, or before the position of a resumed run
        next_place = source.place(start + plan.size)
        own = range((part.rank - start) % part.world_size, plan.size, part.world_size)
        share = dict(zip(own, taken(next_place - place), strict=True))
        pieces = source.pieces(plan, start)
        batches = [
            source.fetch.collate([share.pop(one) for one in piece.places])
            if piece.num_samples
            else source.fetch([stream.at(start + piece.places[0])])
            for piece in pieces
        ]
        yield source.step(plan, pieces, batches)
