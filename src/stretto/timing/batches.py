"""Where batches of one decided size begin: of equal samples, or of samples of known lengths."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self, final

from stretto.timing.grammar import TimeUnit
from stretto.timing.timestamp import Axis, Timestamp

if TYPE_CHECKING:
    from stretto.timing.horizon import Horizon


class Lengths(Protocol):
    """The tokens of each sample of a run, by position: what `DataSpec.horizon` makes of lengths."""

    num_samples: int
    """Samples in an epoch."""
    total: int
    """Tokens in an epoch."""
    longest: int
    """Tokens of the longest sample."""
    longest_sample: int
    """The index of that sample in the data set."""
    packed: bool
    """Whether micro-batches join samples without padding."""

    def of(self, start: int, stop: int, /) -> Sequence[int]:
        """Return the tokens of the samples at positions from `start` up to `stop`."""
        ...

    def tokens(self, start: int, stop: int, /) -> int:
        """Return the tokens of all samples at positions from `start` up to `stop`."""
        ...

    def count(self, position: int, tokens: int, /) -> int:
        """Return the samples of the longest interval from `position` of at most `tokens`.

        At least 1. It runs on across epochs.
        """
        ...

    def reached(self, position: int, tokens: int, /) -> int:
        """Return the samples of the shortest interval from `position` of at least `tokens`."""
        ...


@dataclass(frozen=True, slots=True)
class Batches(ABC):
    """Batches of one decided size from a timestamp on, without end.

    Number 0 starts at `first`. Under `keep` and `drop` every epoch starts with a new batch. Under
    `keep` its last batch may be smaller; under `drop` a remainder that a batch does not fit into is
    skipped. Under `carry`, and if the end of an epoch is unknown, batches follow each other without
    gaps.

    Under `drop` the rest of the epoch must hold one batch: skip it first if it does not.
    """

    horizon: Horizon
    first: Timestamp
    size: int

    @abstractmethod
    def position(self, number: int) -> int:
        """Return the sample at which batch `number` (from 0) starts."""

    @abstractmethod
    def count_before(self, sample: int) -> int:
        """Return how many batches start before `sample`."""

    @abstractmethod
    def size_of(self, number: int) -> int:
        """Return the samples in batch `number`: fewer if `keep` cuts it at the end of an epoch."""

    @abstractmethod
    def samples(self, count: int) -> int:
        """Return the samples of the first `count` batches, if neither epoch nor run cuts them."""

    @abstractmethod
    def spread(self, count: int | None) -> tuple[int, int]:
        """Return the fewest and the most samples of the first `count` batches that are not cut.

        None: of the batches of an epoch.
        """

    def later(self, number: int) -> Self:
        """Return the batches from batch `number` on."""
        return replace(self, first=self.timestamp(number))

    def sample_at_batch(self, batch: int, /) -> int:
        """Return where a batch begins in the run, whose end cuts the batch that it is inside.

        Later batches are placed as if the run continued.

        >>> from stretto.timing import Horizon
        >>> EqualBatches(Horizon("50sp"), Timestamp(), 32).sample_at_batch(2)
        50
        """
        end = self._cut
        is_cut = end is not None and batch == self.count_before(end)
        return end if end is not None and is_cut else self.position(batch)

    def batch_at_sample(self, sample: int, /) -> int:
        """Return the number of batches after which position `sample` has been reached."""
        batch, end = self.count_before(sample), self._cut
        return batch + (end is not None and sample > end and batch == self.count_before(end))

    def count_until(self, axis: Axis, tick: int) -> int | None:
        """Return how many batches start before `tick` of `axis`; None if only the run can tell."""
        if axis.unit is TimeUnit.BATCH:
            return max(0, tick - self.first.batch)
        num_samples, each = self.horizon.dataset_num_samples, self.horizon.tokens_per_sample
        if axis.unit is TimeUnit.SAMPLE or (axis.unit is TimeUnit.EPOCH and num_samples):
            return self.count_before(tick)
        if axis.unit is TimeUnit.TOKEN and each:
            return self.count_before(-(-tick // each))
        if axis.unit is TimeUnit.TOKEN and self.horizon.lengths is not None:
            left, start = tick - self.first.token, self.first.sample
            return self.count_before(start + self.horizon.lengths.reached(start, left))
        return None

    def timestamp(self, number: int) -> Timestamp:
        """Return the clock at the start of batch `number`, with unchanged wall time."""
        if number == 0:
            return self.first
        position, num_samples = self.position(number), self.horizon.dataset_num_samples
        epoch, batch, sample, token, batch_, sample_, token_, run, job, epoch_ns, _ = self.first
        passed, tokens = position - sample, self.tokens(number)
        if num_samples is None or position < (epoch + 1) * num_samples:
            batch_, sample_, token_ = batch_ + number, sample_ + passed, token_ + tokens
        else:
            # Each epoch has the same tokens, in any order.
            per_epoch = self.horizon.tokens(0, num_samples)
            token_ += tokens - (position // num_samples - epoch) * per_epoch
            epoch, sample_ = divmod(position, num_samples)
            batch_ = number - self.count_before(epoch * num_samples)
            epoch_ns = 0
        return Timestamp(
            epoch, batch + number, position, token + tokens,
            batch_, sample_, token_,
            run, job, epoch_ns, 0,
        )  # fmt: skip

    def tokens(self, number: int) -> int:
        """Return the tokens from the first batch up to batch `number`; 0 if they are not known."""
        return self.horizon.tokens(self.first.sample, self.position(number))

    @property
    def _cut(self) -> int | None:
        """The position at which a batch is cut because the run ends; None: none is."""
        return None if self.horizon.last_batch == "drop" else self.horizon.end_sample

    @property
    def _epoch(self) -> int | None:
        """The samples after which a new batch starts; None: never."""
        return None if self.horizon.last_batch == "carry" else self.horizon.dataset_num_samples


@final
@dataclass(frozen=True, slots=True)
class EqualBatches(Batches):
    """Batches of one number of samples.

    >>> from stretto.timing import Horizon
    >>> batches = EqualBatches(Horizon("2ep", dataset_num_samples=100), Timestamp(), 32)
    >>> [batches.position(number) for number in range(6)]
    [0, 32, 64, 96, 100, 132]
    >>> batches.count_before(100)
    4
    """

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

    def size_of(self, number: int) -> int:
        """Return the samples in batch `number`: fewer if `keep` cuts it at the end of an epoch."""
        if self._epoch is None or self.horizon.last_batch == "drop":
            return self.size
        return min(self.size, self._epoch - self.position(number) % self._epoch)

    def samples(self, count: int) -> int:
        """Return the samples of the first `count` batches, if neither epoch nor run cuts them."""
        return count * self.size

    def spread(self, count: int | None) -> tuple[int, int]:
        """Return the size, twice."""
        del count
        return self.size, self.size

    def _per(self, samples: int) -> int:
        """Return how many batches `samples` up to the end of an epoch make."""
        if self.horizon.last_batch == "drop":
            return samples // self.size
        return -(-samples // self.size)


@final
@dataclass(frozen=True, slots=True)
class TokenBatches(Batches):
    """Batches of one amount in tokens, over samples of known lengths.

    Each is the longest interval of at most `size` tokens, and has at least one sample. Under `drop`
    one that would run on into the next epoch is skipped. Batches are searched for as far as they
    are asked for, and kept.
    """

    _found: tuple[array[int], array[int], array[int]] = field(
        init=False,
        default_factory=lambda: (array("q"), array("q"), array("q")),
        compare=False,
        repr=False,
    )
    """Where each batch begins and ends, and the tokens up to its start from the first one on."""

    def position(self, number: int) -> int:
        """Return the sample at which batch `number` (from 0) starts."""
        starts, _, _ = self._found
        while len(starts) <= number:
            self._find()
        return starts[number]

    def count_before(self, sample: int) -> int:
        """Return how many batches start before `sample`; none is searched far after the run."""
        (starts, _, tokens), run, first = self._found, self.horizon.max_duration, self.first
        most = run.amount - first.batch if run.unit is TimeUnit.BATCH else math.inf
        most_tokens = run.amount - first.token if run.unit is TimeUnit.TOKEN else math.inf
        if self.horizon.end_sample is not None:
            sample = min(sample, max(self.horizon.end_sample, first.sample) + 1)
        while not starts or (
            starts[-1] < sample and len(starts) <= most and tokens[-1] <= most_tokens
        ):
            self._find()
        return bisect_left(starts, sample)

    def size_of(self, number: int) -> int:
        """Return the samples in batch `number`: fewer if `keep` cuts it at the end of an epoch."""
        start, (_, stops, _) = self.position(number), self._found
        return stops[number] - start

    def samples(self, count: int) -> int:
        """Return the samples of the first `count` batches."""
        self.position(count)
        starts, stops, _ = self._found
        return sum(stops[:count]) - sum(starts[:count])

    def spread(self, count: int | None) -> tuple[int, int]:
        """Return the fewest and the most samples of the first `count` batches that are not cut."""
        num_samples = self.horizon.dataset_num_samples
        assert num_samples is not None, "known with the lengths"
        if count is None:
            count = self.count_before(self.first.sample + num_samples)
        self.position(count)
        starts, stops, _ = self._found
        pairs = [*zip(starts[:count], stops[:count], strict=True)]
        is_cut = self.horizon.last_batch == "keep"
        sizes = [stop - start for start, stop in pairs if not is_cut or stop % num_samples]
        sizes = sizes or [stop - start for start, stop in pairs]
        return min(sizes), max(sizes)

    def later(self, number: int) -> TokenBatches:
        """Return the batches from batch `number` on, as far as they are found."""
        later = TokenBatches(self.horizon, self.timestamp(number), self.size)
        starts, stops, tokens = self._found
        later._found[0].extend(starts[number:])
        later._found[1].extend(stops[number:])
        later._found[2].extend(one - tokens[number] for one in tokens[number:])
        return later

    def tokens(self, number: int) -> int:
        """Return the tokens from the first batch up to batch `number`."""
        self.position(number)
        return self._found[2][number]

    def _find(self) -> None:
        """Find the next batch."""
        lengths, num_samples = self.horizon.lengths, self._epoch
        starts, stops, tokens = self._found
        assert lengths is not None, "made for lengths"
        start = stops[-1] if stops else self.first.sample
        stop = start + lengths.count(start, self.size)
        if num_samples is not None:
            end = start - start % num_samples + num_samples
            if stop > end and self.horizon.last_batch == "keep":
                stop = end
            elif stop > end and start % num_samples:  # dropped
                start, stop = end, end + lengths.count(end, self.size)
        tokens.append(tokens[-1] + lengths.tokens(starts[-1], start) if tokens else 0)
        starts.append(start)
        stops.append(stop)
