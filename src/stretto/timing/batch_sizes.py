"""Where batches begin: the one fact that couples batches to samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, final

from stretto.errors import BatchSizeError, cannot

LastBatch: TypeAlias = Literal["keep", "drop", "carry"]
"""What happens where an epoch ends inside a batch.

`keep`: the batch is cut and the next one starts the next epoch. `drop`: the samples left over are
passed over. `carry`: the batch runs on into the next epoch.
"""


class BatchSizes(Protocol):
    """Where each batch of a run begins; a `Plan` is one, and so is a constant size."""

    def sample_at_batch(self, batch: int, /) -> int:
        """Return the position at which batch number `batch` (from 0) begins."""
        ...

    def batch_at_sample(self, sample: int, /) -> int:
        """Return the number of batches after which position `sample` has been reached."""
        ...


@final
@dataclass(frozen=True, slots=True)
class ConstantBatchSize:
    """Batches of one size over epochs of `num_samples` samples (None: one endless epoch).

    >>> ConstantBatchSize(32, num_samples=100).sample_at_batch(5)
    132
    >>> ConstantBatchSize(32, num_samples=100).batch_at_sample(100)
    4
    """

    size: int
    num_samples: int | None = None
    last_batch: LastBatch = "keep"

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise BatchSizeError(
                cannot(
                    f"use {self.size!r} as a batch size",
                    why="it is not an integer of at least 1",
                    instead="write a number of samples such as 128",
                )
            )
        if self.last_batch == "drop" and self.num_samples and self.size > self.num_samples:
            raise BatchSizeError(
                cannot(
                    f"use a batch size of {self.size} with last_batch='drop'",
                    why=f"an epoch has only {self.num_samples} samples, so each would be dropped",
                    instead="write a smaller batch size or last_batch='carry'",
                )
            )

    def sample_at_batch(self, batch: int, /) -> int:
        """Return the position at which batch number `batch` (from 0) begins."""
        if self.num_samples is None or self.last_batch == "carry":
            return batch * self.size
        epochs, within = divmod(batch, self._batches_per_epoch(self.num_samples))
        return epochs * self.num_samples + within * self.size

    def batch_at_sample(self, sample: int, /) -> int:
        """Return the number of batches after which position `sample` has been reached."""
        if self.num_samples is None or self.last_batch == "carry":
            return -(-sample // self.size)
        epochs, within = divmod(sample, self.num_samples)
        per_epoch = self._batches_per_epoch(self.num_samples)
        return epochs * per_epoch + min(-(-within // self.size), per_epoch)

    def _batches_per_epoch(self, num_samples: int) -> int:
        whole, rest = divmod(num_samples, self.size)
        return whole + (1 if rest and self.last_batch == "keep" else 0)
