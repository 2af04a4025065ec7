"""`Horizon`: the length of the run and of an epoch; converts all units."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, final, get_args

from stretto.errors import Argument, ConversionError
from stretto.timing.batch_sizes import BatchSizes, EqualBatches, LastBatch
from stretto.timing.conversion import Facts, checked_count, read_run, rounded
from stretto.timing.grammar import TimeUnit, exact, parse_unit
from stretto.timing.time import Number, Time, TimeLike
from stretto.timing.timestamp import Axis, Timestamp, axes


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Horizon:
    """The static facts of a run: its length, its data and its batch sizes. Frozen.

    >>> horizon = Horizon("2ep", dataset_num_samples=100, batch_sizes=32)
    >>> horizon.elapsed(Timestamp(epoch=1, sample=150, sample_in_epoch=50))
    0.75
    >>> horizon.convert("0.5dur", "ba")
    Time('4ba')

    Args:
        max_duration: the length of the run, in any unit but `dur`.
        dataset_num_samples: samples in an epoch; None if unknown.
        dataset_num_tokens: tokens in an epoch; None if unknown.
        tokens_per_sample: tokens in each sample, if all have equally many.
        batch_sizes: a constant size, or a plan that knows where batches begin; None if sizes are
            decided during the run.
        last_batch: what happens if an epoch ends inside a batch.

    If `dataset_num_samples` is unknown, conversions between batches and samples assume one endless
    epoch.

    Raises:
        ConversionError: a count is not positive, or two of them contradict each other.
        BatchSizeError: the batch size is not positive, or no epoch can hold one batch.
        TimeError: `max_duration` is not a time.
    """

    max_duration: Time
    """The length of the run, as given."""
    dataset_num_samples: int | None
    """Samples in an epoch, or None."""
    dataset_num_tokens: int | None
    """Tokens in an epoch, or None."""
    tokens_per_sample: int | None
    """Tokens in each sample if all have equally many, else None."""
    batch_sizes: BatchSizes | None
    """Where batches begin; None if that is decided during the run."""
    last_batch: LastBatch
    """What happens if an epoch ends inside a batch."""
    end_sample: int | None = field(compare=False)
    """The position at which the run ends; None if its length is no number of samples.

    >>> Horizon("1.5ep", dataset_num_samples=25).end_sample
    38
    """
    _facts: Facts = field(compare=False)
    _axes: dict[TimeUnit, Axis] = field(compare=False)
    _passed: Callable[[Timestamp], int] = field(compare=False)
    _end: Fraction = field(compare=False)
    _end_tick: int = field(compare=False)

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
        run = read_run(max_duration)
        samples = checked_count("dataset_num_samples", dataset_num_samples)
        tokens = checked_count("dataset_num_tokens", dataset_num_tokens)
        each = checked_count("tokens_per_sample", tokens_per_sample)
        if last_batch not in get_args(LastBatch):
            instead = "write 'keep', 'drop' or 'carry'"
            raise ConversionError.bad("last_batch", last_batch, "there is no such word", instead)
        facts = Facts(run, samples, _tokens(samples, tokens, each), each)
        sized, found = facts.with_batch_sizes(batch_sizes, last_batch), axes(samples, run.unit)
        for name, value in {
            "max_duration": run,
            "dataset_num_samples": samples,
            "dataset_num_tokens": facts.num_tokens,
            "tokens_per_sample": each,
            "batch_sizes": sized.batch_sizes,
            "last_batch": last_batch,
            "end_sample": facts.end_sample,
            "_facts": sized,
            "_axes": found,
            "_passed": found[run.unit].read,
        }.items():
            object.__setattr__(self, name, value)
        end = self.ticks(run, found[run.unit])
        object.__setattr__(self, "_end", end)
        # Counters are whole numbers, so they reach the end at the next whole tick.
        object.__setattr__(self, "_end_tick", math.ceil(end))

    def elapsed(self, timestamp: Timestamp) -> float:
        """Return the fraction of the run that has passed, in [0, 1].

        In a run of epochs over data of unknown size, only whole epochs count.

        >>> Horizon("8ba").elapsed(Timestamp(batch=2))
        0.25
        """
        end = self._end
        return min(1.0, self._passed(timestamp) * end.denominator / end.numerator)

    def is_done(self, timestamp: Timestamp) -> bool:
        """Return whether the run has reached its length.

        >>> Horizon("8ba").is_done(Timestamp(batch=8))
        True
        """
        return self._passed(timestamp) >= self._end_tick

    def axis(self, unit: str) -> Axis:
        """Return the counter that measures `unit`; for `dur` that of the run's own length."""
        return self._axes[parse_unit(unit)]

    def ticks(self, time: Time, axis: Axis) -> Fraction:
        """Return the exact position on `axis` of `time` since the start of the run.

        Raises:
            ConversionError: a fact is missing.
        """
        return self.ticks_of(time.amount, time.unit, axis)

    def ticks_of(self, amount: Fraction, unit: TimeUnit, axis: Axis) -> Fraction:
        """Return the same for any amount, such as half a sample.

        Raises:
            ConversionError: a fact is missing.
        """
        ticks = self._facts.amount_of(amount, unit, axis.unit) * axis.scale
        counts_epochs = axis.unit is TimeUnit.EPOCH and self.dataset_num_samples is None
        if counts_epochs and ticks.denominator != 1:
            what = f"know when {rounded(amount, unit)} has passed"
            raise _unknown_epoch(what, ", or write it in whole epochs")
        return ticks

    def check_moves(self, axis: Axis) -> None:
        """Refuse an `axis` of whole epochs for a value that changes with every batch.

        Data of unknown size only count whole epochs, so such a value would not change within one.

        Raises:
            ConversionError: the axis counts epochs, whose number of samples is not known.
        """
        if axis.unit is TimeUnit.EPOCH and self.dataset_num_samples is None:
            otherwise = ", or write max_duration and the times in 'sp', 'ba' or 'tok'"
            raise _unknown_epoch("know how much of an epoch has passed", otherwise)

    def common_axis(self, times: Iterable[Time]) -> Axis:
        """Return one axis on which all of `times` can be placed.

        Times of one unit use its own axis; mixed units use samples or tokens.

        >>> horizon = Horizon("2ep", dataset_num_samples=100, batch_sizes=32)
        >>> horizon.common_axis([Time("5ba"), Time("0.5dur")]).unit
        <TimeUnit.SAMPLE: 'sp'>

        Raises:
            ConversionError: they can't be converted to one unit before the run.
        """
        listed = tuple(times)
        units = {self._axes[time.unit].unit for time in listed}
        if len(units) <= 1:
            return self._axes[units.pop() if units else TimeUnit.DURATION]
        return self._axes[self._facts.meeting_unit(listed)]

    def convert(self, time: TimeLike, unit: str) -> Time:
        """Return `time` in `unit`; batches, samples and tokens are rounded up.

        Raises:
            ConversionError: a fact is missing; the message names it.
        """
        target = parse_unit(unit)
        return rounded(self._facts.amount(Time(time), target), target)

    def position(self, timestamp: Timestamp, unit: str) -> Time:
        """Return the position of `timestamp` in `unit`, with fractions of epochs and of the run.

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
        """Return this horizon with other batch sizes.

        >>> Horizon("100sp").with_batch_sizes(32).convert("2ba", "sp")
        Time('64sp')
        """
        if batch_sizes is self.batch_sizes:
            return self
        return self._like(self.max_duration, batch_sizes)

    def scaled(self, ratio: Number) -> Horizon:
        """Return this horizon with the run `ratio` times as long, rounded up to whole counts.

        It keeps a constant batch size, but no plan, which belongs to the old run.

        >>> Horizon("90ep", batch_sizes=32).scaled(0.5)
        Horizon('45ep', batch_sizes=32)
        """
        run = self.max_duration
        length = rounded(run.amount * exact(ratio), run.unit)
        sizes = self.batch_sizes
        return self._like(length, sizes.size if isinstance(sizes, EqualBatches) else None)

    def _like(self, max_duration: Time, batch_sizes: int | BatchSizes | None) -> Horizon:
        return Horizon(max_duration, **(self._given() | {"batch_sizes": batch_sizes}))

    def _given(self) -> dict[str, Any]:
        """The arguments after the first, as they were given."""
        given = {one.name: getattr(self, one.name) for one in fields(self)[1:6]}
        if isinstance(self.batch_sizes, EqualBatches):
            given["batch_sizes"] = self.batch_sizes.size
        return given

    def __repr__(self) -> str:
        known = {name: fact for name, fact in self._given().items() if fact not in (None, "keep")}
        shown_facts = "".join(f", {name}={fact!r}" for name, fact in known.items())
        return f"Horizon('{self.max_duration}'{shown_facts})"


def _unknown_epoch(what: str, otherwise: str) -> ConversionError:
    why = "the number of samples in the data set is not known"
    instead = ("set ", Argument("dataset_num_samples"), otherwise)
    return ConversionError.cannot(what, why=why, instead=instead)


def _tokens(num_samples: int | None, num_tokens: int | None, each: int | None) -> int | None:
    if num_samples is None or each is None:
        return num_tokens
    if num_tokens is not None and num_tokens != num_samples * each:
        why = f"{num_samples} samples of {each} tokens are {num_samples * each}"
        raise ConversionError.bad("dataset_num_tokens", num_tokens, why, "leave it out")
    return num_samples * each
