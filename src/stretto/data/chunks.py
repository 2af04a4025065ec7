"""Batches of iterables, cut into views; fingerprints of streams."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from stretto.data.containers import nodes
from stretto.data.fetch import RankShare
from stretto.data.indices import sample_seed, seeded_generators
from stretto.data.spec import DataSpec, is_one_shot, sampler_of
from stretto.data.tokens import tokens_of_rows, used_columns
from stretto.errors import CheckpointError, DataError
from stretto.runtime.packing import packed, unpack

_SKIPPED_AT_ONCE = 4096
_COMPARED = 8
"""How many of the next samples a resume compares."""


class Chunk(NamedTuple):
    """One batch of the source."""

    batch: Any
    num_samples: int
    state: Any
    """The source's own state before the read; None if it has none."""
    start: int
    """Samples of the epoch before it."""


class Position(NamedTuple):
    """A place in the source, between two samples."""

    epoch: int
    state: Any
    """The source's own state from before the chunk that holds the next sample, or None."""
    offset: int
    """Samples of that chunk before the position."""
    passed: int
    """Samples of the epoch before the position."""


class Range(NamedTuple):
    """Some samples of a chunk."""

    chunk: Chunk
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many samples."""
        return self.stop - self.start


@final
class Room:
    """The tokens that a batch may still take.

    >>> room = Room(8)
    >>> room.fill([9, 1]), room.left
    (1, -1)

    Args:
        left: how many these are.
        is_empty: whether the next sample is taken however long it is.
    """

    def __init__(self, left: int, *, is_empty: bool = True) -> None:
        self.left, self.is_empty = left, is_empty

    def fill(self, lengths: Sequence[int]) -> int:
        """Take as many of the next samples as there is room for; return how many."""
        for count, length in enumerate(lengths):
            if length > self.left and not self.is_empty:
                return count
            self.left, self.is_empty = self.left - length, False
        return len(lengths)


@final
class ChunkSource:
    """Reads an iterable of collated batches one chunk ahead, to see the end of the epoch.

    Args:
        spec: counts the samples of a batch.
        batches: the iterable; each epoch iterates over it anew, after `set_epoch(epoch)` if it, its
            data set or its sampler has that method.
        seed: seeds the generators by epoch and place before each read, so that the source repeats
            itself, whatever else draws numbers.
        rank: whose stream it is; 0 if all ranks read the same.

    Raises:
        DataError: it is said to resume by its state, and has none.
    """

    def __init__(self, spec: DataSpec, batches: Iterable[Any], *, seed: int, rank: int = 0) -> None:
        self.spec = spec
        self._batches = batches
        self._seed = seed
        self._rank = rank
        self._is_one_shot = is_one_shot(batches)
        has_state = hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        if spec.resumes_by == "state" and not has_state:
            why = f"{self.kind} has no state_dict and load_state_dict"
            raise DataError.bad("resumes_by", "state", why, "write 'reading', or leave it out")
        self._has_state = has_state and spec.resumes_by != "reading"
        self._iterator: Iterator[Any] | None = None
        self._chunk: Chunk | None = None
        self._offset = self._passed = 0
        self._was_read = False
        self._failed = False
        own = [getattr(one, "generator", None) for one in _parts(batches)]
        self._generators = [one for one in own if isinstance(one, torch.Generator)]
        self._begun: dict[int, dict[str, Any]] = {}
        """How the last two epochs began: the generators' states, and the first samples."""
        self.epoch = 0
        self.example: Chunk | None = None
        """The last chunk that was read; None before the first one."""
        self.is_compared = False
        """Whether micro-batches are compared, to measure the noise: then samples are not sorted."""
        self._lengths: tuple[Chunk | None, list[int]] = None, []
        """A chunk, and the tokens of each of its samples."""
        self._kept = Position(0, None, 0, 0)
        self._kept_next: list[str] | None = None
        """Fingerprints of the samples after it; None: not computed yet."""

    @property
    def kind(self) -> str:
        """The type of the source, for messages."""
        return type(self._batches).__name__

    @property
    def is_at_end(self) -> bool:
        """Whether no sample of the epoch is left."""
        return self._iterator is not None and self._chunk is None

    def next_range(self) -> Range | None:
        """Return the rest of the next chunk without taking it; None at the end."""
        if self._iterator is None:
            self.start_epoch(self.epoch)
        return self._chunk and Range(self._chunk, self._offset, self._chunk.num_samples)

    def take(self, count: int, room: Room | None = None) -> list[Range]:
        """Return the next `count` samples of the epoch; fewer if it ends before, or `room` does."""
        if self._failed:
            why, instead = "reading it has failed", "resume from a saved position, in a new loader"
            raise DataError.cannot(f"read data of type {self.kind}", why=why, instead=instead)
        if self._iterator is None:
            self.start_epoch(self.epoch)
        ranges = []
        while count and self._chunk is not None:
            chunk, start = self._chunk, self._offset
            here = taken = min(chunk.num_samples - start, count)
            if room is not None:
                taken = room.fill(self._lengths_of(chunk)[start : start + here])
            ranges += [Range(chunk, start, start + taken)] if taken else []
            count -= taken
            self._passed += taken
            self._offset += taken
            if self._offset == chunk.num_samples:
                self._chunk, self._offset = self._read(), 0
            if taken < here:
                break
        return ranges

    def _lengths_of(self, chunk: Chunk) -> list[int]:
        if self._lengths[0] is not chunk:
            self._lengths = chunk, self.spec.tokens_of_samples(chunk.batch, chunk.num_samples)
        return self._lengths[1]

    def prices(self, chunk: Chunk) -> tuple[list[int], bool]:
        """Return the tokens that each sample costs a micro-batch, and whether padding is cut off.

        All cost as much as the longest one if padding is not cut off, or if samples are not sorted.
        """
        batch, number, spec = chunk.batch, chunk.num_samples, self.spec
        counts_alike = spec.split_batch is None and spec.get_num_tokens_in_batch is None
        found = used_columns(batch, number) if counts_alike else None
        prices = found or tokens_of_rows(batch, number, is_padded=True) or [0]
        if found is None:
            prices += self._lengths_of(chunk)
        is_sorted = found is not None and not self.is_compared
        return prices if is_sorted else [max(prices)] * number, found is not None

    def start_epoch(self, epoch: int, *, state: Any = None, skip: int = 0, passed: int = 0) -> None:
        """Go to the start of an epoch or to the source's own `state`, then `skip` samples.

        `passed` samples of the epoch lie before the state.

        Raises:
            DataError: the source can be read only once, or ends before.
        """
        if self._is_one_shot and self._was_read:
            raise read_once(f"read epoch {epoch} of data of type {self.kind}")
        self._was_read, self._failed = True, False
        self.epoch, drawn = epoch, self._drawn()
        _tell_epoch(self._batches, epoch)
        with seeded_generators(sample_seed(self._seed, epoch, -1)):
            own = unpack(state)
            if own is not None:
                self._batches.load_state_dict(own)  # type: ignore[attr-defined]
            self._iterator = iter(self._batches)
        # Some sources set their state only when they are read: the first chunk has the state that
        # was loaded, or is reached by counting.
        self._passed = passed
        self._chunk, self._offset = self._read(first=True, state=own), 0
        first = self._next() if self._is_compared and not passed else []
        if self._chunk is not None:  # other workers or chunks bring other samples first
            num_workers = getattr(self._batches, "num_workers", 0)
            first.insert(0, f"{num_workers} {self._chunk.num_samples}")
        before = {number: one for number, one in self._begun.items() if number == epoch - 1}
        self._begun = {**before, epoch: {"drawn": drawn, "first": first}}
        self._skip(skip)

    def next_epoch(self) -> None:
        """End the epoch; the next one starts when its first samples are taken."""
        self._iterator, self._chunk, self._offset, self._passed = None, None, 0, 0
        self.epoch += 1

    def keep(self) -> None:
        """Mark the present place as the one that `state_dict` returns."""
        state = None if self._chunk is None else self._chunk.state
        self._kept = Position(self.epoch, state, self._offset, self._passed)
        self._kept_next = None

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Return the place of the last `keep`, as JSON: the source's own state and a skip.

        The state is the one before the chunk with the first uncounted sample. Sources without a
        state skip to it by reading.

        Args:
            epoch: the epoch of the clock; if it is later, the rest of the epoch was dropped.
        """
        kept = self._kept
        if kept.epoch != epoch:
            kept = Position(epoch, None, 0, 0)
        own = packed(kept.state, "the position in the data", DataError)
        skip = kept.passed if own is None else kept.offset
        # Samples that were handed out since may have been changed in place.
        is_here = kept.passed and (kept.epoch, kept.passed) == (self.epoch, self._passed)
        if self._kept_next is None and is_here:
            self._kept_next = self._next()
        return {
            "epoch": epoch,
            "state": own,
            "skip": skip,
            "passed": kept.passed,
            "next": (self._kept_next or []) if kept.passed else [],
            "drawn": self._begun[epoch]["drawn"] if epoch in self._begun else self._drawn(),
            "begun": self._begun.get(epoch if kept.passed else epoch - 1),
            "workers": self._workers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to the position of `state_dict`.

        Raises:
            CheckpointError: the source cannot return to it, or other samples follow there.
        """
        self.next_epoch()
        self.epoch, passed = state["epoch"], state["passed"]
        own = state["state"] if self._has_state else None
        begun = state.get("begun")
        if begun is not None and not passed and self._is_compared:
            self._reread(self.epoch - 1, **begun)
        self._draw(state.get("drawn", []))
        if passed or own is not None:
            workers = state.get("workers", self._workers)
            if own is None and workers != self._workers:
                raise _other_workers(workers, self._workers)
            skip = passed if own is None else state["skip"]
            self.start_epoch(self.epoch, state=own, skip=skip, passed=passed - skip)
            present = self._next() if self._is_compared else []
            self._compare(state.get("next", []), present, passed, by_state=own is not None)
        if begun is not None:
            self._begun[self.epoch if passed else self.epoch - 1] = begun
        self.keep()

    def _reread(self, epoch: int, drawn: list[Any], first: list[str]) -> None:
        """Begin an epoch as the saved run did: what shuffles may go on from one to the next."""
        self._draw(drawn)
        self.start_epoch(epoch)
        found = self._begun[epoch]["first"]
        if found[:1] == first[:1]:
            self._compare(first, found, 0, by_state=False)
        self.next_epoch()

    def _compare(
        self, saved: list[str], present: list[str], passed: int, *, by_state: bool
    ) -> None:
        if any(one != other for one, other in zip(saved, present, strict=False)):
            raise _other_samples(self.kind, passed, by_state=by_state)

    @property
    def _is_compared(self) -> bool:
        return self.spec.sharded is not False and self.spec.resumes_by is None

    def _drawn(self) -> list[Any]:
        return [packed(one.get_state(), "a generator", DataError) for one in self._generators]

    def _draw(self, drawn: list[Any]) -> None:
        for generator, state in zip(self._generators, drawn, strict=False):
            generator.set_state(unpack(state))

    @property
    def _workers(self) -> dict[str, Any] | None:
        """What the order of the samples depends on, if several workers take turns."""
        data = self._batches
        if not isinstance(data, DataLoader) or not isinstance(data.dataset, IterableDataset):
            return None
        names = ("num_workers", "batch_size", "drop_last")
        return {name: getattr(data, name) for name in names} if data.num_workers > 1 else None

    def _next(self) -> list[str]:
        """Return fingerprints of the next few samples of the chunk."""
        if self._chunk is None:
            return []
        batch, size, start = self._chunk.batch, self._chunk.num_samples, self._offset
        places = range(start, min(size, start + _COMPARED))
        try:
            cut = [self.spec.take_samples(batch, slice(one, one + 1), size) for one in places]
        except DataError:  # packed
            return [f"{fingerprint(batch)} {start}"]
        return [fingerprint(one) for one in cut]

    def _read(self, *, first: bool = False, state: Any = None) -> Chunk | None:
        assert self._iterator is not None
        while True:
            if self._has_state and not first:
                state = copy.deepcopy(self._batches.state_dict())  # type: ignore[attr-defined]
            try:
                of_epoch = sample_seed(self._seed, self.epoch, -1)
                # The ranks of a stream may share it out by what they draw for its first chunk.
                rank = self._rank if self._passed else 0
                with seeded_generators(sample_seed(of_epoch, rank, self._passed)):
                    batch = next(self._iterator)
            except StopIteration:
                return None
            except BaseException:
                self._failed = True  # after an error, most iterators only look exhausted
                raise
            num_samples = self.spec.count_samples(batch)
            if num_samples:
                if self.example is None and isinstance(self.spec.data, IterableDataset):
                    _warn_of_batches(batch)
                self.example = Chunk(batch, num_samples, state, self._passed)
                return self.example
            first = False

    def _skip(self, count: int) -> None:
        for start in range(0, count, _SKIPPED_AT_ONCE):
            wanted = min(_SKIPPED_AT_ONCE, count - start)
            found = sum(one.size for one in self.take(wanted))
            if found < wanted:
                why = f"the data end after {start + found}"
                raise DataError.bad("position", count, why, "resume with the same data")


