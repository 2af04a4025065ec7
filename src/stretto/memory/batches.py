"""Resize an example batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.data import count_samples
from stretto.data.containers import opened


def resize_batch(batch: Any, size: int, *, length: int | None = None) -> Any:
    """Return a batch of `size` samples by repeating or cutting `batch`.

    >>> resize_batch({"x": torch.tensor([[1, 2], [3, 4]]), "y": ["a", "b"]}, 3)
    {'x': tensor([[1, 2],
            [3, 4],
            [1, 2]]), 'y': ['a', 'b', 'a']}
    >>> resize_batch(torch.tensor([[1, 2, 3]]), 2, length=5).tolist()
    [[1, 2, 3, 1, 2], [1, 2, 3, 1, 2]]

    Args:
        batch: a batch of at least one sample. It is not modified.
        size: how many samples the result has.
        length: the sequence length of the result. The sequence length of `batch` is the second
            dimension of its first tensor with two or more dimensions. Every dimension of that
            length is resized.

    Raises:
        DataError: the samples of the batch cannot be counted.
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
    """Return a contiguous copy with another size along one dimension."""
    old = tensor.size(dim)
    if old >= size:
        return tensor.narrow(dim, 0, size).clone(memory_format=torch.contiguous_format)
    repeats = [1] * tensor.dim()
    repeats[dim] = -(-size // old)
    # Repeat along this dimension only, then cut. The longer tensor is freed at once.
    return tensor.repeat(repeats).narrow(dim, 0, size).clone()


def _length(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.size(1) if batch.dim() > 1 else None
    container = opened(batch)
    if container is None:
        return None
    return next((found for item in container.items if (found := _length(item)) is not None), None)
