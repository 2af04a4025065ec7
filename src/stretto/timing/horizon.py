"""`Horizon`: how long the run is and what an epoch is; the only converter of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter
from typing import NoReturn, cast, final

from stretto.errors import ConversionError, cannot
from stretto.timing.batch_sizes import BatchSizes, ConstantBatchSize, LastBatch
from stretto.timing.conversion import Facts, check_count, check_run, rounded
from stretto.timing.time import Number, Time, TimeLike
from stretto.timing.timestamp import NANOSECONDS, Timestamp
from stretto.timing.unit import TimeUnit, parse_unit


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """One counter of the clock, read as an integer number of ticks.

    Comparing ticks is exact and fast; `scale` says how many of them one unit has. The axis of
    epochs over a data set of n samples ticks in samples, that of seconds in nanoseconds.
    """

    unit: TimeUnit
    """The unit that the axis measures."""
    read: Callable[[Timestamp], int]
    """The ticks passed at a timestamp."""
    scale: Fraction
    """Ticks in one unit."""


@final
class Horizon:
    """The static facts of a run: its length, its data and its batch sizes. Frozen.

    >>> horizon = Horizon("2ep", dataset_num_samples=100, batch_sizes=32)
    >>> horizon.elapsed(Timestamp(epoch=1, sample=150, sample_in_epoch=50))
    0.75
    >>> horizon.convert("0.5dur", "ba")
    Time('4ba')

    Args:
        max_duration: the length of the run, in any unit but `dur`.
        dataset_num_samples: samples in an epoch; None where it is not known.
        dataset_num_tokens: tokens in an epoch; None where it is not known.
        tokens_per_sample: tokens in each sample, where all have equally many.
        batch_sizes: a constant size, or a plan that knows where batches begin; None where the
            sizes are decided during the run.
        last_batch: what happens where an epoch ends inside a batch.

    Raises:
        ConversionError: a count is not positive, or two of them contradict each other.
        TimeError: `max_duration` is not a time.
    """

    __slots__ = ("_axes", "_end", "_facts", "_last_batch")
    _axes: dict[TimeUnit, Axis]
    _end: Fraction
    _facts: Facts
    _last_batch: LastBatch

    def __init__(
        self,
        max_duration: TimeLike,
        *,
        dataset_num_samples: int | None = None,
        dataset_num_tokens: int | None = None,
        tokens_per_sample: int | None = None,
        batch_sizes: int | BatchSizes | None = None,
        last_batch: LastBatch = "keep",
    ) -> None:
        run = check_run(Time(max_duration))
        check_count("dataset_num_samples", dataset_num_samples)
        check_count("dataset_num_tokens", dataset_num_tokens)
        check_count("tokens_per_sample", tokens_per_sample)
        check_last_batch(last_batch)
        tokens = _tokens(dataset_num_samples, dataset_num_tokens, tokens_per_sample)
        if isinstance(batch_sizes, (int, float)):
            batch_sizes = ConstantBatchSize(batch_sizes, dataset_num_samples, last_batch)
        facts = Facts(run, dataset_num_samples, tokens, tokens_per_sample, batch_sizes)
        axes = _axes(dataset_num_samples)
        axes[TimeUnit.DURATION] = axes[run.unit]
        for name, value in (("_facts", facts), ("_axes", axes), ("_last_batch", last_batch)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_end", self.ticks(run, axes[run.unit]))

    @property
    def max_duration(self) -> Time:
        """The length of the run, as given."""
        return cast(Time, self._facts.max_duration)

    @property
    def dataset_num_samples(self) -> int | None:
        """Samples in an epoch, or None."""
        return self._facts.num_samples

    @property
    def dataset_num_tokens(self) -> int | None:
        """Tokens in an epoch, or None."""
        return self._facts.num_tokens

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens in each sample where all have equally many, or None."""
        return self._facts.tokens_per_sample

    @property
    def batch_sizes(self) -> BatchSizes | None:
        """Where batches begin, or None where that is decided during the run."""
        return self._facts.batch_sizes

    @property
    def last_batch(self) -> LastBatch:
        """What happens where an epoch ends inside a batch."""
        return self._last_batch

    @property
    def end_sample(self) -> int | None:
        """The position at which the run ends, where its length is a number of samples.

        >>> Horizon("1.5ep", dataset_num_samples=25).end_sample
        38
        """
        run, counts = self.max_duration, {TimeUnit.SAMPLE}
        if self.dataset_num_samples is not None:
            counts.add(TimeUnit.EPOCH)
        if self.tokens_per_sample is not None:
            counts.add(TimeUnit.TOKEN)
        return math.ceil(self._facts.amount(run, TimeUnit.SAMPLE)) if run.unit in counts else None

    def elapsed(self, timestamp: Timestamp) -> float:
        """Return the fraction of the run that has passed, in [0, 1]."""
        passed = self._axes[TimeUnit.DURATION].read(timestamp)
        return min(1.0, passed * self._end.denominator / self._end.numerator)

    def is_done(self, timestamp: Timestamp) -> bool:
        """Return whether the run has reached its length."""
        return self._axes[TimeUnit.DURATION].read(timestamp) >= self._end

    def axis(self, unit: str) -> Axis:
        """Return the counter that measures `unit`; for `dur` that of the run's own length."""
        return self._axes[parse_unit(unit)]

    def ticks(self, time: Time, axis: Axis) -> Fraction:
        """Return where `time`, measured from the start of the run, lies on `axis`, exactly.

        Raises:
            ConversionError: a fact is missing.
        """
        ticks = self._facts.amount(time, axis.unit) * axis.scale
        if axis.unit is TimeUnit.EPOCH and axis.scale == 1 and ticks.denominator != 1:
            if self.dataset_num_samples is None:
                raise ConversionError(
                    cannot(
                        f"tell when {time} has passed",
                        why="part of an epoch needs the number of samples in the data set, "
                        "which is not known",
                        instead="pass dataset_num_samples, or say it in 'sp', 'ba' or whole epochs",
                    )
                )
        return ticks

    def common_axis(self, times: Iterable[Time]) -> Axis:
        """Return one axis on which all of `times` can be placed exactly.

        Times of one unit keep their own counter; mixed ones meet on samples or on tokens.

        Raises:
            ConversionError: they can't be brought to one unit before the run.
        """
        times = list(times)
        units = {self._axes[time.unit].unit for time in times}
        if len(units) <= 1:
            return self._axes[units.pop() if units else TimeUnit.DURATION]
        refusal = None
        for unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN):
            try:
                for time in times:
                    self._facts.amount(time, unit)
            except ConversionError as error:
                refusal = refusal or error
            else:
                return self._axes[unit]
        raise cast(ConversionError, refusal)

    def convert(self, time: TimeLike, unit: str) -> Time:
        """Return `time` in `unit`; what must come out whole is rounded up.

        Raises:
            ConversionError: a fact is missing; the message names it.
        """
        target = parse_unit(unit)
        return rounded(self._facts.amount(Time(time), target), target)

    def position(self, timestamp: Timestamp, unit: str) -> Time:
        """Return where `timestamp` stands in `unit`, fractions of epochs and of the run included.

        >>> Horizon("2ep", dataset_num_samples=8).position(Timestamp(sample=4), "dur")
        Time('0.25dur')
        """
        target = parse_unit(unit)
        axis = self._axes[target]
        passed = Fraction(axis.read(timestamp))
        if target is TimeUnit.DURATION:
            return Time(passed / self._end, target)
        return Time(passed / axis.scale, target)

    def with_batch_sizes(self, batch_sizes: int | BatchSizes | None) -> Horizon:
        """Return this horizon with other batch sizes."""
        return self._but(batch_sizes=batch_sizes)

    def scaled(self, ratio: Number) -> Horizon:
        """Return this horizon with the run `ratio` times as long, rounded up to whole counts."""
        run = self.max_duration
        exact = Time(1, TimeUnit.DURATION) * ratio
        return self._but(max_duration=rounded(run.amount * exact.amount, run.unit))

    def _but(self, **changes: object) -> Horizon:
        facts: dict[str, object] = {
            "max_duration": self.max_duration,
            "dataset_num_samples": self.dataset_num_samples,
            "dataset_num_tokens": self.dataset_num_tokens,
            "tokens_per_sample": self.tokens_per_sample,
            "batch_sizes": self.batch_sizes,
            "last_batch": self.last_batch,
        }
        return Horizon(**(facts | changes))  # type: ignore[arg-type]

    def _key(self) -> tuple[Facts, LastBatch]:
        return self._facts, self._last_batch

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Horizon) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Horizon cannot be changed: tried to set {name!r}")

    def __repr__(self) -> str:
        sizes = self.batch_sizes
        shown = sizes.size if isinstance(sizes, ConstantBatchSize) else sizes
        facts = {
            "dataset_num_samples": self.dataset_num_samples,
            "dataset_num_tokens": self.dataset_num_tokens,
            "tokens_per_sample": self.tokens_per_sample,
            "batch_sizes": shown,
            "last_batch": None if self.last_batch == "keep" else self.last_batch,
        }
        known = "".join(f", {name}={fact!r}" for name, fact in facts.items() if fact is not None)
        return f"Horizon('{self.max_duration}'{known})"


