"""The feed for iterables: any batches that come, cut anew into exact ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from stretto.data.chunks import ChunkSource, Range
from stretto.data.feed import Draw, Feed, Part, Piece, Shares, first_sample, pinned
from stretto.data.spec import DataSpec
from stretto.errors import DataError, cannot
from stretto.planning import StepPlan
from stretto.timing import Horizon


@final
class IterableFeed(Feed):
    """Cuts views of the samples that each batch needs out of the chunks that the source gives.

    Every rank reads the whole source and keeps the positions that are its own, as strided views.

    Args:
        source: the data.
        spec: cuts batches.
        part: this rank's part.
        horizon: the run; its number of samples in an epoch must be the source's, if it is known.
        pins: whether batches go to pinned memory.
    """

    def __init__(
        self, source: ChunkSource, spec: DataSpec, part: Part, *, horizon: Horizon, pins: bool
    ) -> None:
        self._source = source
        self._spec = spec
        self._part = part
        self._horizon = horizon
        self._pins = pins

    def draws(self, plans: Iterator[StepPlan]) -> Iterator[Draw]:
        """Yield this rank's part of each batch."""
        shares = Shares(self._part)
        is_sized = self._horizon.dataset_num_samples is not None
        for plan in plans:
            if is_sized and plan.skipped:
                self._source.next_epoch()
            ranges, crossings = self._sized(plan) if is_sized else self._unsized(plan)
            size = sum(one.stop - one.start for one in ranges)
            if not is_sized and self._horizon.last_batch == "drop" and size < plan.size:
                yield Draw(plan, [], size, crossings)
                continue
            position = plan.timestamp.sample
            pieces: list[Piece] = []
            for one in ranges:
                pieces += self._pieces(one, position, shares)
                position += one.stop - one.start
            yield Draw(plan, pieces, size, crossings)

    def _sized(self, plan: StepPlan) -> tuple[list[Range], tuple[int, ...]]:
        """Exactly the samples of the plan, from as many epochs as it says."""
        num_samples = self._horizon.dataset_num_samples
        assert num_samples is not None
        within, missing, ranges = plan.timestamp.sample_in_epoch, plan.size, []
        while missing:
            wanted = min(missing, num_samples - within)
            taken = self._source.take(wanted)
            found = sum(one.stop - one.start for one in taken)
            if found < wanted:
                raise _wrong_length(num_samples, f"they end after {within + found}")
            ranges += taken
            missing, within = missing - wanted, within + wanted
            if within == num_samples:
                if not self._source.is_at_end:
                    raise _wrong_length(num_samples, "they go on after that")
                self._source.next_epoch()
                within = 0
        if self._horizon.last_batch == "drop" and plan.ends_epochs and within:
            self._source.next_epoch()
        return ranges, ()

    def _unsized(self, plan: StepPlan) -> tuple[list[Range], tuple[int, ...]]:
        """Up to the samples of the plan; an epoch ends where the source does."""
        epoch, taken, ranges = plan.timestamp.epoch, 0, []
        ends_at: list[int] = []
        while taken < plan.size:
            found = self._source.take(plan.size - taken)
            ranges += found
            taken += sum(one.stop - one.start for one in found)
            if not self._source.is_at_end:
                break
            ends_at.append(taken)
            self._source.next_epoch()
            after = plan.timestamp._replace(epoch=epoch + len(ends_at))
            if self._horizon.last_batch != "carry" or self._horizon.is_done(after):
                break
        return ranges, tuple(taken - end for end in ends_at)

    def _pieces(self, one: Range, position: int, shares: Shares) -> Iterator[Piece]:
        rank, world = self._part.rank, self._part.world_size
        batch, num_samples = one.chunk.batch, one.chunk.num_samples
        first = one.start + (rank - position) % world
        for count in shares.sizes(one.stop - one.start, position):
            if count == 0:
                piece = first_sample(self._spec, batch, num_samples)
            else:
                part = slice(first, first + (count - 1) * world + 1, world)
                piece = self._spec.take_samples(batch, part, num_samples), count
                first += count * world
            yield (pinned(piece[0]), piece[1]) if self._pins else piece


def _wrong_length(num_samples: int, why: str) -> DataError:
    return DataError(
        cannot(
            f"read an epoch of {num_samples} samples",
            why=why,
            instead="pass the right num_samples, or leave it out where no time needs it",
        )
    )
