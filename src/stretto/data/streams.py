"""Steps of iterables, and their position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from stretto.batching import Split
from stretto.data.chunks import ChunkSource, Range
from stretto.data.fetch import (
    CountedBatch,
    FetchedStep,
    Plans,
    RankShare,
    share_sizes,
)
from stretto.errors import DataError
from stretto.ordering import evenly
from stretto.planning import PlannedBatch
from stretto.timing import Horizon

Gather: TypeAlias = Callable[[Sequence[int]], Sequence[Sequence[int]]]
"""Returns the values of every rank, in rank order; each rank must call it."""


class Stream(ABC):
    """The samples of an iterable in global order, of which this rank takes its share.

    Args:
        source: what this rank reads.
        part: this rank's part.
    """

    def __init__(self, source: ChunkSource, part: RankShare) -> None:
        self._source, self._part = source, part
        self._micro_batches: list[CountedBatch] = []

    @property
    @abstractmethod
    def is_at_end(self) -> bool:
        """Whether no rank has a sample of the epoch left."""

    @abstractmethod
    def take(self, count: int, position: int) -> int:
        """Take the next `count` samples over all ranks; return how many the epoch still had."""

    def micro_batches(self) -> list[CountedBatch]:
        """Return this rank's micro-batches of what was taken since the last call."""
        micro_batches, self._micro_batches = self._micro_batches, []
        return micro_batches

    def next_epoch(self) -> None:
        """End the epoch."""
        self._source.next_epoch()

    def _rows(self, one: Range, part: slice) -> Any:
        return self._source.spec.take_samples(one.chunk.batch, part, one.chunk.num_samples)


@final
class SameStream(Stream):
    """Every rank reads the whole stream and keeps its own positions."""

    @property
    def is_at_end(self) -> bool:
        """Whether no sample of the epoch is left."""
        return self._source.is_at_end

    def take(self, count: int, position: int) -> int:
        """Take the next `count` samples; return how many the epoch still had."""
        start = position
        for one in self._source.take(count):
            self._micro_batches += self._cut(one, position)
            position += one.size
        return position - start

    def _cut(self, one: Range, position: int) -> Iterator[CountedBatch]:
        """Yield strided views of this rank's samples."""
        world = self._part.world_size
        first = one.start + (self._part.rank - position) % world
        for count in share_sizes(self._part, one.size, position):
            if count == 0:
                yield self._rows(one, slice(0, 1)), 0  # a dummy
            else:
                part = slice(first, first + (count - 1) * world + 1, world)
                yield self._rows(one, part), count
                first += count * world


class _Taken(NamedTuple):
    """What one rank has taken from its stream."""

    samples: int
    is_at_end: int
    micro_batches: int
    """Its micro-batches of this batch so far."""
    has_sample: int
    """Whether the rank has ever had a sample, which can serve as a dummy."""


