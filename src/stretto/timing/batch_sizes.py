"""Where batches begin: the one fact that couples batches to samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, final, runtime_checkable

from stretto.errors import Argument, BatchSizeError, cannot, shown
from stretto.timing.number import whole

LastBatch: TypeAlias = Literal["keep", "drop", "carry"]
"""What happens where an epoch ends inside a batch.

`keep`: the batch is cut and the next one starts the next epoch. `drop`: the samples left over are
passed over. `carry`: the batch runs on into the next epoch.
"""


@runtime_checkable
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

    Where the run ends inside a batch at `end_sample`, that batch ends there too. Later batches,
    which no run has, lie as if the run went on.

    >>> ConstantBatchSize(32, num_samples=100).sample_at_batch(5)
    132
    >>> ConstantBatchSize(32, num_samples=100).batch_at_sample(100)
    4
    >>> ConstantBatchSize(32, end_sample=50).sample_at_batch(2)
    50
    """

    size: int
    """Samples in a batch, over all ranks."""
    num_samples: int | None = None
    """Samples in an epoch, or None where it has no known end."""
    last_batch: LastBatch = "keep"
    """What happens where an epoch ends inside a batch."""
    end_sample: int | None = None
    """The position at which the run ends; None where no batch is cut there."""

    def __post_init__(self) -> None:
        size = whole(self.size)
        if size is None or size < 1:
            raise BatchSizeError(
                cannot(
                    f"use {shown(self.size)} as a batch size",
                    why="it is not an integer of at least 1",
                    instead="write a number of samples such as 128",
                )
            )
        object.__setattr__(self, "size", size)
        if self.last_batch == "drop" and self.num_samples and size > self.num_samples:
            raise BatchSizeError(
                cannot(
                    (f"use a batch size of {size} with ", Argument("last_batch", "drop")),
                    why=f"an epoch has only {self.num_samples} samples, so each would be dropped",
                    instead=("write a smaller batch size or ", Argument("last_batch", "carry")),
                )
            )

    def sample_at_batch(self, batch: int, /) -> int:
        """Return the position at which batch number `batch` (from 0) begins."""
        sample = self._uncut_sample(batch)
        return sample if self.end_sample is None or batch != self._last else self.end_sample

    def batch_at_sample(self, sample: int, /) -> int:
        """Return the number of batches after which position `sample` has been reached."""
        batch = self._uncut_batch(sample)
        is_cut_off = self.end_sample is not None and sample > self.end_sample
        return batch + 1 if is_cut_off and batch == self._last else batch

    @property
    def _last(self) -> int | None:
        """After how many batches the run ends, where it ends at a position."""
        return None if self.end_sample is None else self._uncut_batch(self.end_sample)

    def _uncut_sample(self, batch: int) -> int:
        if self.num_samples is None or self.last_batch == "carry":
            return batch * self.size
        epochs, within = divmod(batch, self._batches_per_epoch(self.num_samples))
        return epochs * self.num_samples + within * self.size

    def _uncut_batch(self, sample: int) -> int:
        if self.num_samples is None or self.last_batch == "carry":
            return -(-sample // self.size)
        epochs, within = divmod(sample, self.num_samples)
        per_epoch = self._batches_per_epoch(self.num_samples)
        return epochs * per_epoch + min(-(-within // self.size), per_epoch)

    def _batches_per_epoch(self, num_samples: int) -> int:
        whole_batches, rest = divmod(num_samples, self.size)
        return whole_batches + (1 if rest and self.last_batch == "keep" else 0)
