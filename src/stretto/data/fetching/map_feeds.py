"""Feeds for map-style data sets: fetched at the step, or ahead by workers in one of three ways."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, final

from torch import Tensor

from stretto.data.containers import may_hold
from stretto.data.fetching.feed import (
    CountedBatch,
    Feed,
    FetchedStep,
    Part,
    Plans,
    Shares,
    evenly,
    first_sample,
    pinned,
)
from stretto.data.fetching.fetch import Fetch, no_such_sample
from stretto.data.fetching.indices import IndexStream
from stretto.data.fetching.workers import Element, Workers, start_workers
from stretto.data.spec import DataSpec
from stretto.errors import DataError
from stretto.ordering import SampleOrder, stream_start
from stretto.planning import StepPlan

_MOST_AHEAD = 1 << 14
"""Indices that are cut into batches at once."""


@final
@dataclass(frozen=True, slots=True)
class MapSource:
    """A map-style data set, its order, and this rank's part of it."""

    spec: DataSpec
    order: SampleOrder
    part: Part
    fetch: Fetch
    workers: Workers
    is_keyed: bool
    """Whether randomness inside samples is keyed by epoch and index."""

    def stream(self) -> IndexStream:
        """Return the indices that this rank reads."""
        return IndexStream(
            self.order,
            rank=self.part.rank,
            world_size=self.part.world_size,
            with_epoch=self.is_keyed,
        )

    def place(self, position: int) -> int:
        """Return the place of a position in this rank's stream."""
        return stream_start(position, self.part.rank, self.part.world_size)

    def fetched_ahead(
        self, elements: Iterator[Element], *, uncollated: bool = False
    ) -> Iterator[Any]:
        """Yield the batches of `elements`, or bundles of samples, which workers fetch ahead."""
        fetch, workers = self.fetch, self.workers
        if uncollated:
            fetch, workers = fetch.uncollated(), replace(workers, pin_memory=False)
        batches = start_workers(fetch, elements, workers, seed=self.order.seed, rank=self.part.rank)
        try:
            yield from batches
        except IndexError as error:
            raise no_such_sample(self.order.num_samples, error) from error

    def any_sample(self) -> Any:
        """Return a batch of one sample."""
        return self.fetch([0])

    def check(self, batch: Any, num_samples: int) -> None:
        """Refuse a batch with another number of samples than requested."""
        if self.spec.get_num_samples_in_batch is None and may_hold(batch, num_samples):
            return
        found = self.spec.count_samples(batch)
        if found != num_samples:
            raise DataError.cannot(
                f"use a batch of {found} samples",
                why=f"it was collated from {num_samples}, which are counted as seen",
                instead="return a sample for each in collate_fn, or, where it packs them, "
                "pass DataSpec(data, get_num_samples_in_batch=...)",
            )


