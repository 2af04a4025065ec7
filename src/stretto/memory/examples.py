"""Batches of any size, made of a few samples of the data."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily

from stretto.data import DataSpec, StepLoader, count_samples
from stretto.errors import DataError
from stretto.memory.batches import resize_batch
from stretto.memory.prediction.trace import tensors_in

EXAMPLES = 32
"""Samples from all over the data set that are looked at for the longest one."""


def example_batches(loader: StepLoader) -> Any:
    """Return an example of a map-style data set's batches for `find_batch_size`.

    A batch, its sequences padded to the longest of a few samples. If the collate function packs
    several samples into a row: a function that packs as many copies of the longest one as it is
    asked for.
    """
    num_samples = len(loader.spec.dataset)
    count = min(EXAMPLES, num_samples)
    indices = [i * num_samples // count for i in range(count)]
    batch = loader.example_batch(indices)
    if not _is_packed(loader.spec, batch):
        return batch

    def copies(index: int, size: int) -> Any:
        with unset_fake_temporarily():  # collate functions read values
            return loader.example_batch([index] * size)

    longest = max(indices, key=lambda index: _num_elements(copies(index, count)))
    return lambda size: copies(longest, size)


def resizable(spec: DataSpec, batch: Any) -> Any:
    """Return a batch of an iterable for `find_batch_size`, its samples counted as `spec` does.

    If it is packed: a function that returns as many of its rows as hold a number of samples.
    """
    if not _is_packed(spec, batch):
        return batch
    rows, num_samples = count_samples(batch), spec.count_samples(batch)
    return lambda size: resize_batch(batch, -(-size * rows // num_samples))


def _is_packed(spec: DataSpec, batch: Any) -> bool:
    """Return whether a row holds several samples."""
    if spec.get_num_samples_in_batch is None:
        return False
    try:
        return count_samples(batch) != spec.count_samples(batch)
    except DataError:
        return True


def _num_elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch))
