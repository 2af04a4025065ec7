"""The clock of a run, counted one sample at a time: what the closed forms are compared with."""

from __future__ import annotations

from fractions import Fraction

from stretto.timing import Horizon, Timestamp, TimeUnit


def count_by_hand(horizon: Horizon, batch_size: int, *, batches: int = 10_000) -> list[Timestamp]:
    """Return the clock at the start and after each batch, counted one sample at a time.

    A reference for fast code: slow, but obviously right. Each batch takes one second of wall time.

    >>> horizon = Horizon("2ep", dataset_num_samples=5, last_batch="carry")
    >>> [(now.sample, now.epoch) for now in count_by_hand(horizon, 4)]
    [(0, 0), (4, 0), (8, 1), (10, 2)]

    Args:
        horizon: the run: its length, what an epoch is, and what happens at its end.
        batch_size: samples in a batch.
        batches: the number of batches after which to stop.
    """
    num_samples, mode = horizon.dataset_num_samples, horizon.last_batch
    clock = _HandClock(num_samples, horizon.tokens_per_sample or 0)
    run = horizon.max_duration
    is_cut_at_the_end = mode != "drop" and run.unit not in {TimeUnit.BATCH, TimeUnit.SECOND}
    counted = [Timestamp()]
    while clock.passed(run.unit) < run.amount and len(counted) <= batches:
        epoch = clock.epoch
        for _ in range(batch_size):
            clock.count_sample()
            if mode == "keep" and clock.epoch != epoch:
                break
            if is_cut_at_the_end and clock.passed(run.unit) >= run.amount:
                break
        if mode == "drop" and num_samples and clock.epoch == epoch:
            while 0 < num_samples - clock.sample_in_epoch < batch_size:
                clock.count_sample()
        clock.end_batch(is_epoch_over=clock.epoch != epoch)
        counted.append(clock.read())
    return counted


class _HandClock:
    """A clock that only counts single samples."""

    def __init__(self, num_samples: int | None, tokens: int) -> None:
        self.num_samples, self.tokens = num_samples, tokens
        self.epoch = self.batch = self.sample = self.token = self.seconds = 0
        self.batch_in_epoch = self.sample_in_epoch = self.token_in_epoch = self.since_epoch = 0

    def count_sample(self) -> None:
        self.sample += 1
        self.sample_in_epoch += 1
        self.token += self.tokens
        self.token_in_epoch += self.tokens
        if self.sample_in_epoch == self.num_samples:
            self.epoch += 1
            self.sample_in_epoch = self.token_in_epoch = 0

    def end_batch(self, *, is_epoch_over: bool) -> None:
        self.batch += 1
        self.seconds += 1
        self.batch_in_epoch = 0 if is_epoch_over else self.batch_in_epoch + 1
        self.since_epoch = 0 if is_epoch_over else self.since_epoch + 1

    def passed(self, unit: TimeUnit) -> Fraction:
        if unit is TimeUnit.EPOCH:
            return self.epoch + Fraction(self.sample_in_epoch, self.num_samples or 10**9)
        counts = {TimeUnit.BATCH: self.batch, TimeUnit.SAMPLE: self.sample}
        return Fraction({**counts, TimeUnit.TOKEN: self.token}.get(unit, self.seconds))

    def read(self) -> Timestamp:
        second = 10**9
        return Timestamp(
            epoch=self.epoch,
            batch=self.batch,
            sample=self.sample,
            token=self.token,
            batch_in_epoch=self.batch_in_epoch,
            sample_in_epoch=self.sample_in_epoch,
            token_in_epoch=self.token_in_epoch,
            run_nanoseconds=self.seconds * second,
            job_nanoseconds=self.seconds * second,
            epoch_nanoseconds=self.since_epoch * second,
            batch_nanoseconds=second,
        )
