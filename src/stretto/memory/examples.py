"""Example batches of any size, made from a few samples of the data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from stretto.batching import Tokens
from stretto.data import DataSpec, StepLoader, count_samples
from stretto.data.containers import nodes, opened
from stretto.errors import DataError, FitError, shown
from stretto.timing.grammar import whole

EXAMPLES = 32
"""Number of samples, spread over the data set, among which the longest is chosen."""
MOST_SHAPES = 4
"""Shapes of a token budget that are tried, at most."""
_LENGTHS = 64
"""Number of lengths above half of the longest that are tried, at most."""


@final
@dataclass(frozen=True, slots=True)
class UnequalSamples:
    """Samples of unequal length, for which `find_batch_size` finds a budget of tokens.

    A budget must fit in each shape that a micro-batch may have. Tried are those with the longest
    sample, and with the most rows, tokens, and pairs of tokens that attend to each other.

    >>> samples = UnequalSamples(lambda rows, length: torch.zeros(rows, length), [2, 6, 7])
    >>> [tuple(one.shape) for one in samples.batches(20)]
    [(2, 7), (10, 2), (3, 6)]

    Args:
        make: returns a micro-batch of so many samples of such a length.
        lengths: the tokens that samples may have: at least the fewest and the most.

    Raises:
        FitError: a length is not a whole number of at least 1.
    """

    make: Callable[[int, int], Any]
    lengths: Sequence[int]

    def __post_init__(self) -> None:
        found = sorted({whole(one) or 0 for one in self.lengths}) or [0]
        if found[0] < 1:
            why, instead = "they are not whole numbers of at least 1", "write such as [16, 2048]"
            raise FitError.cannot(f"use lengths={shown(self.lengths)}", why=why, instead=instead)
        object.__setattr__(self, "lengths", found)

    @property
    def longest(self) -> int:
        """The smallest budget: the tokens of the longest sample."""
        return self.lengths[-1]

    def batches(self, budget: int) -> list[Any]:
        """Return the micro-batches of at most so many tokens that need the most memory."""
        budget = max(budget, self.longest)
        shapes = [(budget // length, length) for length in self.lengths]
        chosen = shapes[-1:]
        for power in range(3):
            _, *most = max((rows * length**power, rows, length) for rows, length in shapes)
            chosen.append((most[0], most[1]))
        return [self.make(*shape) for shape in dict.fromkeys(chosen)]


def amount_of(batch: Any) -> type[int]:
    """Return the type of the sizes of a batch: `Tokens` if a budget is to be found."""
    return Tokens if isinstance(batch, UnequalSamples) else int


def batches_of(batch: Any, size: int) -> list[Any]:
    """Return the micro-batches of a size that are tried; see `find_batch_size`."""
    if isinstance(batch, UnequalSamples):
        return batch.batches(size)
    return [batch(size) if callable(batch) else resize_batch(batch, size)]


def unequal_samples(loader: StepLoader, *, packed: bool = False) -> UnequalSamples:
    """Return the samples of a data set whose lengths are stated, for `find_batch_size`.

    Args:
        loader: reads them.
        packed: whether the collate function joins samples without padding.
    """
    lengths: Tensor = loader.spec.lengths
    longest = int(lengths.max())
    known = torch.unique(lengths[2 * lengths >= longest])
    some = known[torch.linspace(0, len(known) - 1, min(len(known), _LENGTHS)).long()]
    chosen = [int(lengths.min()), *some.tolist()]
    index_of = {length: int((lengths == length).nonzero()[0]) for length in chosen}
    if packed or _is_packed(loader.spec, loader.example_batch([0, 0])):
        return UnequalSamples(
            lambda rows, length: loader.example_batch([index_of[length]] * rows), chosen
        )
    rows_of = {length: loader.example_batch([index]) for length, index in index_of.items()}
    return UnequalSamples(lambda rows, length: resize_batch(rows_of[length], rows), chosen)


def example_batches(loader: StepLoader) -> Any:
    """Return an example batch of a map-style data set, for `find_batch_size`.

    Its sequences are padded to the longest of a few samples. If the collate function packs several
    samples into a row, the result is a function: it packs the requested number of copies of the
    longest sample. If samples are joined to a sequence length, it returns the longest rows.
    """
    num_samples = len(loader.spec.dataset)
    count = min(EXAMPLES, num_samples)
    indices = [i * num_samples // count for i in range(count)]
    batch, row = loader.example_batch(indices), loader.horizon.group or 1
    if row > 1:
        return lambda size: resize_batch(batch, max(1, size // row))
    if not _is_packed(loader.spec, batch):
        return batch

    def copies(index: int, size: int) -> Any:
        return loader.example_batch([index] * size)

    def elements(index: int) -> int:
        return sum(one.numel() for one in nodes(copies(index, count)) if isinstance(one, Tensor))

    longest = max(indices, key=elements)
    return lambda size: copies(longest, size)


def resizable(spec: DataSpec, batch: Any) -> Any:
    """Return a batch of an iterable data set, for `find_batch_size`.

    If the batch is packed, the result is a function that returns enough rows for the requested
    number of samples, counted as `spec` counts them.
    """
    if not _is_packed(spec, batch):
        return batch
    rows, num_samples = count_samples(batch), spec.count_samples(batch)
    return lambda size: resize_batch(batch, -(-size * rows // num_samples))


def _is_packed(spec: DataSpec, batch: Any) -> bool:
    """Return whether a row can contain several samples."""
    if spec.get_num_samples_in_batch is None:
        return False
    try:
        return count_samples(batch) != spec.count_samples(batch)
    except DataError:
        return True


def resize_batch(batch: Any, size: int) -> Any:
    """Return a batch of `size` samples by repeating or cutting `batch`.

    >>> resize_batch({"x": torch.tensor([[1, 2], [3, 4]]), "y": ["a", "b"]}, 3)
    {'x': tensor([[1, 2],
            [3, 4],
            [1, 2]]), 'y': ['a', 'b', 'a']}

    Args:
        batch: a batch of at least one sample. It is not modified.
        size: how many samples the result has.

    Raises:
        DataError: the batch has no samples, or they cannot be counted.
    """
    old = count_samples(batch)
    if not old:
        why, instead = "it has no samples to repeat", "pass one of at least one sample"
        raise DataError.cannot("resize an empty batch", why=why, instead=instead)

    def resized(node: Any) -> Any:
        if isinstance(node, Tensor):
            is_per_sample = node.dim() > 0 and node.size(0) == old
            return _resized(node, size) if is_per_sample else node
        container = opened(node)
        if container is None:
            return node
        is_per_sample = (
            isinstance(node, (list, tuple))
            and len(node) == old
            and not any(isinstance(item, Tensor) and item.dim() for item in node)
        )
        if is_per_sample:
            return container.rebuilt([node[i % old] for i in range(size)])
        return container.rebuilt([resized(item) for item in container.items])

    return resized(batch)


def _resized(tensor: Tensor, size: int) -> Tensor:
    """Return a contiguous copy of `size` samples."""
    old = tensor.size(0)
    if old >= size:
        return tensor[:size].clone(memory_format=torch.contiguous_format)
    # The longer tensor is freed at once.
    return tensor.repeat(-(-size // old), *[1] * (tensor.dim() - 1))[:size].clone()
