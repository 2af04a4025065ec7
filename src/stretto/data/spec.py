"""`DataSpec`: the data, and how their samples and tokens are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from stretto._foreign import knows_foreign
from stretto.data.containers import count_samples, not_cut, take_samples
from stretto.data.lengths import OrderedLengths, checked_lengths, is_map_style, total_tokens
from stretto.data.step import MicroBatch
from stretto.data.tokens import count_tokens, longest_sequence, tokens_of_rows
from stretto.errors import DataError, shown
from stretto.ordering import SampleOrder
from stretto.settings import Loading
from stretto.timing import Horizon, LastBatch, TimeLike
from stretto.timing.grammar import checked_whole

Collate: TypeAlias = Callable[[list[Any]], Any]
"""Makes a batch of a list of samples."""


@knows_foreign
@dataclass(frozen=True, slots=True)
class DataSpec:
    """Data and the facts that a run needs about them; the defaults are usually enough.

    What the data can be:

    - a *map-style data set*: has `__len__` and `__getitem__`, as a list of samples does. stretto
      orders its samples, distributes them to ranks and collates them.
    - a *`DataLoader`* over a map-style data set with torch's own sampler: its data set, collate
      function, workers and shuffling are used. Its batch size is not; `drop_last` means
      `last_batch="drop"` unless you pass another.
    - an *iterable of collated batches* of any size: a `DataLoader` with its own order or over an
      `IterableDataset`, a streaming loader, a generator. Its batches are cut into exact ones. A
      torch `IterableDataset` alone yields samples, as in torch, and is batched first.

    Of the data only torch's protocols are used: `__len__`, `__getitem__`, `__getitems__`,
    `__iter__`, `set_epoch(epoch)`, `state_dict()` and `load_state_dict(state)`. All else is stated
    here.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> spec = DataSpec(TensorDataset(torch.zeros(50, 3)))
    >>> spec.is_map_style, spec.known_num_samples
    (True, 50)

    Raises:
        DataError: the data are none of these, or the counts contradict the data.
    """

    data: Any
    """A map-style data set, a `DataLoader`, or an iterable of collated batches."""
    num_samples: int | None = None
    """Samples in an epoch; None: the length of the data set, or unknown."""
    num_tokens: int | None = None
    """Tokens in an epoch; None: unknown. You get a warning if an epoch has another number."""
    tokens_per_sample: int | None = None
    """Tokens in every sample, if all have equally many; None: unknown."""
    get_num_samples_in_batch: Callable[[Any], int | None] | None = None
    """Counts the samples of a batch; None: `count_samples`. If it returns None for map-style data,
    a batch has as many samples as were collated, whatever its shape."""
    get_num_tokens_in_batch: Callable[[Any], int] | None = None
    """Counts the tokens of a batch; None: `count_tokens`."""
    split_batch: Callable[[Any, slice], Any] | None = None
    """Returns the samples of a batch that a slice selects; None: `take_samples`."""
    tokens_vary: bool = False
    """Whether sequences are cut after reading, so the tokens of each batch must be counted. Then
    `num_tokens` is ignored and `tokens_per_sample` is the maximum."""
    sharded: bool | None = None
    """Whether every rank has its own iterable with its own samples; then `num_samples` and
    `num_tokens` are totals over all ranks. False: every rank reads the same iterable. None: as
    False, and the ranks compare their first batches to be sure."""
    worker_sharded: bool = False
    """Whether an `IterableDataset` shares its samples out over the workers of a loader, by
    `get_worker_info` or as `datasets` does. With two workers or more it must: otherwise each of
    them reads every sample."""
    resumes_by: Literal["state", "reading"] | None = None
    """How an iterable returns to its position: by its `state_dict`, or by reading the epoch again.
    None: by its state if it has one, and the next samples must equal those of the saved run. If you
    state it, they may differ, as random augmentation does."""
    get_batch: Callable[[list[int]], Any] | None = None
    """Returns the collated batch of some indices of a map-style data set, which then is not asked
    for single samples; None: samples are read and collated."""
    lengths: Any = field(default=None, compare=False, repr=False)
    """The tokens of each sample of a map-style data set, by index: a list, an array, a memory map
    or a tensor. None: unknown. It is kept as a tensor, which shares the memory of an array."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "num_tokens", "tokens_per_sample"):
            value = getattr(self, name)
            if value is None:
                continue
            what = f"use {name}={shown(value)}"
            instead = "write how many there are, or leave it out"
            object.__setattr__(self, name, checked_whole(value, DataError, what, instead))
        _check_kind(self.data, is_sharded=bool(self.sharded))
        _check_length(self)
        check_workers(self, 0)
        _check_stated(self)
        if self.lengths is not None:
            _check_lengths(self)

    @classmethod
    def of(cls, data: Any, **stated: Any) -> DataSpec:
        """Return `data` as a spec; `stated` fields override its own, except None.

        >>> DataSpec.of([1, 2, 3]).known_num_samples
        3
        """
        given = {name: value for name, value in stated.items() if value is not None}
        if not isinstance(data, cls):
            return cls(data, **given)
        return replace(data, **given) if given else data

    @property
    def is_map_style(self) -> bool:
        """Whether samples can be read by index."""
        return is_map_style(self.dataset)

    @property
    def dataset(self) -> Any:
        """The map-style data set; for other data, the data themselves."""
        if isinstance(self.data, DataLoader) and not self.sharded and not has_own_order(self.data):
            return self.data.dataset
        return self.data

    @property
    def last_batch(self) -> LastBatch:
        """The default of `last_batch`: `drop` for a `DataLoader` with `drop_last`, else `keep`."""
        drops = isinstance(self.data, DataLoader) and _sampling(self.data).drop_last
        return "drop" if drops else "keep"

    @property
    def known_num_samples(self) -> int | None:
        """Samples in an epoch, or None."""
        return self.num_samples if self.num_samples is not None else _length(self)

    @property
    def counts(self) -> dict[str, int | None]:
        """What a `Horizon` has to know of an epoch, by the names of its arguments."""
        total = self.num_tokens if self.lengths is None else total_tokens(self.lengths)
        return {
            "dataset_num_samples": self.known_num_samples,
            "dataset_num_tokens": None if self.tokens_vary else total,
            "tokens_per_sample": None if self.tokens_vary else self.tokens_per_sample,
        }

    def order(self, loading: Loading) -> SampleOrder:
        """Return the order of the samples of a map-style data set.

        >>> DataSpec([1, 2, 3]).order(Loading(shuffle=False))
        SampleOrder(num_samples=3, seed=0, shuffle=False, group=1)
        """
        shuffles = loading.shuffle
        if shuffles is None:
            data = self.data
            shuffles = not isinstance(data, DataLoader) or isinstance(
                sampler_of(data), RandomSampler
            )
        return SampleOrder(len(self.dataset), loading.seed, shuffles)

    def ordered_lengths(self, loading: Loading) -> OrderedLengths | None:
        """Return the lengths in the order of a run; None if they are not known."""
        if self.lengths is None:
            return None
        return OrderedLengths(self.lengths, self.order(loading), packed=loading.packed)

    def horizon(
        self,
        max_duration: TimeLike,
        last_batch: LastBatch | None = None,
        *,
        loading: Loading = Loading(),
    ) -> Horizon:
        """Return the horizon of a run over these data.

        >>> DataSpec(range(20), num_samples=20).horizon("2ep")
        Horizon('2ep', dataset_num_samples=20)

        Args:
            max_duration: the length of the run.
            last_batch: what happens if an epoch ends inside a batch; by default as in `loading`.
            loading: how the samples are ordered, which places their `lengths`.
        """
        ends = next(
            one for one in (last_batch, loading.last_batch, self.last_batch) if one is not None
        )
        lengths = self.ordered_lengths(loading)
        return Horizon(max_duration, **self.counts, last_batch=ends, lengths=lengths)

    def count_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch."""
        count = self.get_num_samples_in_batch
        found = None if count is None else count(batch)
        return count_samples(batch) if found is None else found

    def count_tokens(self, batch: Any) -> int | None:
        """Return the number of tokens in a batch; None if unknown.

        A batch without token ids has `tokens_per_sample` for each sample; if sequences are cut, as
        many as the longest second dimension.

        >>> import torch
        >>> spec = DataSpec(range(9), tokens_per_sample=4, tokens_vary=True)
        >>> spec.count_tokens(torch.zeros(2, 4)), spec.count_tokens(torch.zeros(2, 3))
        (8, 6)
        """
        count = self.get_num_tokens_in_batch
        found = count_tokens(batch) if count is None else count(batch)
        if found is not None:
            return found
        each = self.tokens_per_sample
        if each is None:
            return None
        return self.count_samples(batch) * min(each, longest_sequence(batch) or each)

    def tokens_of_samples(self, batch: Any, num_samples: int) -> list[int]:
        """Return the tokens of each sample of a batch.

        >>> import torch
        >>> ids = torch.zeros(2, 3, dtype=torch.int64)
        >>> DataSpec(range(9)).tokens_of_samples({"input_ids": ids}, 2)
        [3, 3]

        Raises:
            DataError: they are unknown, or the batch cannot be cut.
        """
        if self.get_num_tokens_in_batch is None:
            found = tokens_of_rows(batch, num_samples)
            if found is not None:
                return found
        parts = (slice(place, place + 1) for place in range(num_samples))
        each = [self.count_tokens(self.take_samples(batch, part, num_samples)) for part in parts]
        if None in each:
            raise uncountable()
        return [int(count) for count in each if count is not None]

    def take_samples(self, batch: Any, part: slice | list[int], num_samples: int) -> Any:
        """Return the samples of a batch of `num_samples` that `part` selects.

        `split_batch` takes slices only.

        Raises:
            DataError: the batch cannot be cut; for example, it is packed.
        """
        if self.split_batch is not None and isinstance(part, slice):
            return self.split_batch(batch, part)
        if (
            isinstance(part, slice)
            and part.step in (None, 1)
            and part.start == 0
            and part.stop >= num_samples
        ):
            return batch
        if self.get_num_samples_in_batch is not None:
            rows = count_samples(batch)
            if rows != num_samples:
                why = f"its first tensor has {rows} as its first dimension, so it is packed"
                raise not_cut(num_samples, why)
        return take_samples(batch, part, num_samples)

    def cut(self, micro: MicroBatch, part: slice) -> MicroBatch:
        """Return the rows of a micro-batch that `part` selects, with their share of its weight.

        >>> import torch
        >>> whole = MicroBatch(torch.arange(4), 4, 0, 1.0)
        >>> DataSpec(range(9)).cut(whole, slice(0, 1)).weight
        0.25
        """
        rows, whole, row = part.stop - part.start, micro.num_rows, micro.row
        batch = self.take_samples(micro.batch, part, whole)
        tokens = micro.num_tokens * rows // whole  # rows of several samples are equal
        if row == 1:
            tokens = self.count_tokens(batch) or 0 if micro.num_tokens else 0
        return MicroBatch(batch, rows * row, tokens, micro.weight * rows / whole, row)


def uncountable() -> DataError:
    """Return the error for data that do not tell their tokens."""
    why = "a batch has neither attention_mask nor input_ids"
    instead = "pass DataSpec(data, tokens_per_sample=...) or get_num_tokens_in_batch=..."
    return DataError.cannot("count the tokens of these data", why=why, instead=instead)


def has_own_order(loader: DataLoader[Any]) -> bool:
    """Return whether a `DataLoader` defines its own order of samples."""
    if not is_map_style(loader.dataset) or type(loader.batch_sampler) is not BatchSampler:
        return True
    sampler = sampler_of(loader)
    if type(sampler) is RandomSampler:
        return sampler.replacement or sampler.num_samples != len(loader.dataset)  # type: ignore[arg-type]
    return type(sampler) is not SequentialSampler


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a `DataLoader`, or that of the `BatchSampler` it was given."""
    return getattr(_sampling(loader), "sampler", loader.sampler)


