"""Lengths of samples: checked, and read in the order of a run."""

from __future__ import annotations

import os
import sys
import warnings
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import IO, Any, TypeAlias, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from stretto._foreign import knows_foreign
from stretto._location import check_same, has_locked, is_at, local_path, open_plain, own_name
from stretto.data.indices import permuted_block
from stretto.errors import DataError, shown
from stretto.ordering import SampleOrder
from stretto.runtime.random_state import kept_generators
from stretto.timing.grammar import whole

_Count: TypeAlias = Callable[[list[Any]], list[int]]
_BLOCK = 1 << 15  # read in 2.5 ms; 10 million samples are 306 blocks
_BYTES, _CHUNK, _LOOKS = 4, 1024, 63
"""Of a file of lengths: bytes of one, samples that are read at once, samples counted again."""
_KEPT = 8
"""Blocks whose lengths stay in memory: 0.3 MB each, and 2 MB where batches end in them."""


def checked_lengths(value: Any, num_samples: int) -> Tensor:
    """Return the tokens of each sample as a tensor, which shares the memory of an array.

    >>> checked_lengths([5, 3, 8], 3)
    tensor([5, 3, 8])

    Args:
        value: a list, an array, a memory map or a tensor, by index of the sample.
        num_samples: samples in the data set.

    Raises:
        DataError: they are not whole numbers of at least 1, one for each sample.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # a read-only memory map is only read
            lengths = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _refused(value, f"they are no array of whole numbers ({error})") from error
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise _refused(value, f"they are of type {lengths.dtype}, which has no whole numbers")
    if tuple(lengths.shape) != (num_samples,):
        why = f"their shape is {tuple(lengths.shape)} and the data have {num_samples:,} samples"
        raise _refused(value, why)
    if lengths.dtype in (torch.uint16, torch.uint32, torch.uint64):
        lengths = lengths.to(torch.int64)  # torch cannot index these
    lengths = lengths.detach().to("cpu")
    if int(lengths.min()) < 1:
        at = int(lengths.argmin())
        raise _refused(value, f"sample {at} has {int(lengths[at])} tokens")
    return lengths


def is_map_style(data: Any) -> bool:
    """Return whether samples can be read by index."""
    if isinstance(data, (IterableDataset, DataLoader, str, bytes, Mapping)):
        return False
    kind = type(data)
    return all(getattr(kind, name, None) is not None for name in ("__getitem__", "__len__"))


@knows_foreign
def count_lengths(
    dataset: Any,
    path: str | Path,
    *,
    length: Callable[[Any], int] | None = None,
    num_workers: int = 0,
) -> Tensor:
    """Return the tokens of each sample of a data set, counted once and kept in a file.

    The file holds 32-bit integers and is mapped into memory. Counting that was interrupted
    continues. A file of other data is refused: some samples are counted again to find out.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     count_lengths([[5, 6, 7], [8]], f"{folder}/lengths")
    tensor([3, 1], dtype=torch.int32)

    Args:
        dataset: a map-style data set.
        path: the file. Of processes that count at once, each does all of it: start one first.
        length: returns the tokens of a sample; None: the ones of its `attention_mask`, else the
            number of its `input_ids`, else `len(sample)`.
        num_workers: processes that read samples.

    Raises:
        DataError: a length is not a whole number of at least 1, or the file is of other data.
    """
    if not is_map_style(dataset):
        what = f"count the tokens of data of type {type(dataset).__name__}"
        why, instead = "it has no length and samples by index", "pass a map-style data set"
        raise DataError.cannot(what, why=why, instead=instead)
    place = local_path(path, "keep lengths in", DataError)
    counted = partial(_lengths, length or _length)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(place):
            return _whole(place, dataset, counted)
        return _counted(place, dataset, counted, num_workers)
    except OSError as error:
        why, instead = (error.strerror or str(error)).lower(), "pass the path of another file"
        raise DataError.cannot(f"keep lengths in {place}", why=why, instead=instead) from error


def _whole(path: Path, dataset: Any, count: _Count) -> Tensor:
    """Return the lengths in a file that is complete.

    Raises:
        DataError: they are those of other data.
    """
    with open_plain(path) as file:
        return _kept(file, path, dataset, count, len(dataset))


def _counted(path: Path, dataset: Any, count: _Count, num_workers: int) -> Tensor:
    """Count the lengths, and keep them if no other process has done so meanwhile."""
    part, num_samples = path.with_name(path.name + ".part"), len(dataset)
    with ExitStack() as opened:
        file = opened.enter_context(open_plain(part, "a+b"))
        # Another process may count, too; or it has ended since the file was opened.
        if not (has_locked(file) and is_at(file, part)):
            part = own_name(path)
            file = opened.enter_context(open_plain(part, "a+b"))
            opened.callback(part.unlink, missing_ok=True)
        done = len(_kept(file, part, dataset, count))
        file.truncate(done * _BYTES)
        with kept_generators():
            rest: Any = range(done, num_samples)
            for some in DataLoader(
                dataset, _CHUNK, sampler=rest, num_workers=num_workers, collate_fn=count
            ):
                array("i", some).tofile(file)
                file.flush()
                done += len(some)
                _show(done, num_samples)
        check_same(file, part, num_samples * _BYTES)
        if os.path.lexists(path):
            part.unlink()
            return _whole(path, dataset, count)
        part.replace(path)
        return _mapped(file, num_samples)


def _kept(
    file: IO[bytes], path: Path, dataset: Any, count: _Count, whole: int | None = None
) -> Tensor:
    """Return the lengths in a file, which they stay, whatever gets its name.

    Raises:
        DataError: they are those of other data, as some that are counted again show; or there are
            not so many as a whole file has.
    """
    done = os.fstat(file.fileno()).st_size // _BYTES
    places = sorted({at * (done - 1) // _LOOKS for at in range(_LOOKS + 1)}) if done else []
    if done <= len(dataset) and whole in (None, done):
        kept = _mapped(file, done)
        if kept[places].tolist() == count([dataset[place] for place in places]):
            return kept
    why = "it has the lengths of other data, or of other ones of these"
    raise DataError.cannot(f"use {path}", why=why, instead="delete it, or pass another path")


def _mapped(file: IO[bytes], count: int) -> Tensor:
    # An empty file cannot be mapped.
    memory = mmap(file.fileno(), count * _BYTES, access=ACCESS_COPY) if count else bytearray(_BYTES)
    return torch.frombuffer(memory, dtype=torch.int32)[:count]


def _length(sample: Any) -> Any:
    """Return the tokens of a sample; None if it does not tell."""
    mask, ids = None, sample
    if isinstance(sample, Mapping):
        mask, ids = sample.get("attention_mask"), sample.get("input_ids")
    one = ids if mask is None else mask
    # The parts of a tuple, such as inputs and targets, are no tokens; nor are rows.
    if isinstance(one, tuple) or getattr(one, "ndim", 1) != 1 or not hasattr(one, "__len__"):
        return None
    return len(one) if mask is None else sum(map(bool, mask))


def _lengths(length: Callable[[Any], int], samples: list[Any]) -> list[int]:
    """Return the tokens of some samples."""
    given = [length(sample) for sample in samples]
    found = list(map(whole, given))
    wrong = [at for at, one in enumerate(found) if one is None or not 1 <= one < 2**31]
    if wrong:
        why = "it is not a whole number from 1 to 2^31"
        instead = "pass length=..., which returns the tokens of a sample"
        raise DataError.cannot(
            f"use {shown(given[wrong[0]])} as the length of a sample", why=why, instead=instead
        )
    return found  # type: ignore[return-value]


def _show(done: int, num_samples: int) -> None:
    """Show how far counting is, on a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        end = "\n" if done == num_samples else ""
        sys.stderr.write(f"\rlengths: {done / num_samples:4.0%}{end}")


