"""`Horizon`: the length of the run and of an epoch, and exact conversion between all units."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, final, get_args, runtime_checkable

from stretto._foreign import knows_foreign
from stretto.errors import BatchSizeError, ConversionError, fact_text, shown
from stretto.timing.batches import EqualBatches, Lengths
from stretto.timing.grammar import NAMES, TimeUnit, checked_whole, exact, parse_unit
from stretto.timing.time import Number, Time, TimeLike, read_run, rounded
from stretto.timing.timestamp import Axis, Timestamp, axes

_EP, _BA, _SP, _TOK = TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN
_DUR, _SEC = TimeUnit.DURATION, TimeUnit.SECOND

_Fact = TypeVar("_Fact")
LastBatch: TypeAlias = Literal["keep", "drop", "carry"]
"""What happens if an epoch ends inside a batch.

`keep`: the batch is cut and the next one starts the next epoch. `drop`: the remaining samples are
skipped. `carry`: the batch continues in the next epoch.
"""


@runtime_checkable
class BatchSizes(Protocol):
    """Where each batch of a run begins; a `Plan` is one, and so are batches of one size."""

    def sample_at_batch(self, batch: int, /) -> int:
        """Return the position at which batch number `batch` (from 0) begins."""
        ...

    def batch_at_sample(self, sample: int, /) -> int:
        """Return the number of batches after which position `sample` has been reached."""
        ...


@knows_foreign
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
        lengths: the tokens of each sample in the order of the run, if they are known.
        group: how many consecutive samples stay together: the run ends with a whole group.

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
    batch_sizes: int | BatchSizes | None
    """As given: one size, or where batches begin; None if that is decided during the run."""
    last_batch: LastBatch
    """What happens if an epoch ends inside a batch."""
    lengths: Lengths | None
    """The tokens of each sample in the order of the run, or None."""
    group: int | None
    """How many consecutive samples stay together; None: each is on its own."""
    end_sample: int | None = field(compare=False)
    """The position at which the run ends; None if its length is no number of samples.

    >>> Horizon("1.5ep", dataset_num_samples=25).end_sample
    38
    """
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
        lengths: Lengths | None = None,
        group: int | None = None,
    ) -> None:
        run = read_run(max_duration)
        samples = checked_count("dataset_num_samples", dataset_num_samples)
        tokens = checked_count("dataset_num_tokens", dataset_num_tokens)
        each = checked_count("tokens_per_sample", tokens_per_sample)
        if lengths is not None:
            samples = _same("dataset_num_samples", samples, lengths.num_samples)
            tokens = _same("dataset_num_tokens", tokens, lengths.total)
            _same("tokens_per_sample", each, None)
        if last_batch not in get_args(LastBatch):
            instead = "write 'keep', 'drop' or 'carry'"
            raise ConversionError.bad("last_batch", last_batch, "there is no such word", instead)
        if batch_sizes is not None and not isinstance(batch_sizes, BatchSizes):
            batch_sizes = _checked_constant(batch_sizes, samples, last_batch)
        self._fill(
            max_duration=run,
            dataset_num_samples=samples,
            dataset_num_tokens=_tokens(samples, tokens, each),
            tokens_per_sample=each,
            batch_sizes=batch_sizes,
            last_batch=last_batch,
            lengths=lengths,
            group=group,
            _axes=axes(samples, run.unit),
        )
        is_exact = {_SP: True, _EP: samples is not None, _TOK: each is not None}
        end_sample = None
        if is_exact.get(run.unit, False):
            whole = group or 1
            end_sample = math.ceil(self._amount(run.amount, run.unit, _SP) / whole) * whole
        axis = self._axes[run.unit]
        end = self.ticks(run, axis)
        # Counters are whole numbers, so they reach the end at the next whole tick.
        self._fill(end_sample=end_sample, _passed=axis.read, _end=end, _end_tick=math.ceil(end))

    @classmethod
    def endless(cls, max_duration: TimeLike, *, tokens_per_sample: int | None = None) -> Horizon:
        """Return a run over samples that are numbered without epochs.

        No epoch ends inside a batch, so a plan is exact without the size of the data set. Megatron
        numbers samples so.

        >>> Horizon.endless("100ba", tokens_per_sample=4096)
        Horizon('100ba', tokens_per_sample=4096, last_batch='carry')
        """
        return cls(max_duration, tokens_per_sample=tokens_per_sample, last_batch="carry")

    def _fill(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

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

    @property
    def end(self) -> tuple[Axis, int]:
        """The counter that ends the run, and the tick at which it does."""
        return self._axes[_DUR], self._end_tick

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
        try:
            ticks = self._amount(amount, unit, axis.unit) * axis.scale
        except _MissingFactError as missing:
            raise self._refused(amount, unit, axis.unit, missing) from None
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

    def convert(self, time: TimeLike, unit: str) -> Time:
        """Return `time` in `unit`; batches, samples and tokens are rounded up.

        Raises:
            ConversionError: a fact is missing; the message names it.
        """
        found, target = Time(time), parse_unit(unit)
        try:
            return rounded(self._amount(found.amount, found.unit, target), target)
        except _MissingFactError as missing:
            raise self._refused(found.amount, found.unit, target, missing) from None

    def _refused(
        self, amount: Fraction, unit: TimeUnit, target: TimeUnit, missing: _MissingFactError
    ) -> ConversionError:
        what, otherwise = f"convert {rounded(amount, unit)} to {target}", f"write it in '{target}'"
        why = missing.why
        if _DUR in (unit, target):
            why = f"max_duration is in {NAMES[self.max_duration.unit]} and {why}"
        if missing.fact:
            otherwise = f"set {fact_text(missing.fact)}, or {otherwise}"
        return ConversionError.cannot(what, why=why, instead=otherwise)

    def _amount(self, amount: Fraction, unit: TimeUnit, target: TimeUnit) -> Fraction:
        """Return an amount in another unit, exactly and not yet rounded to whole samples.

        Conversions go through samples, except between epochs and tokens, which need only the
        tokens of an epoch. A time between two batches counts as the second batch.
        """
        run = self.max_duration
        if unit is target:
            return amount
        if unit is _DUR:
            return self._amount(amount * run.amount, run.unit, target)
        if target is _DUR:
            return self._amount(amount, unit, run.unit) / run.amount
        if self.lengths is not None and _TOK in (unit, target):
            return self._placed(self.lengths, amount, unit, target)
        if _SEC in (unit, target):
            raise _MissingFactError("how long a batch will take is not known before the run", None)
        if unit is _BA:
            start = self._batches.sample_at_batch(math.ceil(amount))
            return self._amount(Fraction(start), _SP, target)
        if target is _BA:
            sample = math.ceil(self._amount(amount, unit, _SP))
            return Fraction(self._batches.batch_at_sample(sample))
        return amount * self._rate(unit, target)

    def _placed(
        self, lengths: Lengths, amount: Fraction, unit: TimeUnit, target: TimeUnit
    ) -> Fraction:
        """Return an amount from or in tokens as the place that it is in the run's order."""
        if unit is _TOK:
            sample = lengths.reached(0, math.ceil(amount))
            return self._amount(Fraction(sample), _SP, target)
        return Fraction(lengths.tokens(0, math.ceil(self._amount(amount, unit, _SP))))

    def tokens(self, start: int, stop: int, /) -> int:
        """Return the tokens of the samples from `start` up to `stop`; 0 if they are not known.

        >>> Horizon("1ep", tokens_per_sample=8).tokens(2, 4)
        16
        """
        if self.lengths is not None:
            return self.lengths.tokens(start, stop)
        return (stop - start) * (self.tokens_per_sample or 0)

    def _rate(self, unit: TimeUnit, target: TimeUnit) -> Fraction:
        """Return how many `target` one `unit` is; both are epochs, samples or tokens."""
        if (unit, target) == (_EP, _SP):
            return Fraction(self._samples)
        if (unit, target) == (_EP, _TOK):
            return Fraction(self._tokens_per_epoch)
        if (unit, target) == (_SP, _TOK):
            if self.tokens_per_sample is not None:
                return Fraction(self.tokens_per_sample)
            return Fraction(self._tokens_per_epoch, self._samples)
        return 1 / self._rate(target, unit)

    @property
    def _batches(self) -> BatchSizes:
        sizes = self.batch_sizes
        if sizes is None:
            raise _MissingFactError("the batch size is not known in advance", "batch_size")
        return EqualBatches(self, Timestamp(), sizes) if isinstance(sizes, int) else sizes

    @property
    def _samples(self) -> int:
        return _known(self.dataset_num_samples, _NO_SAMPLES, "dataset_num_samples")

    @property
    def _tokens_per_epoch(self) -> int:
        if self.dataset_num_tokens is not None:
            return self.dataset_num_tokens
        why = "the number of tokens in the data set is not known"
        return _known(self.tokens_per_sample, why, "dataset_num_tokens") * self._samples

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

    def in_groups(self, group: int) -> Horizon:
        """Return this horizon with groups of so many samples, and epochs of whole groups.

        >>> Horizon("1ep", dataset_num_samples=11).in_groups(4).end_sample
        8

        Raises:
            ConversionError: an epoch has less than one group.
        """
        count = self.dataset_num_samples
        if count is not None and count < group:
            why, instead = f"the longest sequence takes {group} samples", "write shorter sequences"
            raise ConversionError.bad("dataset_num_samples", count, why, instead)
        whole = {"dataset_num_samples": count and count // group * group, "group": group}
        # The tokens of an epoch follow from those of a sample.
        return Horizon(self.max_duration, **(self._given() | whole | {"dataset_num_tokens": None}))

    def scaled(self, ratio: Number) -> Horizon:
        """Return this horizon with the run `ratio` times as long, rounded up to whole counts.

        It keeps a constant batch size, but no plan, which belongs to the old run.

        >>> Horizon("90ep", batch_sizes=32).scaled(0.5)
        Horizon('45ep', batch_sizes=32)
        """
        run = self.max_duration
        length, sizes = rounded(run.amount * exact(ratio), run.unit), self.batch_sizes
        return self._like(length, sizes if isinstance(sizes, int) else None)

    def _like(self, max_duration: Time, batch_sizes: int | BatchSizes | None) -> Horizon:
        return Horizon(max_duration, **(self._given() | {"batch_sizes": batch_sizes}))

    def _given(self) -> dict[str, Any]:
        """The arguments after the first, as they were given."""
        return {fact.name: getattr(self, fact.name) for fact in fields(self)[1:8]}

    def __repr__(self) -> str:
        given = self._given().items()
        known = (f", {name}={fact!r}" for name, fact in given if fact not in (None, "keep"))
        return f"Horizon('{self.max_duration}'{''.join(known)})"


def _unknown_epoch(what: str, otherwise: str) -> ConversionError:
    instead = f"set {fact_text('dataset_num_samples')}{otherwise}"
    return ConversionError.cannot(what, why=_NO_SAMPLES, instead=instead)


def _same(name: str, given: int | None, found: _Fact) -> _Fact:
    """Return what the lengths say; refuse anything else."""
    if given not in (None, found):
        why = "lengths has the tokens of each sample" + (f", and {found:,} in all" if found else "")
        raise ConversionError.bad(name, given, why, "leave one of the two out")
    return found


def _tokens(num_samples: int | None, num_tokens: int | None, each: int | None) -> int | None:
    if num_samples is None or each is None:
        return num_tokens
    if num_tokens is not None and num_tokens != num_samples * each:
        why = f"{num_samples} samples of {each} tokens are {num_samples * each}"
        raise ConversionError.bad("dataset_num_tokens", num_tokens, why, "leave it out")
    return num_samples * each


_NO_SAMPLES = "the number of samples in the data set is not known"


class _MissingFactError(Exception):
    """A conversion lacks a fact; becomes a ConversionError that names the conversion."""

    def __init__(self, why: str, fact: str | None) -> None:
        super().__init__(why)
        self.why = why
        self.fact = fact


def _known(fact: _Fact | None, why: str, name: str) -> _Fact:
    if fact is None:
        raise _MissingFactError(why, name)
    return fact


def checked_count(name: str, count: object) -> int | None:
    """Return a count as an int, or None; refuse all but integers of at least 1."""
    if count is None:
        return None
    what = f"use {name}={shown(count)}"
    return checked_whole(count, ConversionError, what, "leave it out where it is not known")


def _checked_constant(size: object, num_samples: int | None, last_batch: LastBatch) -> int:
    """Return a constant batch size; under `drop` an epoch must have so many samples."""
    what, instead = f"use {shown(size)} as a batch size", "write a number of samples such as 128"
    size = checked_whole(size, BatchSizeError, what, instead)
    if last_batch == "drop" and num_samples and size > num_samples:
        why = f"an epoch has only {num_samples} samples, so each would be dropped"
        smaller = "write a smaller one or last_batch='carry'"
        raise BatchSizeError.bad("batch_size", size, why, smaller)
    return size