def _sampling(loader: DataLoader[Any]) -> Any:
    """Return what has the sampler and the batches' size: the loader's own are then defaults."""
    batches = loader.batch_sampler
    return batches if isinstance(batches, BatchSampler) else loader


def is_one_shot(data: Any) -> bool:
    """Return whether the data can be read only once, like a generator."""
    return isinstance(data, Iterator)


def _check_kind(data: Any, *, is_sharded: bool) -> None:
    sampler = sampler_of(data) if isinstance(data, DataLoader) else None
    if isinstance(sampler, DistributedSampler) and not is_sharded:
        why = "samples would be dealt to the ranks twice"
        raise DataError.bad("sampler", sampler, why, "pass the data set of the DataLoader")
    if isinstance(data, (str, bytes, Mapping)) or not (
        is_map_style(data) or isinstance(data, Iterable)
    ):
        raise DataError.cannot(
            f"read data of type {type(data).__name__}",
            why="it has no length and samples by index, and is no iterable of batches",
            instead="pass a torch data set, a DataLoader, or an iterable of collated batches",
        )
    if is_sharded and is_map_style(data):
        why = f"ranks share a {type(data).__name__} by the index of its samples"
        instead = "pass the whole data set, or a DataLoader over the samples of this rank"
        raise DataError.bad("sharded", value=True, why=why, instead=instead)


