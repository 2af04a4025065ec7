"""Fetches samples: what a rank reads of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, final

from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from stretto.batching import Split
from stretto.data.containers import mapped, named, nodes, opened
from stretto.data.indices import Bundle, IndexStream, sample_seed, seed_generators
from stretto.data.spec import Collate
from stretto.errors import DataError, shown
from stretto.planning import PlannedBatch
from stretto.runtime.random_state import kept_generators
from stretto.runtime.ranks import Ranks


@final
class Fetch:
    """Reads the samples of a map-style data set and collates them.

    - a `TensorDataset` with the default collate function: one `index_select` for each tensor.
    - `get_batch`, if it is stated.
    - any other: its samples one by one (or by `__getitems__`), then the collate function.

    Keyed randomness reads samples one by one.

    Args:
        dataset: the data set.
        collate_fn: makes a batch of a list of samples; None: torch's default.
        get_batch: makes a batch of indices; None: samples are read and collated.
        keyed_seed: seeds the randomness of each sample by its epoch and index; None: it is not
            seeded.
        num_samples: samples in an epoch; None: the length of the data set.
    """

    _whole: Callable[[list[int]], Any] | None = None
    """Returns the batch of some rows, if samples are joined to rows."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate | None = None,
        *,
        get_batch: Callable[[list[int]], Any] | None = None,
        keyed_seed: int | None = None,
        num_samples: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate: Collate = default_collate if collate_fn is None else collate_fn
        self._keyed_seed = keyed_seed
        self._num_samples = num_samples or len(dataset)
        self.get_batch = get_batch
        is_plain = keyed_seed is None and get_batch is None and self.collate is default_collate
        is_tensors = is_plain and type(dataset) is TensorDataset
        self.tensors: tuple[Tensor, ...] | None = dataset.tensors if is_tensors else None

    def uncollated(self) -> Fetch:
        """Return a fetcher of bundles of samples."""
        return self._like(collate=Bundle.of, tensors=None)

    def in_rows(self, row: int, tokens: int) -> Fetch:
        """Return a fetcher of rows by their number, each of `row` samples of so many tokens."""
        plain = self._like(collate=default_collate)

        def whole(numbers: list[int]) -> Any:
            indices = [row * number + more for number in numbers for more in range(row)]
            return joined(plain.batch(indices), row, tokens)

        return self._like(tensors=None, _whole=whole)

    def _like(self, **changes: Any) -> Fetch:
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    def read(self, stream: IndexStream, place: int, count: int) -> Any:
        """Return the batch of `count` samples at `place` of a stream."""
        if self.tensors is not None:
            indices = stream.tensor(place, count)
            return [tensor.index_select(0, indices) for tensor in self.tensors]
        return self(stream.take(place, count))

    def __call__(self, indices: list[int]) -> Any:
        """Return the batch of the samples with these indices.

        Raises:
            DataError: the data set has no sample at an index below its length.
        """
        try:
            return self.batch(indices)
        except IndexError as error:
            raise no_such_sample(self._num_samples, error) from error

    def batch(self, indices: list[int]) -> Any:
        """Return the batch of the samples with these indices, without a check of the indices."""
        if self._whole is not None:
            batch = self._whole(indices)
            if self.collate is default_collate:
                return batch
            return self.collate([mapped(itemgetter(at), batch) for at in range(len(indices))])
        if self._keyed_seed is not None:
            return self.collate(self._keyed(indices, self._keyed_seed))
        if self.tensors is not None:
            return [tensor[indices] for tensor in self.tensors]
        if self.get_batch is not None:
            return self.get_batch(indices)
        own = getattr(self.dataset, "__getitems__", None)
        samples = own(indices) if own is not None else [self.dataset[index] for index in indices]
        return self.collate(samples)

    def _keyed(self, indices: list[int], seed: int) -> list[Any]:
        samples = []
        with kept_generators():
            for keyed_index in indices:
                epoch, index = divmod(keyed_index, self._num_samples)
                seed_generators(sample_seed(seed, epoch, index))
                samples.append(self.dataset[index])
        return samples


