"""`Timer`: the one mutable clock of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Self, TypeAlias, final

from stretto.errors import TimeError, shown
from stretto.timing.epochs import advance, next_epoch
from stretto.timing.grammar import TimeUnit, checked_whole, parse_unit
from stretto.timing.horizon import Horizon
from stretto.timing.time import Time
from stretto.timing.timestamp import NANOSECONDS, Timestamp, nanoseconds

PeriodClock: TypeAlias = Callable[[Timestamp, TimeUnit], Time]
"""Returns the time since the start of the period in a unit; for `dur`, as a fraction."""


class _PeriodTime(Time):
    """The part of a period that has passed; read in the unit of what it is compared with."""

    __slots__ = ("_read",)
    _read: Callable[[TimeUnit], Time]

    def __new__(cls, read: Callable[[TimeUnit], Time]) -> Self:
        found = object.__new__(cls)
        object.__setattr__(found, "_read", read)
        return found

    @property
    def _amount(self) -> Fraction:  # type: ignore[override]
        return self._read(TimeUnit.DURATION).amount

    @property
    def _unit(self) -> TimeUnit:  # type: ignore[override]
        return TimeUnit.DURATION

    def _excess(self, other: Time | int) -> Fraction:
        # Python asks the subclass first, on whichever side of a comparison it stands.
        unit = other.unit if isinstance(other, Time) else TimeUnit.DURATION
        return self._read(unit)._excess(other)


@final
class Timer:
    """Counts epochs, batches, samples, tokens and wall time; the training loop moves it.

    >>> timer = Timer(Horizon("2ep", dataset_num_samples=100))
    >>> timer.update(60, tokens=6000)
    >>> timer.update(40, tokens=4000)
    >>> timer.epoch, timer.batch, timer.sample, timer.timestamp.sample_in_epoch
    (1, 2, 100, 0)
    >>> timer.get_elapsed_duration()
    0.5

    Args:
        horizon: the length of the run and of an epoch.
        clock: a monotonic clock in nanoseconds.
    """

    __slots__ = ("_mark", "_period", "clock", "horizon", "on_fraction", "timestamp")

    def __init__(self, horizon: Horizon, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.horizon = horizon
        """The facts that fractions refer to, and where epochs end."""
        self.timestamp = Timestamp()
        """The present clock."""
        self.clock = clock
        """A monotonic clock in nanoseconds; `start` goes on with another one."""
        self._mark = clock()
        self._period: PeriodClock | None = None
        self.on_fraction: Callable[[], object] | None = None
        """Called when a fraction of the run or period is read; None: nothing is."""

    @classmethod
    def at(
        cls, timestamp: Timestamp, horizon: Horizon, *, period: PeriodClock | None = None
    ) -> Timer:
        """Return a timer set to `timestamp`, in a period of the run or in the run itself.

        >>> Timer.at(Timestamp(batch=5), Horizon("9ba")).batch
        5
        """
        timer = cls(horizon, clock=int)
        timer.timestamp = timestamp
        timer._period = period
        return timer

    def start(self) -> None:
        """Measure wall time from now on; time since the last update does not count."""
        self._mark = self.clock()

    def update(
        self,
        samples: int,
        *,
        tokens: int | None = None,
        seconds: float | None = None,
        tokens_of_last: Callable[[int], int] | None = None,
        next_size: int | None = None,
    ) -> None:
        """Count one finished batch, and the epochs that end in it if their length is known.

        Args:
            samples: samples of the batch, over all ranks.
            tokens: tokens of the batch, over all ranks; by default, `tokens_per_sample` each, or
                what the lengths of its samples say.
            seconds: wall time since the last update; by default, measured by the clock.
            tokens_of_last: returns the tokens of the batch's last samples, if it is carried into
                the next epoch; by default, they are their share of all tokens, rounded down.
            next_size: the samples of the next batch of the same decision; by default, `samples`.

        Raises:
            TimeError: a count is negative or not whole, or the seconds are not a length of time.
        """
        if type(samples) is not int or samples < 0:
            samples = _count("samples", samples)
        if tokens is not None and (type(tokens) is not int or tokens < 0):
            tokens = _count("tokens", tokens)
        if seconds is None:
            # A mark in the future: another rank's clock has measured more time than this one.
            passed = self.clock() - self._mark
            passed = passed if passed > 0 else 0
        else:
            passed = nanoseconds(seconds)
        self.timestamp = advance(
            self.horizon,
            self.timestamp,
            samples,
            tokens=tokens,
            nanoseconds=passed,
            tokens_of_last=tokens_of_last,
            next_size=next_size,
        )
        self._mark += passed

    def seconds_since_update(self) -> float:
        """Return the wall time since the last update; rank 0 sends its value to the others.

        >>> clock = iter([0, 1_500_000_000]).__next__
        >>> Timer(Horizon("9ba"), clock=clock).seconds_since_update()
        1.5
        """
        return max(0, self.clock() - self._mark) / NANOSECONDS

    def end_epoch(self, *, carried: int = 0, tokens: int = 0, dropped: int = 0) -> None:
        """Begin the next epoch, and skip what is left of the present one.

        A batch ends epochs of known length by itself.

        Args:
            carried: the samples of the last batch that belong to the new epoch.
            tokens: the tokens of those samples.
            dropped: samples after the last batch, of an epoch of unknown length.

        Raises:
            TimeError: a count is negative or not whole, or the epoch has had fewer samples or
                tokens than are carried, or more than there are.
        """
        carried, tokens = _count("carried", carried), _count("tokens", tokens)
        dropped, now = _count("dropped", dropped), self.timestamp
        now = now._replace(
            sample=now.sample + dropped, sample_in_epoch=now.sample_in_epoch + dropped
        )
        seen, num_samples = now.sample_in_epoch - carried, self.horizon.dataset_num_samples
        if seen < 0 or tokens > now.token_in_epoch:
            raise _uneven(f"with {carried} samples and {tokens} tokens over", "it has had fewer")
        least = 0 if self.horizon.last_batch == "drop" else num_samples or 0
        if num_samples is not None and not least <= seen <= num_samples:
            raise _uneven(f"after {seen} samples", f"the data set has {num_samples}")
        self.timestamp = next_epoch(self.horizon, now, samples=carried, tokens=tokens)

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

    def get(self, unit: str) -> Time:
        """Return the position of the run in `unit`, with fractions of epochs and of the run.

        It is exact; the counters, such as `timer.epoch`, are whole numbers.

        >>> Timer.at(Timestamp(sample=5), Horizon("10sp")).get("dur")
        Time('0.5dur')
        """
        return self.horizon.position(self.timestamp, unit)

    def get_elapsed_duration(self) -> float:
        """Return the fraction of the run that has passed, in [0, 1].

        In a run of epochs over data of unknown size, it changes only when an epoch ends.
        """
        if self.on_fraction is not None:
            self.on_fraction()
        return self.horizon.elapsed(self.timestamp)

    def get_current_period_time(self, unit: str | None = None) -> Time:
        """Return how long the present period has lasted, in `unit`.

        For a schedule inside `Periods`, it is that period; otherwise the period is the run.
        Without a unit, it is the part of the period in `dur` that compares with times of any unit.

        >>> passed = Timer.at(Timestamp(batch=5), Horizon("20ba")).get_current_period_time()
        >>> passed, passed >= Time("25%"), passed >= Time("6ba")
        (Time('0.25dur'), True, False)

        Raises:
            ConversionError: the start or the end of the period is unknown in this unit; without a
                unit, it is raised where the time is read or compared.
        """
        period, now = self._period, self.timestamp
        if unit is None:
            return _PeriodTime(self.get if period is None else partial(period, now))
        return self.get(unit) if period is None else period(now, parse_unit(unit))

    def get_current_period_frac_elapsed(self) -> float:
        """Return the elapsed fraction of the present period, in [0, 1].

        Raises:
            ConversionError: the end of the period is unknown.
        """
        elapsed = self.get_elapsed_duration()
        if self._period is None:
            return elapsed
        return min(1.0, max(0.0, float(self._period(self.timestamp, TimeUnit.DURATION).amount)))

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
        num_samples = self.horizon.dataset_num_samples
        if num_samples and saved.sample != saved.epoch * num_samples + saved.sample_in_epoch:
            why = f"the data set has {num_samples} samples, and had another number then"
            instead = "resume with the data that the run was saved with"
            raise TimeError.bad("sample", saved.sample, why, instead)
        self.timestamp = saved._replace(job_nanoseconds=0)
        self.start()

    def __repr__(self) -> str:
        return f"<Timer at {self.timestamp}>"


def _count(name: str, value: object) -> int:
    """Return a count as an int; refuse all but whole numbers of at least 0."""
    return checked_whole(value, TimeError, f"use {name}={shown(value)}", "pass a count", least=0)


def _uneven(where: str, why: str) -> TimeError:
    instead = "pass carried=... for samples of the new epoch, dropped=... for samples left out"
    return TimeError.cannot(f"end the epoch {where}", why=why, instead=instead)