def _warn_of_batches(batch: Any) -> None:
    """Warn if the samples of an `IterableDataset` look like batches: equally many rows in each."""
    shapes = [tuple(one.shape) for one in nodes(batch) if isinstance(one, Tensor)]
    rows = {shape[1] if len(shape) > 1 else 1 for shape in shapes}
    if len(shapes) > 1 and max(map(len, shapes)) > 2 and len(rows) == 1 and rows != {1}:
        warnings.warn(
            f"each sample of the IterableDataset has {rows.pop()} rows in all its tensors; if they "
            "are batches, pass DataLoader(data, batch_size=None), and if not, "
            "DataLoader(data, batch_size=32)",
            UserWarning,
            stacklevel=2,
        )


def read_once(what: str) -> DataError:
    """Return the error for data that can be read only once."""
    return DataError.cannot(
        what,
        why="it can be iterated over only once",
        instead="pass an object whose __iter__ starts anew, or write max_duration='1ep'",
    )


def _other_workers(saved: Any, present: Any) -> CheckpointError:
    now, then = (
        f"{one['num_workers']} of them with batch_size={one['batch_size']}" if one else "one reader"
        for one in (present, saved)
    )
    why = f"workers take turns, so {now} bring the samples in another order than {then}"
    instead = "pass the same num_workers, batch_size and micro_batch_size, or resume after an epoch"
    return CheckpointError.cannot("continue from the saved position", why=why, instead=instead)


