"""A batch of any size, made of one that is at hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.data import count_samples
from stretto.data.containers import opened


def resize_batch(batch: Any, size: int, *, length: int | None = None) -> Any:
    """Return a batch of `size` samples: those of `batch`, repeated or cut.

    >>> resize_batch({"x": torch.tensor([[1, 2], [3, 4]]), "y": ["a", "b"]}, 3)
    {'x': tensor([[1, 2],
            [3, 4],
            [1, 2]]), 'y': ['a', 'b', 'a']}
    >>> resize_batch(torch.tensor([[1, 2, 3]]), 2, length=5).tolist()
    [[1, 2, 3, 1, 2], [1, 2, 3, 1, 2]]

    Args:
        batch: a batch of at least one sample; it is not changed.
        size: how many samples the result has.
        length: how long its sequences are. The length of `batch` is that of the second dimension
            of its first tensor that has one; every dimension of a sample that is as long is a
            sequence.

    Raises:
        DataError: the batch has nothing that can be counted.
    """
    return _Resize(count_samples(batch), size, None if length is None else _length(batch), length)(
        batch
    )


class _Resize:
    def __init__(
        self, old_size: int, size: int, old_length: int | None, length: int | None
    ) -> None:
        self._old_size = old_size
        self._size = size
        self._old_length = old_length
        self._length = length

    def __call__(self, node: Any) -> Any:
        if isinstance(node, Tensor):
            return self._tensor(node)
        container = opened(node)
        if container is None:
            return node
        is_per_sample = (
            isinstance(node, (list, tuple))
            and len(node) == self._old_size
            and not any(isinstance(item, Tensor) and item.dim() for item in node)
        )
        if is_per_sample:
            return container.rebuilt([node[i % self._old_size] for i in range(self._size)])
        return container.rebuilt([self(item) for item in container.items])

    def _tensor(self, tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.size(0) != self._old_size:
            return tensor
        tensor = _resized(tensor, 0, self._size)
        if self._length is not None and self._length != self._old_length:
            for dim in range(1, tensor.dim()):
                if tensor.size(dim) == self._old_length:
                    tensor = _resized(tensor, dim, self._length)
        return tensor


def _resized(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor of another size along one dimension, contiguous and not a view."""
    old = tensor.size(dim)
    if old >= size:
        return tensor.narrow(dim, 0, size).clone(memory_format=torch.contiguous_format)
    repeats = [1] * tensor.dim()
    repeats[dim] = -(-size // old)
    # Repeated along one dimension only, then cut; the repeats are gone when the result is made.
    return tensor.repeat(repeats).narrow(dim, 0, size).clone()


def _length(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.size(1) if batch.dim() > 1 else None
    container = opened(batch)
    if container is None:
        return None
    return next((found for item in container.items if (found := _length(item)) is not None), None)
