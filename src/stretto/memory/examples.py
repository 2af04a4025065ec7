"""Example batches of any size, made from a few samples of the data set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.data import DataSpec, StepLoader, count_samples
from stretto.data.containers import nodes, opened
from stretto.errors import DataError

EXAMPLES = 32
"""Number of samples, spread over the data set, among which the longest is chosen."""


def example_batches(loader: StepLoader) -> Any:
    """Return an example batch of a map-style data set, for `find_batch_size`.

    Its sequences are padded to the longest of a few samples. If the collate function packs several
    samples into a row, the result is a function: it packs the requested number of copies of the
    longest sample.
    """
    num_samples = len(loader.spec.dataset)
    count = min(EXAMPLES, num_samples)
    indices = [i * num_samples // count for i in range(count)]
    batch = loader.example_batch(indices)
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
        DataError: the samples of the batch cannot be counted.
    """
    old = count_samples(batch)

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