def total_tokens(lengths: Tensor) -> int:
    """Return the tokens of an epoch.

    >>> total_tokens(torch.tensor([200, 200], dtype=torch.uint8))
    400
    """
    # A sixth of the time of one sum, which torch does not vectorise over types.
    return sum(int(part.to(torch.int64).sum()) for part in lengths.split(_BLOCK))


def _refused(value: Any, why: str) -> DataError:
    what = f"use lengths of type {type(value).__name__}"
    instead = "pass one whole number of at least 1 for each sample of the data set, by its index"
    return DataError.cannot(what, why=why, instead=instead)


@final
class OrderedLengths:
    """The tokens of each sample of a run, by position.

    Blocks of the order are evaluated where they are asked for; an epoch has the same total in any
    order, so whole epochs are never read.

    >>> ordered = OrderedLengths(torch.tensor([5, 3, 8]), SampleOrder(3, shuffle=False))
    >>> ordered.of(1, 5), ordered.tokens(1, 5), ordered.count(1, 12), ordered.reached(0, 21)
    ([3, 8, 5, 3], 19, 2, 4)

    Args:
        lengths: by index of the sample; see `checked_lengths`.
        order: the sample at each position.
        packed: whether micro-batches join samples without padding.
    """

    def __init__(self, lengths: Tensor, order: SampleOrder, *, packed: bool = False) -> None:
        self._lengths, self._order = lengths, order
        self.packed = packed
        self.num_samples = order.num_samples
        self.total = total_tokens(lengths)
        """Tokens of an epoch."""
        self.longest_sample = int(lengths.argmax())
        """The index of the longest sample."""
        self.longest = int(lengths[self.longest_sample])
        """Its tokens."""
        self._block = _Block(0, torch.empty(0, dtype=torch.int64))
        self._blocks: dict[int, _Block] = {}
        self._totals: dict[int, int] = {}

    def of(self, start: int, stop: int) -> list[int]:
        """Return the tokens of the samples at positions from `start` up to `stop`."""
        found: list[int] = []
        while start < stop:
            block = self._at(start)
            end = min(stop, block.end)
            found += block.lengths[start - block.begin : end - block.begin].tolist()
            start = end
        return found

    def tokens(self, start: int, stop: int) -> int:
        """Return the tokens of all samples at positions from `start` up to `stop`."""
        found = 0
        while start < stop:
            begin, end = self._place(start)
            epochs = (stop - start) // self.num_samples
            if epochs and start % self.num_samples == 0:
                found, start = found + epochs * self.total, start + epochs * self.num_samples
            elif start == begin and end <= stop:
                found, start = found + self._total(start), end
            else:
                sums, end = self._at(start).sums, min(stop, end)
                found, start = found + sums[end - begin] - sums[start - begin], end
        return found

    def count(self, position: int, tokens: int) -> int:
        """Return the samples of the longest interval from `position` of at most `tokens`.

        At least 1. It runs on across epochs.
        """
        return max(1, self._fitting(position, tokens))

    def reached(self, position: int, tokens: int) -> int:
        """Return the samples of the shortest interval from `position` of at least `tokens`."""
        return self._fitting(position, tokens - 1) + 1 if tokens > 0 else 0

    def _fitting(self, position: int, tokens: int) -> int:
        start = position
        while tokens:
            if position % self.num_samples == 0:
                epochs, tokens = divmod(tokens, self.total)
                position += epochs * self.num_samples
            begin, end = self._place(position)
            if position == begin and tokens > _BLOCK and self._total(begin) <= tokens:
                position, tokens = end, tokens - self._total(begin)
                continue
            sums, at = self._at(position).sums, position - begin
            found = bisect_right(sums, sums[at] + tokens, at) - 1
            position, tokens = begin + found, tokens - (sums[found] - sums[at])
            if position < end:
                break
        return position - start

    def _place(self, position: int) -> tuple[int, int]:
        """Return where the block of a position begins and ends."""
        block = self._block
        if block.begin <= position < block.end:
            return block.begin, block.end
        epoch, within = divmod(position, self.num_samples)
        begin, after = position - within % _BLOCK, (epoch + 1) * self.num_samples
        return begin, min(begin + _BLOCK, after)

    def _total(self, begin: int) -> int:
        """Return the tokens of the block that begins at a position."""
        if begin not in self._totals:
            self._totals[begin] = int(self._at(begin).lengths.sum())
        return self._totals[begin]

    def _at(self, position: int) -> _Block:
        """Return the block of a position."""
        if self._block.begin <= position < self._block.end:
            return self._block
        begin, end = self._place(position)
        block = self._blocks.pop(begin, None) or self._read(begin, end)
        self._block = self._blocks[begin] = block
        if len(self._blocks) > _KEPT:
            del self._blocks[next(iter(self._blocks))]
        return block

    def _read(self, begin: int, end: int) -> _Block:
        epoch, within = divmod(begin, self.num_samples)
        if not self._order.shuffle:
            return _Block(begin, self._lengths[within : within + end - begin].to(torch.int64))
        places = torch.arange(within, within + end - begin)
        indices = permuted_block(places, self._order, epoch)
        return _Block(begin, self._lengths.index_select(0, indices).to(torch.int64))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OrderedLengths):
            return NotImplemented
        is_same = self._lengths is other._lengths or torch.equal(self._lengths, other._lengths)
        return self._order == other._order and is_same

    def __hash__(self) -> int:
        return hash((self._order, self.total))

    def __repr__(self) -> str:
        return f"<lengths of {self.num_samples:,} samples, {self.total:,} tokens>"


@final
class _Block:
    """Lengths of neighbours in the order, and their running sums once they are asked for."""

    __slots__ = ("_sums", "begin", "end", "lengths")

    def __init__(self, begin: int, lengths: Tensor) -> None:
        self.begin, self.end, self.lengths = begin, begin + len(lengths), lengths
        self._sums: list[int] | None = None

    @property
    def sums(self) -> list[int]:
        """The tokens of the first i samples, at i."""
        if self._sums is None:
            self._sums = [0, *self.lengths.cumsum(0).tolist()]
        return self._sums
