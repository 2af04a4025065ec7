"""`Timer`: the one mutable clock of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias, final

from stretto.errors import TimeError
from stretto.timing.grammar import TimeUnit, parse_unit, whole
from stretto.timing.horizon import Horizon
from stretto.timing.time import Time
from stretto.timing.timestamp import NANOSECONDS, Timestamp, nanoseconds

PeriodClock: TypeAlias = Callable[[Timestamp, TimeUnit], Time]
"""Returns the time since the start of the period in a unit; for `dur`, as a fraction."""


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
        horizon: the length of the run and of an epoch; without it, only counters work.
        clock: a monotonic clock in nanoseconds.
    """

    __slots__ = ("_clock", "_horizon", "_mark", "_period", "timestamp")

    def __init__(
        self, horizon: Horizon | None = None, *, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._horizon = horizon
        self._clock = clock
        self.timestamp = Timestamp()
        """The present clock."""
        self._mark = clock()
        self._period: PeriodClock | None = None

    @classmethod
    def at(
        cls,
        timestamp: Timestamp,
        horizon: Horizon | None = None,
        *,
        period: PeriodClock | None = None,
    ) -> Timer:
        """Return a timer set to `timestamp`, in a period of the run or in the run itself.

        >>> Timer.at(Timestamp(batch=5)).batch
        5
        """
        timer = cls(horizon, clock=int)
        timer.timestamp = timestamp
        timer._period = period
        return timer

    def start(self) -> None:
        """Measure wall time from now on; time since the last update does not count."""
        self._mark = self._clock()

    def update(self, *, samples: int, tokens: int = 0, seconds: float | None = None) -> None:
        """Count one finished batch.

        Args:
            samples: samples of the batch, over all ranks.
            tokens: tokens of the batch, over all ranks.
            seconds: wall time since the last update; by default, measured by the clock.

        Raises:
            TimeError: a count is negative or not whole, or the seconds are not a length of time.
        """
        if type(samples) is not int or type(tokens) is not int or samples < 0 or tokens < 0:
            samples, tokens = _counts(samples=samples, tokens=tokens)
        if seconds is None:
            # A mark in the future: another rank's clock has measured more time than this one.
            passed = self._clock() - self._mark
            passed = passed if passed > 0 else 0
        else:
            passed = nanoseconds(seconds)
        self._mark += passed
        epoch, batch, sample, token, batch_, sample_, token_, run, job, epoch_ns, _ = self.timestamp
        # tuple.__new__ skips the keyword handling of a named tuple: 0.3 us instead of 0.6.
        self.timestamp = tuple.__new__(
            Timestamp,
            (
                epoch, batch + 1, sample + samples, token + tokens,
                batch_ + 1, sample_ + samples, token_ + tokens,
                run + passed, job + passed, epoch_ns + passed, passed,
            ),
        )  # fmt: skip

    def seconds_since_update(self) -> float:
        """Return the wall time since the last update; rank 0 sends its value to the others.

        >>> Timer(clock=iter([0, 1_500_000_000]).__next__).seconds_since_update()
        1.5
        """
        return max(0, self._clock() - self._mark) / NANOSECONDS

    def skip(self, *, samples: int, tokens: int = 0) -> None:
        """Skip samples without a batch, such as those that `last_batch="drop"` leaves out.

        >>> timer = Timer()
        >>> timer.skip(samples=4)
        >>> timer.sample, timer.batch
        (4, 0)

        Raises:
            TimeError: a count is negative or not whole.
        """
        samples, tokens = _counts(samples=samples, tokens=tokens)
        now = self.timestamp
        self.timestamp = now._replace(
            sample=now.sample + samples,
            token=now.token + tokens,
            sample_in_epoch=now.sample_in_epoch + samples,
            token_in_epoch=now.token_in_epoch + tokens,
        )

    def end_epoch(self, *, samples: int = 0, tokens: int = 0) -> None:
        """Begin the next epoch.

        Under `last_batch="drop"` the rest of the old one is skipped.

        Args:
            samples: the part of the last batch that belongs to the new epoch
                (`last_batch="carry"`).
            tokens: the tokens of that part.

        Raises:
            TimeError: the epoch does not have as many samples as the data set.
        """
        samples, tokens = _counts(samples=samples, tokens=tokens)
        seen, horizon = self.timestamp.sample_in_epoch - samples, self._horizon
        if seen < 0 or tokens > self.timestamp.token_in_epoch:
            raise _uneven(f"with {samples} samples and {tokens} tokens over", "it has had fewer")
        num_samples = None if horizon is None else horizon.dataset_num_samples
        if horizon is not None and num_samples is not None and seen != num_samples:
            if horizon.last_batch != "drop" or seen > num_samples:
                raise _uneven(f"after {seen} samples", f"the data set has {num_samples}")
            left = num_samples - seen
            self.skip(samples=left, tokens=left * (horizon.tokens_per_sample or 0))
        self.timestamp = self.timestamp._replace(
            epoch=self.timestamp.epoch + 1,
            batch_in_epoch=0,
            sample_in_epoch=samples,
            token_in_epoch=tokens,
            epoch_nanoseconds=0,
        )

    @property
    def horizon(self) -> Horizon | None:
        """The facts that fractions refer to."""
        return self._horizon

    @horizon.setter
    def horizon(self, horizon: Horizon) -> None:
        self._horizon = horizon

    @property
    def epoch(self) -> int:
        """Whole epochs finished."""
        return self.timestamp.epoch

    @property
    def batch(self) -> int:
        """Batches finished."""
        return self.timestamp.batch

    @property
    def sample(self) -> int:
        """Samples passed."""
        return self.timestamp.sample

    @property
    def token(self) -> int:
        """Tokens passed."""
        return self.timestamp.token

    @property
    def batch_in_epoch(self) -> int:
        """Batches finished in this epoch."""
        return self.timestamp.batch_in_epoch

    @property
    def sample_in_epoch(self) -> int:
        """Samples passed in this epoch."""
        return self.timestamp.sample_in_epoch

    @property
    def token_in_epoch(self) -> int:
        """Tokens passed in this epoch."""
        return self.timestamp.token_in_epoch

    def get(self, unit: str) -> Time:
        """Return the position of the run in `unit`, with fractions of epochs and of the run.

        >>> Timer.at(Timestamp(sample=5), Horizon("10sp")).get("dur")
        Time('0.5dur')

        Raises:
            TimeError: the unit is `dur` and the timer has no horizon.
        """
        found = parse_unit(unit)
        if self._horizon is None and found is not TimeUnit.DURATION:
            return self.timestamp.get(found)
        return self._known_horizon().position(self.timestamp, found)

    def get_elapsed_duration(self) -> float:
        """Return the fraction of the run that has passed, in [0, 1].

        In a run of epochs over data of unknown size, it changes only when an epoch ends.

        Raises:
            TimeError: the timer has no horizon.
        """
        return self._known_horizon().elapsed(self.timestamp)

    def get_current_period_time(self, unit: str = "dur") -> Time:
        """Return how long the present period has lasted, in `unit`; in `dur` which part of it.

        For a schedule inside `Periods`, it is that period; otherwise the period is the run.

        >>> Timer.at(Timestamp(batch=5), Horizon("20ba")).get_current_period_time()
        Time('0.25dur')

        Raises:
            ConversionError: the start or the end of the period is unknown in this unit.
            TimeError: the unit is `dur` and the timer has no horizon.
        """
        if self._period is None:
            return self.get(unit)
        return self._period(self.timestamp, parse_unit(unit))

    def get_current_period_frac_elapsed(self) -> float:
        """Return the elapsed fraction of the present period, in [0, 1].

        Raises:
            ConversionError: the end of the period is unknown.
            TimeError: the timer has no horizon.
        """
        if self._period is None:
            return self.get_elapsed_duration()
        return min(1.0, max(0.0, float(self._period(self.timestamp, TimeUnit.DURATION).amount)))

    def _known_horizon(self) -> Horizon:
        if self._horizon is None:
            why, instead = "this timer has no horizon", "write Timer(Horizon(max_duration, ...))"
            raise TimeError.cannot("know the fraction of the run", why=why, instead=instead)
        return self._horizon

    def state_dict(self) -> dict[str, int]:
        """Return the counters as a record that JSON keeps exactly."""
        return self.timestamp.to_state()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from saved counters; the wall time of the job starts again at 0.

        Raises:
            TimeError: the record is not one that `state_dict` wrote, or its epochs are not those
                of this run's data set.
        """
        saved = Timestamp.from_state(state)
        num_samples = None if self._horizon is None else self._horizon.dataset_num_samples
        if num_samples and saved.sample != saved.epoch * num_samples + saved.sample_in_epoch:
            why = f"the data set has {num_samples} samples, and had another number then"
            instead = "resume with the data that the run was saved with"
            raise TimeError.bad("sample", saved.sample, why, instead)
        self.timestamp = saved._replace(job_nanoseconds=0)
        self.start()

    def __repr__(self) -> str:
        return f"<Timer at {self.timestamp}>"


def _counts(**given: object) -> Iterator[int]:
    """Return the counts as ints; refuse all but whole numbers of at least 0."""
    for name, value in given.items():
        count = whole(value)
        if count is None or count < 0:
            raise TimeError.bad(name, value, "it is not an integer of at least 0", "pass a count")
        yield count


def _uneven(where: str, why: str) -> TimeError:
    instead = "call timer.skip(samples=...) for samples left out, end_epoch(samples=...) for later"
    return TimeError.cannot(f"end the epoch {where}", why=why, instead=instead)
