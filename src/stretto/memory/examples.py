"""Example batches of any size, made from a few samples of the data set."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily

from stretto.data import DataSpec, StepLoader, count_samples
from stretto.errors import DataError
from stretto.memory.batches import resize_batch
from stretto.memory.prediction.trace import tensors_in

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
        with unset_fake_temporarily():  # collate functions read values
            return loader.example_batch([index] * size)

    longest = max(indices, key=lambda index: _num_elements(copies(index, count)))
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


def _num_elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch))