def check_last_batch(value: object) -> None:
    """Refuse what is not one of the three ways to end an epoch."""
    if value not in ("keep", "drop", "carry"):
        raise ConversionError(
            cannot(
                f"use last_batch={value!r}",
                why="there is no such way to end an epoch",
                instead="write 'keep', 'drop' or 'carry'",
            )
        )


def _tokens(num_samples: int | None, num_tokens: int | None, each: int | None) -> int | None:
    if num_samples is None or each is None:
        return num_tokens
    if num_tokens is not None and num_tokens != num_samples * each:
        raise ConversionError(
            cannot(
                f"use dataset_num_tokens={num_tokens}",
                why=f"{num_samples} samples of {each} tokens are {num_samples * each}",
                instead="leave out dataset_num_tokens or tokens_per_sample",
            )
        )
    return num_samples * each


def _axes(num_samples: int | None) -> dict[TimeUnit, Axis]:
    def axis(unit: TimeUnit, counter: str, scale: int = 1) -> Axis:
        return Axis(unit, attrgetter(counter), Fraction(scale))

    if num_samples is None:
        epochs = axis(TimeUnit.EPOCH, "epoch")
    else:
        epochs = axis(TimeUnit.EPOCH, "sample", num_samples)
    return {
        TimeUnit.EPOCH: epochs,
        TimeUnit.BATCH: axis(TimeUnit.BATCH, "batch"),
        TimeUnit.SAMPLE: axis(TimeUnit.SAMPLE, "sample"),
        TimeUnit.TOKEN: axis(TimeUnit.TOKEN, "token"),
        TimeUnit.SECOND: axis(TimeUnit.SECOND, "run_nanoseconds", NANOSECONDS),
    }