def _other_samples(kind: str, passed: int, *, by_state: bool) -> CheckpointError:
    why = "reading the epoch again gives other samples there"
    instead = "seed what shuffles in each epoch, by set_epoch, or pass "
    instead += "DataSpec(data, resumes_by='reading') if only random augmentation differs"
    if by_state:
        why = "its state_dict does not bring it back, as that of a shuffle buffer"
        instead = "pass DataSpec(data, resumes_by='reading') to read the epoch again, or "
        instead += "resumes_by='state' if only random augmentation differs"
    what = f"continue after {passed} samples of data of type {kind}"
    return CheckpointError.cannot(what, why=why, instead=instead)


def _parts(batches: Any) -> list[Any]:
    """Return a source, and what a `DataLoader` reads from."""
    if not isinstance(batches, DataLoader):
        return [batches]
    return [batches, batches.dataset, sampler_of(batches), batches.batch_sampler]


def _tell_epoch(batches: Any, epoch: int) -> None:
    for one in _parts(batches):
        set_epoch = getattr(one, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def check_streams(part: RankShare, source: ChunkSource, *, is_sharded: bool) -> None:
    """Compare the next batch of all ranks: equal for one stream, different for sharded ones.

    Every rank must call it. If the ranks are not connected, nothing is compared.

    Raises:
        DataError: the streams differ and are not said to be sharded, or are said to be and do not.
    """
    if not part.ranks.are_all_dp:
        return
    left = source.next_range()
    own = "" if left is None else f"{fingerprint(left.chunk.batch)} {left.start}"
    found = part.ranks.gather_dp(own)
    if is_sharded:
        same = [str(rank) for rank, one in enumerate(found) if one and found.count(one) > 1]
        if same:
            raise DataError.cannot(
                f"read data of type {source.kind} as streams that are sharded",
                why=f"the first batch is the same on ranks {' and '.join(same)}",
                instead="leave sharded=True out, or give each rank its own share of the samples",
            )
    elif len(set(found)) > 1:
        raise DataError.cannot(
            f"read data of type {source.kind} on {part.world_size} ranks",
            why="the first batch is not the same on every rank",
            instead="pass DataSpec(data, sharded=True) if each rank has its own samples, "
            "sharded=False if only augmentation differs, or else give all ranks the same order",
        )


def fingerprint(batch: Any) -> str:
    """Return a short text that is the same for equal batches.

    >>> fingerprint([torch.zeros(2), "a"]) == fingerprint([torch.zeros(2), "a"])
    True
    >>> fingerprint([torch.zeros(2), "a"]) == fingerprint([torch.zeros(2), "b"])
    False
    """
    digest = blake2b(digest_size=16)

    for node in nodes(batch):
        digest.update(type(node).__name__.encode())
        if isinstance(node, Tensor):
            shape = "nested" if node.is_nested else tuple(node.shape)
            digest.update(f"{node.dtype} {shape}".encode())
            digest.update(_bytes(node))
        elif isinstance(node, np.ndarray) and not node.dtype.hasobject:  # the rest are addresses
            digest.update(node.tobytes())
        elif isinstance(node, (str, bytes, int, float)):
            digest.update(repr(node).encode())
    return digest.hexdigest()


def record_of_all(part: RankShare, record: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the records of every rank as one, the same on each. Every rank must call it.

    Raises:
        DataError: one of them cannot be saved.
    """
    own = part.ranks.together(lambda: json.dumps(record()))[part.ranks.rank]
    return {"ranks": [json.loads(text) for text in part.ranks.gather_dp(own)]}


def record_of_rank(part: RankShare, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's record out of those of all ranks.

    Raises:
        CheckpointError: they are of another number of ranks.
    """
    ranks = saved["ranks"]
    if len(ranks) != part.world_size:
        raise CheckpointError.cannot(
            f"continue from the saved position with world_size={part.world_size}",
            why=f"it has the positions of the streams of {len(ranks)} ranks",
            instead=f"resume with world_size={len(ranks)}, or start a new run from the weights",
        )
    own: dict[str, Any] = ranks[part.rank]
    return own


def _bytes(tensor: Tensor) -> bytes:
    try:
        if tensor.is_nested:
            parts = tensor.unbind()
            return b"".join(str(tuple(one.shape)).encode() + _bytes(one) for one in parts)
        dense = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
        flat = dense.detach().cpu().contiguous().flatten()
        return flat.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError):  # without storage
        return b""