def check_workers(spec: DataSpec, num_workers: int | None) -> None:
    """Refuse workers that would each read all samples of an `IterableDataset`.

    Args:
        spec: the data; a `DataLoader` has its own workers.
        num_workers: those of other data.

    Raises:
        DataError: there are several, and the data are not said to be shared out over them.
    """
    source = data = spec.data
    if isinstance(data, DataLoader):
        source, num_workers = data.dataset, data.num_workers
    if (num_workers or 0) > 1 and isinstance(source, IterableDataset) and not spec.worker_sharded:
        name = type(source).__name__
        why = f"each would read all samples of the {name}, unless it shares them out"
        instead = "pass DataSpec(data, worker_sharded=True) if it does, or use one worker"
        raise DataError.bad("num_workers", num_workers, why, instead)


def _check_stated(spec: DataSpec) -> None:
    """Refuse what is stated of data of another kind."""
    if spec.get_batch is not None and not spec.is_map_style:
        why, instead = "these data have no samples by index", "leave it out"
        raise DataError.bad("get_batch", spec.get_batch, why, instead)
    if spec.resumes_by not in (None, "state", "reading"):
        why, instead = "it is no way to resume", "write 'state' or 'reading', or leave it out"
        raise DataError.bad("resumes_by", spec.resumes_by, why, instead)


