"""Steps of map-style data: which samples a rank reads, and in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from operator import methodcaller
from typing import Any, final

from torch import Tensor

from stretto.data.containers import count_samples, may_hold
from stretto.data.fetch import (
    CountedBatch,
    Fetch,
    FetchedStep,
    Part,
    Plans,
    first_sample,
    no_such_sample,
    pinned,
    share_sizes,
)
from stretto.data.indices import IndexStream
from stretto.data.spec import DataSpec
from stretto.data.workers import Element, Workers, start_workers
from stretto.errors import DataError
from stretto.ordering import SampleOrder, evenly, stream_start
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

    def check(self, batch: Any, num_samples: int) -> None:
        """Refuse a batch with another number of samples than requested."""
        count = self.spec.get_num_samples_in_batch
        if count is None and may_hold(batch, num_samples):
            return
        found = count_samples(batch) if count is None else count(batch)
        if found is not None and found != num_samples:
            raise DataError.cannot(
                f"use a batch of {found} samples",
                why=f"it was collated from {num_samples}, which are counted as seen",
                instead="return a sample for each in collate_fn, or, where it packs them, "
                "pass DataSpec(data, get_num_samples_in_batch=...)",
            )


def direct_steps(source: MapSource, plans: Plans) -> Iterator[FetchedStep]:
    """Fetch each micro-batch in the main process, at the step."""
    stream, fetch, part = source.stream(), source.fetch, source.part
    world, pins = part.world_size, source.workers.pins
    decided: StepPlan | None = None
    rows: Iterator[Tensor] = iter(())
    for plan, start in plans:
        if plan is not decided or world > 1:
            decided, sizes = plan, share_sizes(part, plan.size, start)
            ahead, rows = 1, iter(())
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
            micro_batches.append((pinned(batch) if pins else batch, count))
        yield FetchedStep(plan, micro_batches, plan.size)


def planned_steps(source: MapSource, plans: Plans) -> Iterator[FetchedStep]:
    """Let workers collate micro-batches ahead: for sizes that are known before the run."""
    first = next(plans, None)
    if first is None:
        return
    stream, ahead = source.stream(), deque[tuple[StepPlan, tuple[int, ...]]]()

    def elements() -> Iterator[Element]:
        for plan, start in chain((first,), plans):
            sizes = share_sizes(source.part, plan.size, start)
            ahead.append((plan, sizes))
            place = source.place(start)
            for count in sizes:
                yield place, stream.take(place, count) if count else [stream.at(start)]
                place += count

    batches = source.fetched_ahead(elements())
    for batch in batches:
        plan, sizes = ahead.popleft()
        micro_batches = [(batch, sizes[0]), *((next(batches), count) for count in sizes[1:])]
        for micro_batch, count in micro_batches:
            source.check(micro_batch, count or 1)
        yield FetchedStep(plan, micro_batches, plan.size)


@final
@dataclass(frozen=True, slots=True)
class Chunks:
    """Cuts a rank's stream into chunks of one size, independent of batch sizes.

    So a resumed run has the same chunks, and workers draw the same random numbers.
    """

    size: int
    """Samples of a chunk."""
    last: int | None
    """The place at which the run ends; None if unknown."""

    def elements(self, stream: IndexStream, number: int) -> Iterator[Element]:
        """Yield the chunks from `number` on, as workers fetch them."""
        while (length := self.length(number)) > 0:
            yield number * self.size, stream.take(number * self.size, length)
            number += 1

    def length(self, number: int) -> int:
        """Return the number of samples in a chunk."""
        return self.size if self.last is None else min(self.size, self.last - number * self.size)


def chunk_steps(source: MapSource, chunks: Chunks, plans: Plans) -> Iterator[FetchedStep]:
    """Let workers collate chunks ahead; each step cuts views out of them.

    For sizes decided during the run and batches that can be cut. Chunks are never joined.
    """
    size, spec, part, stream = chunks.size, source.spec, source.part, source.stream()
    batches: Iterator[Any] | None = None
    number, chunk, length = -1, None, 0
    for plan, start in plans:
        place, end = source.place(start), source.place(start + plan.size)
        micro_batches: list[CountedBatch] = []
        while place < end:
            if batches is None:
                number = place // size - 1
                batches = source.fetched_ahead(chunks.elements(stream, number + 1))
            while number < place // size:
                number, chunk = number + 1, next(batches)
                length = chunks.length(number)
                source.check(chunk, length)
            left = min(end, (number + 1) * size) - place
            for count in evenly(left, most=part.micro_batch_size):
                within = place - number * size
                view = spec.take_samples(chunk, slice(within, within + count), length)
                micro_batches.append((view, count))
                place += count
        missing = _most_micro_batches(part, size, start, plan.size) - len(micro_batches)
        if missing and chunk is None:  # this rank has not had a sample yet
            micro_batches += [(source.fetch([stream.at(start)]), 0)] * missing
        elif missing:
            micro_batches += [first_sample(spec, chunk, length)] * missing
        yield FetchedStep(plan, micro_batches, plan.size)


def _most_micro_batches(part: Part, chunk_size: int, start: int, size: int) -> int:
    """Return the most micro-batches of any rank; all ranks run that many.

    The start and the end of a rank's share each take one of two values, which change at two ranks.
    So three ranks are enough to look at.
    """
    most, world = 0, part.world_size
    for rank in {0, start % world, (start + size) % world}:
        place, micro_batches = stream_start(start, rank, world), 0
        end = stream_start(start + size, rank, world)
        while place < end:
            stop = min(end, place - place % chunk_size + chunk_size)
            micro_batches += len(evenly(stop - place, most=part.micro_batch_size))
            place = stop
        most = max(most, micro_batches)
    return most


def sample_steps(source: MapSource, chunks: Chunks, plans: Plans) -> Iterator[FetchedStep]:
    """Let workers fetch samples ahead; the main process collates each micro-batch at the step.

    For sizes decided during the run and a collate function whose batches may not be cuttable: a
    packed batch cannot be cut, and a padded one would be as wide as its chunk.
    """
    stream, part, pins = source.stream(), source.part, source.workers.pins
    bundles: Iterator[Any] | None = None
    samples: deque[Any] = deque()
    for plan, start in plans:
        if bundles is None:
            number = source.place(start) // chunks.size
            next_place = number * chunks.size  # place of the first sample in `samples`
            bundles = source.fetched_ahead(chunks.elements(stream, number), uncollated=True)
        passed, next_place = source.place(start) - next_place, source.place(start)
        _taken(passed, samples, bundles)
        micro_batches: list[CountedBatch] = []
        for count in share_sizes(part, plan.size, start):
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
