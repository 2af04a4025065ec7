"""Where batches begin, in closed form: the relation of batches to samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, final, runtime_checkable

from stretto.errors import Argument, BatchSizeError, shown
from stretto.timing.grammar import TimeUnit, checked_whole
from stretto.timing.timestamp import Axis, Timestamp

LastBatch: TypeAlias = Literal["keep", "drop", "carry"]
"""What happens if an epoch ends inside a batch.

`keep`: the batch is cut and the next one starts the next epoch. `drop`: the remaining samples are
skipped. `carry`: the batch continues in the next epoch.
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
class EqualBatches:
    """Batches of one size from a timestamp on, without end.

    Number 0 starts at `first`. Under `keep` and `drop` every epoch starts with a new batch. Under
    `keep` its last batch may be smaller; under `drop` a remainder smaller than a batch is skipped.
    Under `carry`, and if the end of an epoch is unknown, batches follow each other without gaps.

    Under `drop` the rest of the epoch must hold one batch: skip it first if it does not.

    >>> batches = EqualBatches(Timestamp(), 32, num_samples=100)
    >>> [batches.position(number) for number in range(6)]
    [0, 32, 64, 96, 100, 132]
    >>> batches.count_before(100)
    4
    """

    first: Timestamp
    size: int
    num_samples: int | None = None
    last_batch: LastBatch = "keep"
    tokens_per_sample: int | None = None
    end_sample: int | None = None
    """The position at which a batch is cut because the run ends; None: none is."""

    def sample_at_batch(self, batch: int, /) -> int:
        """Return the position at which batch number `batch` (from 0) begins."""
        end = self.end_sample
        is_cut = end is not None and batch == self.count_before(end)
        return end if end is not None and is_cut else self.position(batch)

    def batch_at_sample(self, sample: int, /) -> int:
        """Return the number of batches after which position `sample` has been reached."""
        batch, end = self.count_before(sample), self.end_sample
        is_cut_off = end is not None and sample > end and batch == self.count_before(end)
        return batch + is_cut_off

    def position(self, number: int) -> int:
        """Return the sample at which batch `number` (from 0) starts."""
        num_samples = self._epoch
        if num_samples is None:
            return self.first.sample + number * self.size
        here = self._per(num_samples - self.first.sample_in_epoch)
        if number < here:
            return self.first.sample + number * self.size
        epochs, within = divmod(number - here, self._per(num_samples))
        return (self.first.epoch + 1 + epochs) * num_samples + within * self.size

    def count_before(self, sample: int) -> int:
        """Return how many batches start before `sample`."""
        passed, num_samples = sample - self.first.sample, self._epoch
        if passed <= 0:
            return 0
        if num_samples is None:
            return -(-passed // self.size)
        rest = num_samples - self.first.sample_in_epoch
        if passed <= rest:
            return min(self._per(rest), -(-passed // self.size))
        epochs, within = divmod(passed - rest, num_samples)
        per_epoch = self._per(num_samples)
        return self._per(rest) + epochs * per_epoch + min(per_epoch, -(-within // self.size))

    def count_until(self, axis: Axis, tick: int) -> int | None:
        """Return how many batches start before `tick` of `axis`; None if only the run can tell."""
        if axis.unit is TimeUnit.BATCH:
            return max(0, tick - self.first.batch)
        if axis.unit is TimeUnit.SAMPLE or (axis.unit is TimeUnit.EPOCH and self.num_samples):
            return self.count_before(tick)
        if axis.unit is TimeUnit.TOKEN and self.tokens_per_sample:
            return self.count_before(-(-tick // self.tokens_per_sample))
        return None

    def size_of(self, number: int) -> int:
        """Return the samples in batch `number`: fewer if `keep` cuts it at the end of an epoch."""
        if self._epoch is None or self.last_batch == "drop":
            return self.size
        return min(self.size, self._epoch - self.position(number) % self._epoch)

    def timestamp(self, number: int) -> Timestamp:
        """Return the clock at the start of batch `number`, with unchanged wall time."""
        if number == 0:
            return self.first
        position, num_samples = self.position(number), self.num_samples
        each = self.tokens_per_sample or 0
        epoch, batch, sample, token, batch_, sample_, token_, run, job, epoch_ns, _ = self.first
        passed = position - sample
        if num_samples is None or position < (epoch + 1) * num_samples:
            batch_, sample_, token_ = batch_ + number, sample_ + passed, token_ + passed * each
        else:
            epoch, sample_ = divmod(position, num_samples)
            batch_ = number - self.count_before(epoch * num_samples)
            token_, epoch_ns = sample_ * each, 0
        return Timestamp(
            epoch, batch + number, position, token + passed * each,
            batch_, sample_, token_,
            run, job, epoch_ns, 0,
        )  # fmt: skip

    @property
    def _epoch(self) -> int | None:
        """The samples after which a new batch starts; None: never."""
        return None if self.last_batch == "carry" else self.num_samples

    def _per(self, samples: int) -> int:
        """Return how many batches `samples` up to the end of an epoch make."""
        if self.last_batch == "drop":
            return samples // self.size
        return -(-samples // self.size)


def constant_batches(
    size: int,
    num_samples: int | None = None,
    last_batch: LastBatch = "keep",
    end_sample: int | None = None,
) -> EqualBatches:
    """Return the batches of one size over epochs of `num_samples` (None: one endless epoch).

    If the run ends inside a batch at `end_sample`, that batch ends there, too. Later batches are
    placed as if the run continued.

    >>> constant_batches(32, num_samples=100).sample_at_batch(5)
    132
    >>> constant_batches(32, num_samples=100).batch_at_sample(100)
    4
    >>> constant_batches(32, end_sample=50).sample_at_batch(2)
    50

    Raises:
        BatchSizeError: it is not a batch size, or under `drop` no epoch has so many samples.
    """
    what, instead = f"use {shown(size)} as a batch size", "write a number of samples such as 128"
    size = checked_whole(size, BatchSizeError, what, instead)
    if last_batch == "drop" and num_samples and size > num_samples:
        why = f"an epoch has only {num_samples} samples, so each would be dropped"
        smaller = ("write a smaller one or ", Argument("last_batch", "carry"))
        raise BatchSizeError.bad("batch_size", size, why, smaller)
    return EqualBatches(Timestamp(), size, num_samples, last_batch, end_sample=end_sample)
