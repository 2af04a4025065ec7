"""`Source`: what a loader reads from, built for its data, workers and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch.utils.data import DataLoader, RandomSampler

from stretto.batching import checked_size
from stretto.data.fetching.feed import Feed, Part
from stretto.data.fetching.fetch import Fetch
from stretto.data.fetching.map_feeds import (
    ChunkFeed,
    DirectFeed,
    MapSource,
    PlannedFeed,
    SampleFeed,
)
from stretto.data.fetching.workers import Workers, batched
from stretto.data.iterables.chunks import ChunkSource
from stretto.data.iterables.iterable_feed import IterableFeed
from stretto.data.iterables.shards import check_streams, record_of_all, record_of_rank
from stretto.data.iterables.streams import OwnStreams, SameStream, Stream
from stretto.data.ranks import gathered
from stretto.data.spec import DataSpec, is_one_shot
from stretto.errors import DataError
from stretto.ordering import SampleOrder
from stretto.runtime.random_state import kept_generators
from stretto.timing import Horizon, Timestamp, TimeUnit

_LEAST_CHUNK = 128  # a batch from a worker costs 0.7 ms, whatever its size: few large ones are best


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """The settings of reading data."""

    spec: DataSpec
    workers: Workers
    part: Part
    seed: int
    shuffle: bool | None
    is_keyed: bool
    chunk_size: int | None


@final
@dataclass(frozen=True, slots=True)
class Source:
    """Where a loader's batches come from."""

    feed: Feed
    map_source: MapSource | None
    """None for iterables."""
    chunks: ChunkSource | None
    """None for map-style data sets."""
    reading: Reading
    """How they are read."""
    looks_ahead: bool = False
    """Whether batches must be decided ahead of the step."""

    @property
    def order(self) -> SampleOrder | None:
        """The order of samples; None if the data have their own."""
        return None if self.map_source is None else self.map_source.order

    def check_streams(self) -> None:
        """Compare the streams of all ranks, which all must call it.

        Raises:
            DataError: they differ and are not said to be sharded, or are said to be and do not.
        """
        sharded = self.reading.spec.sharded
        if self.chunks is not None and sharded is not False:
            check_streams(self.reading.part, self.chunks, is_sharded=bool(sharded))

    def example_batch(self, indices: list[int]) -> Any:
        """Return the batch of these samples of a map-style data set."""
        assert self.map_source is not None, "an iterable has no samples to look at"
        with kept_generators():
            return self.map_source.fetch(indices)

    def state_dict(self, timestamp: Timestamp) -> dict[str, Any] | None:
        """Return the position of an iterable; a map-style data set needs only the clock.

        For sharded streams it has the position of each; every rank must call it.
        """
        if self.chunks is None:
            return None
        chunks = self.chunks
        if not self.reading.spec.sharded:
            return chunks.state_dict(timestamp.epoch)
        return record_of_all(self.reading.part, lambda: chunks.state_dict(timestamp.epoch))

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Return to the position of `state_dict`."""
        if self.chunks is not None and state is not None:
            if self.reading.spec.sharded:
                state = record_of_rank(self.reading.part, state)
            self.chunks.load_state_dict(state)


def make_source(reading: Reading, horizon: Horizon, *, is_planned: bool) -> Source:
    """Return the source for data, workers and sizes.

    Raises:
        DataError: the data cannot be read in this way.
    """
    spec = reading.spec
    workers = reading.workers.merged(spec.data)
    size = reading.chunk_size
    chunk_size = _chunk_size(reading.part) if size is None else checked_size(size, "a chunk size")
    if not spec.is_map_style:
        _check_iterable(reading, horizon)
        chunks = ChunkSource(spec, batched(spec, workers, chunk_size), seed=reading.seed)
        stream = _stream(chunks, spec, reading.part)
        feed: Feed = IterableFeed(stream, kind=chunks.kind, horizon=horizon, pins=workers.pins)
        return Source(feed, None, chunks, reading)
    source = _map_source(reading, workers)
    if not workers.num_workers:
        return Source(DirectFeed(source), source, None, reading)
    if is_planned:
        return Source(PlannedFeed(source), source, None, reading, looks_ahead=True)
    # A batch does not show whether views of it equal batches collated from fewer samples.
    cuts = source.fetch.is_default or spec.split_batch is not None
    kind = ChunkFeed if cuts else SampleFeed
    return Source(
        kind(source, chunk_size=chunk_size, end=horizon.end_sample), source, None, reading
    )


def _stream(chunks: ChunkSource, spec: DataSpec, part: Part) -> Stream:
    if spec.sharded:
        return OwnStreams(chunks, spec, part, lambda values: gathered(part, values))
    return SameStream(chunks, spec, part)


def is_shuffled(spec: DataSpec, *, asked: bool | None) -> bool:
    """Return whether each epoch of map-style data has its own order, made from the seed.

    Args:
        spec: the data.
        asked: the setting; None: yes, or what the given `DataLoader` does.
    """
    if asked is not None:
        return asked
    return not isinstance(spec.data, DataLoader) or isinstance(spec.data.sampler, RandomSampler)


def _map_source(reading: Reading, workers: Workers) -> MapSource:
    spec = reading.spec
    order = SampleOrder(len(spec.dataset), reading.seed, is_shuffled(spec, asked=reading.shuffle))
    keyed_seed = reading.seed if reading.is_keyed else None
    fetch = Fetch(spec.dataset, workers.collate_fn, keyed_seed=keyed_seed)
    return MapSource(spec, order, reading.part, fetch, workers, reading.is_keyed)


def _chunk_size(part: Part) -> int:
    """At least 128 samples, in whole micro-batches."""
    micro = part.micro_batch_size
    return _LEAST_CHUNK if micro is None else -(-_LEAST_CHUNK // micro) * micro


def _check_iterable(reading: Reading, horizon: Horizon) -> None:
    if reading.is_keyed:
        raise DataError.cannot(
            "key the randomness of an iterable",
            why="its samples have no index and are made before they arrive here",
            instead="use stretto.data.sample_seed where they are made, or leave it out",
            where="keyed_randomness",
        )
    run = horizon.max_duration
    if is_one_shot(reading.spec.data) and run.unit is TimeUnit.EPOCH and run.amount > 1:
        raise DataError.cannot(
            f"run for {run} on data of type {type(reading.spec.data).__name__}",
            why="it can be iterated over only once",
            instead="pass an object whose __iter__ starts anew, or write max_duration='1ep'",
        )
