"""Resize an example batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.data import count_samples
from stretto.data.containers import opened


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