@final
class DirectFeed(Feed):
    """Fetches each micro-batch in the main process, at the step."""

    def __init__(self, source: MapSource) -> None:
        self._source = source

    def steps(self, plans: Plans) -> Iterator[FetchedStep]:
        """Yield this rank's part of each batch."""
        source = self._source
        stream, fetch, shares = source.stream(), source.fetch, Shares(source.part)
        rank, world, pins = source.part.rank, source.part.world_size, source.workers.pins
        decided: StepPlan | None = None
        rows: Iterator[Tensor] = iter(())
        for plan, start in plans:
            if plan is not decided or world > 1:
                decided, sizes = plan, shares.sizes(plan.size, start)
                ahead, rows = 1, iter(())
            place = -((rank - start) // world)
            micro_batches: list[CountedBatch] = []
            for count in sizes:
                if fetch.tensors is not None and count == plan.size:
                    indices = next(rows, None)
                    if indices is None:  # cutting many at once takes a fifth of the time
                        rows = iter(stream.tensor(place, ahead * count).split(count))
                        indices, ahead = next(rows), min(2 * ahead, 1 + _MOST_AHEAD // count)
                    batch: Any = [tensor.index_select(0, indices) for tensor in fetch.tensors]
                else:
                    batch = fetch.read(stream, place, count) if count else fetch([stream.at(start)])
                    if fetch.tensors is None:
                        source.check(batch, count or 1)
                place += count
                micro_batches.append((pinned(batch) if pins else batch, count))
            yield FetchedStep(plan, micro_batches, plan.size)


@final
class PlannedFeed(Feed):
    """Workers collate micro-batches ahead: for sizes that are known before the run."""

    def __init__(self, source: MapSource) -> None:
        self._source = source

    def steps(self, plans: Plans) -> Iterator[FetchedStep]:
        """Yield this rank's part of each batch."""
        source = self._source
        first = next(plans, None)
        if first is None:
            return
        ahead: deque[tuple[StepPlan, tuple[int, ...]]] = deque()
        batches = source.fetched_ahead(self._elements(first, plans, ahead))
        for batch in batches:
            plan, sizes = ahead.popleft()
            micro_batches = [(batch, sizes[0])]
            micro_batches += [(next(batches), count) for count in sizes[1:]]
            for micro_batch, count in micro_batches:
                source.check(micro_batch, count or 1)
            yield FetchedStep(plan, micro_batches, plan.size)

    def _elements(
        self,
        first: tuple[StepPlan, int],
        plans: Plans,
        ahead: deque[tuple[StepPlan, tuple[int, ...]]],
    ) -> Iterator[Element]:
        """Yield each micro-batch, and record its batch in `ahead`."""
        stream, shares = self._source.stream(), Shares(self._source.part)
        for plan, start in chain((first,), plans):
            sizes = shares.sizes(plan.size, start)
            ahead.append((plan, sizes))
            place = self._source.place(start)
            for count in sizes:
                yield place, stream.take(place, count) if count else [stream.at(start)]
                place += count


@final
@dataclass(frozen=True, slots=True)
class _Grid:
    """Cuts a rank's stream into chunks of one size, independent of batch sizes.

    So a resumed run has the same chunks, and workers draw the same random numbers.
    """

    size: int
    last: int | None
    """The place at which the run ends; None if unknown."""

    def elements(self, stream: IndexStream, number: int) -> Iterator[Element]:
        """Yield the chunks from `number` on, as workers fetch them."""
        while self.length(number) > 0:
            place = number * self.size
            yield place, stream.take(place, self.length(number))
            number += 1

    def length(self, number: int) -> int:
        """Return the number of samples in a chunk."""
        return self.size if self.last is None else min(self.size, self.last - number * self.size)


@final
class ChunkFeed(Feed):
    """Workers collate fixed chunks ahead; each step cuts views out of them.

    For sizes decided during the run and batches that can be cut. Chunks are never joined.

    Args:
        source: the data.
        chunk_size: samples in a chunk.
        end: the position at which the run ends; None if unknown.
    """

    def __init__(self, source: MapSource, *, chunk_size: int, end: int | None) -> None:
        self._source = source
        self._chunk_size = chunk_size
        self._grid = _Grid(chunk_size, None if end is None else source.place(end))

    def steps(self, plans: Plans) -> Iterator[FetchedStep]:
        """Yield this rank's part of each batch."""
        source, size = self._source, self._chunk_size
        stream = source.stream()
        batches: Iterator[Any] | None = None
        number, chunk, length = -1, None, 0
        for plan, start in plans:
            place, end = source.place(start), source.place(start + plan.size)
            micro_batches: list[CountedBatch] = []
            while place < end:
                if batches is None:
                    number = place // size - 1
                    batches = source.fetched_ahead(self._grid.elements(stream, number + 1))
                while number < place // size:
                    number, chunk = number + 1, next(batches)
                    length = self._grid.length(number)
                    source.check(chunk, length)
                stop = min(end, (number + 1) * size)
                micro_batches += self._views(
                    chunk, length, place - number * size, stop - number * size
                )
                place = stop
            missing = self._most_micro_batches(start, plan.size) - len(micro_batches)
            if missing:
                dummy = self._dummy(stream, start, chunk, length)
                micro_batches += [dummy] * missing
            yield FetchedStep(plan, micro_batches, plan.size)

    def _views(self, chunk: Any, length: int, start: int, stop: int) -> Iterator[CountedBatch]:
        for count in evenly(stop - start, self._source.part.micro_batch_size):
            part = slice(start, start + count)
            yield self._source.spec.take_samples(chunk, part, length), count
            start += count

    def _most_micro_batches(self, start: int, size: int) -> int:
        """Return the most micro-batches of any rank; all ranks run that many.

        The start and the end of a rank's share each take one of two values, which change at two
        ranks. So three ranks are enough to look at.
        """
        part, most = self._source.part, 0
        for rank in {0, start % part.world_size, (start + size) % part.world_size}:
            place = stream_start(start, rank, part.world_size)
            end, micro_batches = stream_start(start + size, rank, part.world_size), 0
            while place < end:
                stop = min(end, place - place % self._chunk_size + self._chunk_size)
                micro_batches += len(evenly(stop - place, part.micro_batch_size))
                place = stop
            most = max(most, micro_batches)
        return most

    def _dummy(self, stream: IndexStream, start: int, chunk: Any, length: int) -> CountedBatch:
        if chunk is None:  # this rank has not had a sample yet
            return self._source.fetch([stream.at(start)]), 0
        return first_sample(self._source.spec, chunk, length)


@final
class SampleFeed(Feed):
    """Workers fetch samples ahead; the main process collates each micro-batch at the step.

    For sizes decided during the run and a collate function whose batches may not be cuttable: a
    packed batch cannot be cut, and a padded one would be as wide as its chunk.

    Args:
        source: the data.
        chunk_size: samples that a worker fetches at once.
        end: the position at which the run ends; None if unknown.
    """

    def __init__(self, source: MapSource, *, chunk_size: int, end: int | None) -> None:
        self._source = source
        self._grid = _Grid(chunk_size, None if end is None else source.place(end))

    def steps(self, plans: Plans) -> Iterator[FetchedStep]:
        """Yield this rank's part of each batch."""
        source = self._source
        stream, shares, pins = source.stream(), Shares(source.part), source.workers.pins
        bundles: Iterator[Any] | None = None
        samples: deque[Any] = deque()
        for plan, start in plans:
            if bundles is None:
                number = source.place(start) // self._grid.size
                next_place = number * self._grid.size  # place of the first sample in `samples`
                elements = self._grid.elements(stream, number)
                bundles = source.fetched_ahead(elements, uncollated=True)
            passed, next_place = source.place(start) - next_place, source.place(start)
            _taken(passed, samples, bundles)
            micro_batches: list[CountedBatch] = []
            for count in shares.sizes(plan.size, start):
                if count:
                    batch = source.fetch.collate(_taken(count, samples, bundles))
                    next_place += count
                else:
                    batch = source.fetch([stream.at(start)])
                source.check(batch, count or 1)
                micro_batches.append((pinned(batch) if pins else batch, count))
            yield FetchedStep(plan, micro_batches, plan.size)


def _taken(count: int, samples: deque[Any], bundles: Iterator[Any]) -> list[Any]:
    """Remove and return the next samples; read more bundles if there are too few."""
    while len(samples) < count:
        samples.extend(next(bundles).samples())
    return [samples.popleft() for _ in range(count)]
