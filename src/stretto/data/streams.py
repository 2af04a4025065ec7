"""Steps of iterables, and their position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from stretto.batching import Split, Tokens, pack
from stretto.batching.pack import too_long
from stretto.data.chunks import ChunkSource, Range, Room
from stretto.data.fetch import (
    CountedBatch,
    FetchedStep,
    Plans,
    RankShare,
    share_sizes,
)
from stretto.data.tokens import narrowed
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
    def take(self, count: int, position: int, room: Room | None = None) -> int:
        """Take the next `count` samples over all ranks, as far as the epoch has them.

        Args:
            count: the most samples.
            position: that of the first one.
            room: the tokens that they may have; None: any number.

        Returns:
            How many there were.
        """

    def micro_batches(self) -> list[CountedBatch]:
        """Return this rank's micro-batches of what was taken since the last call."""
        micro_batches, self._micro_batches = self._micro_batches, []
        return micro_batches

    def next_epoch(self) -> None:
        """End the epoch."""
        self._source.next_epoch()

    def _packed(self, one: Range, world_size: int = 1, rank: int = 0) -> Iterator[CountedBatch]:
        """Yield the micro-batches of a rank that shares some samples, within its token budget.

        Raises:
            BatchSizeError: a sample alone exceeds it.
        """
        budget, (prices, is_narrow) = self._part.micro_batch_size, self._source.prices(one.chunk)
        assert budget is not None, "a budget"
        longest = max(range(one.start, one.stop), key=prices.__getitem__)
        if prices[longest] > budget:
            raise too_long(one.chunk.start + longest, prices[longest], budget)
        for places in pack(prices[one.start : one.stop], budget, world_size)[rank]:
            rows = sorted(one.start + place for place in places) or [one.start]
            is_run = rows[-1] - rows[0] < len(rows)
            batch = self._rows(one, slice(rows[0], rows[-1] + 1) if is_run else rows)
            columns = max(prices[row] for row in rows)
            yield narrowed(batch, columns) if is_narrow else batch, len(places)

    def _rows(self, one: Range, part: slice | list[int]) -> Any:
        return self._source.spec.take_samples(one.chunk.batch, part, one.chunk.num_samples)


@final
class SameStream(Stream):
    """Every rank reads the whole stream and keeps its own positions."""

    @property
    def is_at_end(self) -> bool:
        """Whether no sample of the epoch is left."""
        return self._source.is_at_end

    def take(self, count: int, position: int, room: Room | None = None) -> int:
        """Take the next `count` samples; return how many the epoch still had."""
        start = position
        for one in self._source.take(count, room):
            self._micro_batches += self._cut(one, position)
            position += one.size
        return position - start

    def _cut(self, one: Range, position: int) -> Iterator[CountedBatch]:
        """Yield this rank's samples: strided views, or as the token budget has it."""
        world = self._part.world_size
        if isinstance(self._part.micro_batch_size, Tokens):
            yield from self._packed(one, world, self._part.rank)
            return
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
    tokens: int
    """Those of the samples, if there is a limit to them."""
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

    If batches are in tokens, the share of a rank is the longest run of samples with its part of
    them, at least one sample.

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

    def take(self, count: int, position: int, room: Room | None = None) -> int:
        """Take the next `count` samples over all ranks; return how many there were."""
        world, rank = self._part.world_size, self._part.rank
        # Samples taken for other ranks must not need more memory than a rank's own share.
        most = self._part.micro_batch_size or (None if room else -(-count // world))
        shares, total, left = Split(count, world, None, position).shares, 0, [*range(world)]
        while True:
            own = room and Room(room.left // len(left), is_empty=room.is_empty)
            everybody = [_Taken(*row) for row in self._gather(self._take(shares[rank], own, most))]
            _check_samples(self._source, everybody)
            found = sum(one.samples for one in everybody)
            total += found
            self._most_micro_batches = max(one.micro_batches for one in everybody)
            left = [rank for rank, one in enumerate(everybody) if not one.is_at_end]
            self._is_at_end = not left
            if room:
                room.left -= sum(one.tokens for one in everybody)
                room.is_empty &= not found
            # If no stream has ended, each rank has its part of the tokens.
            if total == count or not left or (room and (len(left) == world or not found)):
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

    def _take(self, count: int, room: Room | None, most: int | None) -> _Taken:
        taken, tokens = 0, room.left if room else 0
        for one in self._source.take(count, room):
            start, taken = one.start, taken + one.size
            if isinstance(most, Tokens):
                self._micro_batches += self._packed(one)
                continue
            for size in evenly(one.size, most=most):
                part = slice(start, start + size)
                self._micro_batches.append((self._rows(one, part), size))
                start += size
        source, number = self._source, len(self._micro_batches)
        tokens -= room.left if room else 0
        return _Taken(taken, tokens, source.is_at_end, number, source.example is not None)


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
        room = Room(plan.decided) if isinstance(plan.decided, Tokens) else None
        size, crossings = _taken(stream, kind, horizon, plan, start, room=room)
        micro_batches = stream.micro_batches()
        is_full = room.left <= 0 or not crossings if room else size == plan.size
        if horizon.last_batch == "drop" and not is_full:
            micro_batches = []
        if is_sized and plan.ends_epochs > len(crossings):
            stream.next_epoch()  # what is left of this one is dropped
        read = plan._replace(size=size, ends_epochs=len(crossings)) if room else plan
        yield FetchedStep(read, micro_batches, size, () if is_sized else crossings)


def _taken(
    stream: Stream,
    kind: str,
    horizon: Horizon,
    plan: PlannedBatch,
    start: int,
    *,
    room: Room | None,
) -> tuple[int, tuple[int, ...]]:
    """Take up to the samples of the plan, and up to its tokens; an epoch ends with the data.

    Returns:
        The samples, and how many of them come after each end of an epoch.
    """
    taken, ends_at = 0, list[int]()
    while taken < plan.size:
        found = stream.take(plan.size - taken, start + taken, room)
        if not found and (stream.is_at_end or not room):
            raise _empty(kind)
        taken += found
        if not stream.is_at_end:
            break
        ends_at.append(taken)
        stream.next_epoch()
        after = plan.timestamp._replace(epoch=plan.timestamp.epoch + len(ends_at))
        if horizon.last_batch != "carry" or horizon.is_done(after):
            break
    num_samples = horizon.dataset_num_samples
    if num_samples is not None:
        within = plan.timestamp.sample_in_epoch + start - plan.timestamp.sample
        ends = [within + end for end in ends_at]
        if ends != [*range(num_samples, within + taken + 1, num_samples)]:
            why = f"they end after {ends[0]}" if ends else "they have more"
            instead = "pass the right number, or leave it out"
            raise DataError.bad("num_samples", num_samples, why, instead)
    return taken, tuple(taken - end for end in ends_at)


def _empty(kind: str) -> DataError:
    why, instead = "an epoch of it has no samples", "let it yield at least one batch each time"
    return DataError.cannot(f"read data of type {kind}", why=why, instead=instead)
