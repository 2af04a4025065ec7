"""Where batches of one size begin, in closed form: the arithmetic under every plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from stretto.timing import Axis, Horizon, LastBatch, Timestamp, TimeUnit


@final
@dataclass(frozen=True, slots=True)
class EqualBatches:
    """The batches of one size from a timestamp on, as if they went on for ever.

    Number 0 starts at `first`. Under `keep` and `drop` every epoch begins with a fresh batch;
    under `keep` its last one may be smaller, under `drop` what is less than a batch is passed
    over. Under `carry`, and where an epoch has no known end, they lie end to end.

    Under `drop` the rest of the epoch must hold one batch: pass over it first.

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

    @classmethod
    def on(cls, horizon: Horizon, first: Timestamp, size: int) -> EqualBatches:
        """Return the batches of `size` on the run of `horizon`."""
        return cls(
            first,
            size,
            horizon.dataset_num_samples,
            horizon.last_batch,
            horizon.tokens_per_sample,
        )

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
        """Return the samples in batch `number`: fewer where `keep` cuts it at the epoch's end."""
        if self._epoch is None or self.last_batch == "drop":
            return self.size
        return min(self.size, self._epoch - self.position(number) % self._epoch)

    def timestamp(self, number: int) -> Timestamp:
        """Return the clock at the start of batch `number`; wall time stands still."""
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
        """The samples after which a fresh batch begins, or None where none does."""
        return None if self.last_batch == "carry" else self.num_samples

    def _per(self, samples: int) -> int:
        """How many batches `samples` up to the end of an epoch give."""
        if self.last_batch == "drop":
            return samples // self.size
        return -(-samples // self.size)


def next_epoch(horizon: Horizon, timestamp: Timestamp) -> Timestamp:
    """Return the clock at the start of the next epoch, without a batch in between.

    Where `last_batch="drop"` leaves out what is less than a batch, this passes over it.
    """
    left = (horizon.dataset_num_samples or 0) - timestamp.sample_in_epoch
    return timestamp._replace(
        epoch=timestamp.epoch + 1,
        sample=timestamp.sample + left,
        token=timestamp.token + left * (horizon.tokens_per_sample or 0),
        batch_in_epoch=0,
        sample_in_epoch=0,
        token_in_epoch=0,
        epoch_nanoseconds=0,
    )


def outgrows_epoch(horizon: Horizon, timestamp: Timestamp, size: int) -> bool:
    """Return whether `last_batch="drop"` leaves out what is left of the epoch at `timestamp`."""
    num_samples = horizon.dataset_num_samples
    if horizon.last_batch != "drop" or num_samples is None:
        return False
    return size > num_samples - timestamp.sample_in_epoch


def end_tick(horizon: Horizon) -> tuple[Axis, int]:
    """Return the counter that ends the run and the tick at which it does."""
    axis = horizon.axis(TimeUnit.DURATION)
    return axis, math.ceil(horizon.ticks(horizon.max_duration, axis))


def is_countable(horizon: Horizon, unit: TimeUnit) -> bool:
    """Return whether `unit` is known before the run wherever the number of samples is.

    >>> is_countable(Horizon("1ep"), TimeUnit.EPOCH)
    False
    """
    batches = EqualBatches.on(horizon, Timestamp(), 1)
    return batches.count_until(horizon.axis(unit), 1) is not None