def _check_lengths(spec: DataSpec) -> None:
    """Refuse lengths of an iterable or beside other counts of tokens; keep them as a tensor."""
    if not spec.is_map_style:
        why = "these data have no samples by index"
        instead = "pass a map-style data set, or leave lengths out"
        raise DataError.cannot("use lengths", why=why, instead=instead)
    lengths = checked_lengths(spec.lengths, len(spec.dataset))
    object.__setattr__(spec, "lengths", lengths)
    total = total_tokens(lengths)
    for name, right in (("num_tokens", total), ("tokens_per_sample", None), ("tokens_vary", False)):
        given = getattr(spec, name)
        if given not in (None, right):
            why = f"lengths has the tokens of each sample, {total:,} in all"
            raise DataError.bad(name, given, why, "leave one of the two out")


def _check_length(spec: DataSpec) -> None:
    length = _length(spec)
    if length == 0:
        raise DataError.bad("data", spec.dataset, "it is empty", "pass at least one sample")
    given = spec.num_samples
    if given is not None and length is not None and given != length:
        raise DataError.bad("num_samples", given, f"the data have {length}", "leave it out")


def _length(spec: DataSpec) -> int | None:
    """Return the samples in an epoch according to the data, or None."""
    if spec.sharded:
        return None  # they only know one rank's share
    data = spec.dataset
    if is_map_style(data):
        return len(data)
    if isinstance(data, DataLoader) and type(data.batch_sampler) is BatchSampler:
        try:
            length = len(sampler_of(data))
        except TypeError:
            return None
        size = data.batch_sampler.batch_size if data.batch_sampler.drop_last else 1
        return length - length % size
    return None