@final
class OwnStreams(Stream):
    """Every rank reads its own stream and takes its share of each batch from it.

    If a stream has fewer samples left than its rank's share, the other ranks take the missing ones.
    So every batch has its full size until all streams have ended. All ranks know what each has
    taken, so they end the epoch together and run equally many micro-batches.

    Args:
        source: this rank's stream.
        part: this rank's part.
        gather: shares with all ranks what each has taken.
    """

    def __init__(self, source: ChunkSource, part: RankShare, gather: Gather) -> None:
        super().__init__(source, part)
        self._gather = gather
        self._most_micro_batches = 0
        self._is_at_end = False

    @property
    def is_at_end(self) -> bool:
        """Whether no rank has a sample of the epoch left."""
        return self._is_at_end

    def take(self, count: int, position: int) -> int:
        """Take the next `count` samples over all ranks; return how many there were."""
        world = self._part.world_size
        # Samples taken for other ranks must not need more memory than a rank's own share.
        most = self._part.micro_batch_size or -(-count // world)
        shares, total = Split(count, world, None, position).shares, 0
        while True:
            own = self._take(shares[self._part.rank], most)
            everybody = [_Taken(*row) for row in self._gather(own)]
            _check_samples(self._source, everybody)
            total += sum(one.samples for one in everybody)
            self._most_micro_batches = max(one.micro_batches for one in everybody)
            left = [rank for rank, one in enumerate(everybody) if not one.is_at_end]
            self._is_at_end = not left
            if total == count or not left:
                return total
            shares = _dealt(count - total, left, world)

    def micro_batches(self) -> list[CountedBatch]:
        """Return this rank's micro-batches, filled up with dummies if other ranks have more."""
        micro_batches = super().micro_batches()
        missing = self._most_micro_batches - len(micro_batches)
        if missing:
            example = self._source.example
            assert example is not None, "checked after each take"
            micro_batches += [(self._rows(Range(example, 0, 1), slice(0, 1)), 0)] * missing
        return micro_batches

    def _take(self, count: int, most: int) -> _Taken:
        taken = 0
        for one in self._source.take(count):
            start, taken = one.start, taken + one.size
            for size in evenly(one.size, most=most):
                part = slice(start, start + size)
                self._micro_batches.append((self._rows(one, part), size))
                start += size
        source = self._source
        return _Taken(taken, source.is_at_end, len(self._micro_batches), source.example is not None)


def _dealt(count: int, ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Deal samples to some of the ranks; return the share of each of all ranks.

    >>> _dealt(5, [0, 2], 3)
    (3, 0, 2)
    """
    each, larger = divmod(count, len(ranks))
    shares = {rank: each + (place < larger) for place, rank in enumerate(ranks)}
    return tuple(shares.get(rank, 0) for rank in range(world_size))


def _check_samples(source: ChunkSource, everybody: Sequence[_Taken]) -> None:
    without = next((rank for rank, one in enumerate(everybody) if not one.has_sample), None)
    if without is not None and any(one.has_sample for one in everybody):
        why = f"the {source.kind} of rank {without} has no samples"
        instead = "give every rank at least one shard, or start fewer ranks"
        raise DataError.bad("sharded", value=True, why=why, instead=instead)


def cut_steps(stream: Stream, kind: str, horizon: Horizon, plans: Plans) -> Iterator[FetchedStep]:
    """Cut each batch out of the chunks of the data, as views.

    Args:
        stream: the data as read by the ranks.
        kind: the type of the data, for messages.
        horizon: the run; its `dataset_num_samples`, if known, must match the data.
        plans: the decided batches.
    """
    is_sized = horizon.dataset_num_samples is not None
    for plan, start in plans:
        if is_sized and plan.skipped:
            stream.next_epoch()
        cut = _sized if is_sized else _unsized
        size, crossings = cut(stream, kind, horizon, plan, start)
        micro_batches = stream.micro_batches()
        if not is_sized and horizon.last_batch == "drop" and size < plan.size:
            micro_batches = []
        yield FetchedStep(plan, micro_batches, size, crossings)


def _sized(
    stream: Stream, kind: str, horizon: Horizon, plan: PlannedBatch, start: int
) -> tuple[int, tuple[int, ...]]:
    """Take exactly the samples of the plan, from as many epochs as it spans."""
    num_samples = horizon.dataset_num_samples
    assert num_samples is not None
    within, taken = plan.timestamp.sample_in_epoch + start - plan.timestamp.sample, 0
    while taken < plan.size:
        wanted = min(plan.size - taken, num_samples - within)
        found = stream.take(wanted, start + taken)
        if not found and not within:
            raise _empty(kind)
        if found < wanted:
            raise _wrong_length(num_samples, f"they end after {within + found}")
        taken, within = taken + wanted, within + wanted
        if within == num_samples:
            if not stream.is_at_end:
                raise _wrong_length(num_samples, "they have more")
            stream.next_epoch()
            within = 0
    if horizon.last_batch == "drop" and plan.ends_epochs and within:
        stream.next_epoch()
    return taken, ()


def _unsized(
    stream: Stream, kind: str, horizon: Horizon, plan: PlannedBatch, start: int
) -> tuple[int, tuple[int, ...]]:
    """Take up to the samples of the plan; an epoch ends with the data."""
    taken, ends_at = 0, list[int]()
    while taken < plan.size:
        found = stream.take(plan.size - taken, start + taken)
        if not found:
            raise _empty(kind)
        taken += found
        if not stream.is_at_end:
            break
        ends_at.append(taken)
        stream.next_epoch()
        after = plan.timestamp._replace(epoch=plan.timestamp.epoch + len(ends_at))
        if horizon.last_batch != "carry" or horizon.is_done(after):
            break
    return taken, tuple(taken - end for end in ends_at)


def _empty(kind: str) -> DataError:
    why, instead = "an epoch of it has no samples", "let it yield at least one batch each time"
    return DataError.cannot(f"read data of type {kind}", why=why, instead=instead)


def _wrong_length(num_samples: int, why: str) -> DataError:
    return DataError.bad("num_samples", num_samples, why, "pass the right number, or leave it out")