def joined(batch: Any, row: int, tokens: int) -> Any:
    """Return a batch of samples as one of rows: `row` samples each, joined along the sequence.

    >>> import torch
    >>> joined({"x": torch.arange(8).view(4, 2)}, row=2, tokens=2)
    {'x': tensor([[0, 1, 2, 3],
            [4, 5, 6, 7]])}

    Raises:
        DataError: something in the batch is not a tensor of the shape `[samples, tokens, ...]`, or
            is named `position_ids`.
    """
    for node in nodes(batch):
        is_tensor = isinstance(node, Tensor)
        fits = node.shape[1:2] == (tokens,) if is_tensor else opened(node) is not None
        if not fits or "position_ids" in named(node):
            found = f"a tensor of the shape {[*node.shape]}" if is_tensor else shown(node)
            raise DataError.cannot(
                "join samples to longer sequences",
                why=f"the batch has {found}, or positions that begin anew in a row",
                instead=f"return only tensors of {tokens} tokens, such as inputs and their targets",
            )
    return mapped(lambda one: one.reshape(-1, row * tokens, *one.shape[2:]), batch)


def no_such_sample(num_samples: int, error: BaseException) -> DataError:
    """Return the error for an IndexError of a data set."""
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else "no reason given"
    why = f"a sample below it raised an IndexError ({reason})"
    return DataError.bad("length", num_samples, why, "let __len__ return how many there are")


Plans: TypeAlias = Iterator[tuple[PlannedBatch, int]]
"""What is decided for each batch, and the position at which it starts."""
CountedBatch: TypeAlias = tuple[Any, int]
"""A collated batch and its number of samples; 0 for a dummy, which holds one sample."""


class Piece(NamedTuple):
    """A micro-batch whose samples are stated one by one."""

    places: Sequence[int]
    """Its samples, counted from the start of the batch; a dummy reads one of them."""
    num_samples: int
    """How many they are; 0 for a dummy."""
    num_tokens: int | None = None
    """None: they are counted."""


Cut: TypeAlias = Callable[[int, int], list[Piece]]
"""Returns this rank's micro-batches of a batch, from its size and start; all ranks have as many."""


class FetchedStep(NamedTuple):
    """What one step reads. Under `drop`: the rest of an epoch that is too small for a batch."""

    plan: PlannedBatch
    """What was decided."""
    micro_batches: list[CountedBatch]
    """This rank's micro-batches; empty if the batch is dropped."""
    size: int
    """Samples over all ranks; fewer than planned if data of unknown size have ended."""
    crossings: tuple[int, ...] = ()
    """The batch's samples after each epoch end inside it; only for data of unknown size."""
    tokens: Sequence[int] | None = None
    """The tokens of each micro-batch; None: they are counted."""


Steps: TypeAlias = Callable[[Plans], Iterator[FetchedStep]]
"""Yields this rank's part of each batch, in order.

It takes a plan only when it needs it. If sizes follow measurements, that is when the loop asks for
the batch.
"""


class RankShare(NamedTuple):
    """The ranks that share each batch, of which this one's samples are read, and how many at once.

    >>> part = RankShare(Ranks.of(0, 2), micro_batch_size=8)
    >>> part.rank, part.world_size
    (0, 2)
    """

    ranks: Ranks
    micro_batch_size: int | None

    @property
    def rank(self) -> int:
        """The number of this data-parallel rank."""
        return self.ranks.dp_rank

    @property
    def world_size(self) -> int:
        """How many data-parallel ranks there are."""
        return self.ranks.dp_world_size


def share_sizes(part: RankShare, size: int, start: int) -> tuple[int, ...]:
    """Return this rank's micro-batches of the batch `[start, start + size)`; 0 for a dummy.

    >>> share_sizes(RankShare(Ranks.of(1, 2), micro_batch_size=2), 7, start=1)
    (2, 2)
    """
    rank, world_size = part.ranks.dp_rank, part.ranks.dp_world_size
    return _share_sizes(rank, world_size, part.micro_batch_size, size, start % world_size)


@lru_cache(maxsize=4096)  # sizes repeat
def _share_sizes(
    rank: int, world_size: int, micro_batch_size: int | None, size: int, start: int
) -> tuple[int, ...]:
    return Split(size, world_size, micro_batch_size, start).micro_batch_sizes(rank)


def pinned(steps: Iterator[FetchedStep]) -> Iterator[FetchedStep]:
    """Yield steps whose tensors are in pinned memory."""
    for step in steps:
        batches = [
            (mapped(lambda tensor: tensor.pin_memory(), batch), count)
            for batch, count in step.micro_batches
        ]
        yield step._replace(micro_batches=batches)
