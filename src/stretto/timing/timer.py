"""`Timer`: the one mutable clock of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import final

from stretto.errors import TimeError, cannot
from stretto.timing.horizon import Horizon
from stretto.timing.time import Time
from stretto.timing.timestamp import NANOSECONDS, Timestamp
from stretto.timing.unit import TimeUnit, parse_unit


@final
class Timer:
    """Counts epochs, batches, samples, tokens and wall time; the training loop updates it.

    >>> timer = Timer(Horizon("2ep", dataset_num_samples=100))
    >>> timer.update(samples=60, tokens=6000)
    >>> timer.update(samples=40, tokens=4000)
    >>> timer.end_epoch()
    >>> timer.epoch, timer.batch, timer.sample, timer.sample_in_epoch
    (1, 2, 100, 0)
    >>> timer.get_elapsed_duration()
    0.5

    Args:
        horizon: the length of the run and of an epoch; left out, only counters work.
        clock: a monotonic clock in nanoseconds.
    """

    __slots__ = ("_clock", "_horizon", "_mark", "_now")

    def __init__(
        self, horizon: Horizon | None = None, *, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._horizon = horizon
        self._clock = clock
        self._now = Timestamp()
        self._mark = clock()

    @classmethod
    def at(cls, timestamp: Timestamp, horizon: Horizon | None = None) -> Timer:
        """Return a timer that stands at `timestamp`.

        >>> Timer.at(Timestamp(batch=5)).batch
        5
        """
        timer = cls(horizon, clock=int)
        timer._now = timestamp
        return timer

    def start(self) -> None:
        """Measure wall time from now on: what passed since the last update does not count."""
        self._mark = self._clock()

    def update(self, *, samples: int, tokens: int = 0, seconds: float | None = None) -> None:
        """Count one finished batch.

        Args:
            samples: samples of the batch, over all ranks.
            tokens: tokens of the batch, over all ranks.
            seconds: wall time since the last update; measured by the clock where left out.

        Raises:
            TimeError: a count is negative.
        """
        if samples < 0 or tokens < 0 or (seconds is not None and not 0 <= seconds < 1e12):
            raise _negative(samples=samples, tokens=tokens, seconds=seconds)
        if seconds is None:
            mark = self._clock()
            passed = mark - self._mark
            self._mark = mark
        else:
            passed = round(seconds * NANOSECONDS)
        epoch, batch, sample, token, batch_, sample_, token_, run, job, epoch_ns, _ = self._now
        # tuple.__new__ skips the keyword handling of a named tuple: 0.3 us instead of 0.6.
        self._now = tuple.__new__(
            Timestamp,
            (
                epoch, batch + 1, sample + samples, token + tokens,
                batch_ + 1, sample_ + samples, token_ + tokens,
                run + passed, job + passed, epoch_ns + passed, passed,
            ),
        )  # fmt: skip

    def skip(self, *, samples: int, tokens: int = 0) -> None:
        """Pass over samples without a batch, such as those that `last_batch="drop"` leaves out.

        >>> timer = Timer()
        >>> timer.skip(samples=4)
        >>> timer.sample, timer.batch
        (4, 0)

        Raises:
            TimeError: a count is negative.
        """
        if samples < 0 or tokens < 0:
            raise _negative(samples=samples, tokens=tokens)
        now = self._now
        self._now = now._replace(
            sample=now.sample + samples,
            token=now.token + tokens,
            sample_in_epoch=now.sample_in_epoch + samples,
            token_in_epoch=now.token_in_epoch + tokens,
        )

    def end_epoch(self, *, samples: int = 0, tokens: int = 0) -> None:
        """Begin the next epoch.

        Args:
            samples: the part of the last batch that belongs to the new epoch
                (`last_batch="carry"`).
            tokens: the tokens of that part.

        Raises:
            TimeError: the epoch does not have as many samples as the data set.
        """
        now, horizon = self._now, self._horizon
        num_samples = horizon.dataset_num_samples if horizon else None
        seen = now.sample_in_epoch - samples
        if horizon and num_samples is not None and seen != num_samples:
            if horizon.last_batch != "drop" or seen > num_samples:
                raise TimeError(
                    cannot(
                        f"end the epoch after {seen} samples",
                        why=f"the data set has {num_samples}",
                        instead="call timer.skip(samples=...) for those that were left out, "
                        "or correct dataset_num_samples",
                    )
                )
            self.skip(samples=num_samples - seen)
            now = self._now
        self._now = now._replace(
            epoch=now.epoch + 1,
            batch_in_epoch=0,
            sample_in_epoch=samples,
            token_in_epoch=tokens,
            epoch_nanoseconds=0,
        )

    @property
    def timestamp(self) -> Timestamp:
        """The clock as it stands now."""
        return self._now

    @property
    def horizon(self) -> Horizon | None:
        """The facts that fractions are taken from."""
        return self._horizon

    @property
    def epoch(self) -> int:
        """Whole epochs finished."""
        return self._now.epoch

    @property
    def batch(self) -> int:
        """Batches finished."""
        return self._now.batch

    @property
    def sample(self) -> int:
        """Samples passed."""
        return self._now.sample

    @property
    def token(self) -> int:
        """Tokens passed."""
        return self._now.token

    @property
    def batch_in_epoch(self) -> int:
        """Batches finished in this epoch."""
        return self._now.batch_in_epoch

    @property
    def sample_in_epoch(self) -> int:
        """Samples passed in this epoch."""
        return self._now.sample_in_epoch

    @property
    def token_in_epoch(self) -> int:
        """Tokens passed in this epoch."""
        return self._now.token_in_epoch

    def get(self, unit: str) -> Time:
        """Return where the run stands in `unit`, fractions of epochs and of the run included.

        >>> Timer.at(Timestamp(sample=5), Horizon("10sp")).get("dur")
        Time('0.5dur')

        Raises:
            TimeError: `dur` was asked of a timer without a horizon.
        """
        found = parse_unit(unit)
        if self._horizon is not None:
            return self._horizon.position(self._now, found)
        if found is TimeUnit.DURATION:
            raise _no_horizon()
        return self._now.get(found)

    def get_elapsed_duration(self) -> float:
        """Return the fraction of the run that has passed, in [0, 1].

        Raises:
            TimeError: the timer has no horizon.
        """
        if self._horizon is None:
            raise _no_horizon()
        return self._horizon.elapsed(self._now)

    def state_dict(self) -> dict[str, int]:
        """Return the counters as a record that JSON keeps exactly."""
        return self._now.to_state()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from saved counters; the wall time of the job starts again at 0.

        Raises:
            TimeError: the record is not one that `state_dict` wrote.
        """
        self._now = Timestamp.from_state(state)._replace(job_nanoseconds=0)
        self.start()

    def __repr__(self) -> str:
        return f"<Timer at {self._now}>"


def _negative(**counts: float | None) -> TimeError:
    given = ", ".join(f"{name}={count}" for name, count in counts.items() if count is not None)
    return TimeError(
        cannot(
            f"move the clock by {given}",
            why="it only goes forward",
            instead="pass counts of at least 0",
        )
    )


def _no_horizon() -> TimeError:
    return TimeError(
        cannot(
            "tell the fraction of the run",
            why="this timer does not know how long the run is",
            instead="write Timer(Horizon(max_duration, ...))",
        )
    )
