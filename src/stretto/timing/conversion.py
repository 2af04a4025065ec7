"""Exact conversion between units, from stated facts about the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar, cast, final

from stretto.errors import Argument, ConversionError, Text, TimeError, shown
from stretto.timing import grammar
from stretto.timing.batch_sizes import BatchSizes, LastBatch, constant_batches
from stretto.timing.grammar import NAMES, WHOLE, TimeUnit, checked_whole, parse_unit
from stretto.timing.time import Time, TimeLike

_EP, _BA, _SP, _TOK = TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN
_DUR, _SEC = TimeUnit.DURATION, TimeUnit.SECOND


_Fact = TypeVar("_Fact")


@final
@dataclass(frozen=True, slots=True)
class Facts:
    """The known facts of a run and the conversions they allow; None means unknown.

    Conversions go through samples, except between epochs and tokens, which need only the tokens of
    an epoch. Errors name the missing fact.

    >>> Facts(num_samples=100).amount(Time("0.5ep"), TimeUnit.SAMPLE)
    Fraction(50, 1)
    """

    max_duration: Time | None = None
    num_samples: int | None = None
    num_tokens: int | None = None
    tokens_per_sample: int | None = None
    batch_sizes: BatchSizes | None = None

    @property
    def end_sample(self) -> int | None:
        """The position at which the run ends, where its length is a number of samples."""
        run, exact_units = self.max_duration, {_SP}
        if self.num_samples is not None:
            exact_units.add(_EP)
        if self.tokens_per_sample is not None:
            exact_units.add(_TOK)
        if run is None or run.unit not in exact_units:
            return None
        return math.ceil(self.amount(run, _SP))

    def with_batch_sizes(self, sizes: int | BatchSizes | None, last_batch: LastBatch) -> Facts:
        """Return these facts with batches of a constant size, of a plan, or of unknown size."""
        if sizes is None or isinstance(sizes, BatchSizes):
            return replace(self, batch_sizes=sizes)
        end = None if last_batch == "drop" else self.end_sample
        constant = constant_batches(sizes, self.num_samples, last_batch, end)
        return replace(self, batch_sizes=constant)

    def amount(self, time: Time, unit: TimeUnit) -> Fraction:
        """Return how much `time` is in `unit`, exactly and not yet rounded to whole samples.

        A time between two batches counts as the second batch.

        Raises:
            ConversionError: a fact is missing.
        """
        return self.amount_of(time.amount, time.unit, unit)

    def amount_of(self, amount: Fraction, unit: TimeUnit, target: TimeUnit) -> Fraction:
        """Return the same for any amount, such as half a sample.

        Raises:
            ConversionError: a fact is missing.
        """
        try:
            return self._amount(amount, unit, target)
        except _MissingFactError as missing:
            what = f"convert {rounded(amount, unit)} to {target}"
            raise self._refused(what, {unit, target}, missing, f"write it in '{target}'") from None

    def meeting_unit(self, times: Sequence[Time]) -> TimeUnit:
        """Return the unit, samples or tokens, that can express all of `times`.

        If tokens per sample are only an average, the end of the run is the time that stays exact.

        Raises:
            ConversionError: a fact is missing.
        """
        units = {time.unit for time in times}
        run_unit = None if self.max_duration is None else self.max_duration.unit
        has_tokens = _TOK in units or (_DUR in units and run_unit is _TOK)
        refusal = None
        for unit in (_TOK, _SP) if has_tokens and run_unit is _TOK else (_SP, _TOK):
            try:
                for time in times:
                    self._amount(time.amount, time.unit, unit)
            except _MissingFactError as missing:
                refusal = refusal or missing
            else:
                return unit
        listed = ", ".join(map(str, times[:-1]))
        raise self._refused(
            f"bring {listed} and {times[-1]} to one unit",
            units,
            cast(_MissingFactError, refusal),
            "write all of them in one unit",
        )

    def _refused(
        self, what: str, units: set[TimeUnit], missing: _MissingFactError, otherwise: str
    ) -> ConversionError:
        why = missing.why
        if self.max_duration is not None and _DUR in units:
            why = f"max_duration is in {NAMES[self.max_duration.unit]} and {why}"
        instead: Text = otherwise
        if missing.fact:
            instead = ("set ", Argument(missing.fact), f", or {otherwise}")
        return ConversionError.cannot(what, why=why, instead=instead)

    def _amount(self, amount: Fraction, unit: TimeUnit, target: TimeUnit) -> Fraction:
        if unit is target:
            return amount
        if unit is _DUR:
            return self._amount(amount * self._run.amount, self._run.unit, target)
        if target is _DUR:
            return self._amount(amount, unit, self._run.unit) / self._run.amount
        if _SEC in (unit, target):
            raise _MissingFactError("how long a batch will take is not known before the run", None)
        if unit is _BA:
            start = self._batches.sample_at_batch(math.ceil(amount))
            return self._amount(Fraction(start), _SP, target)
        if target is _BA:
            sample = math.ceil(self._amount(amount, unit, _SP))
            return Fraction(self._batches.batch_at_sample(sample))
        return amount * self._rate(unit, target)

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
    def _run(self) -> Time:
        return _known(self.max_duration, "the length of the run", "max_training_duration")

    @property
    def _batches(self) -> BatchSizes:
        if self.batch_sizes is None:
            raise _MissingFactError("the batch size is not known in advance", "batch_size")
        return self.batch_sizes

    @property
    def _samples(self) -> int:
        what = "the number of samples in the data set"
        return _known(self.num_samples, what, "dataset_num_samples")

    @property
    def _tokens_per_epoch(self) -> int:
        if self.num_tokens is not None:
            return self.num_tokens
        what = "the number of tokens in the data set"
        return _known(self.tokens_per_sample, what, "dataset_num_tokens") * self._samples


class _MissingFactError(Exception):
    """A conversion lacks a fact; becomes a ConversionError that names the conversion."""

    def __init__(self, why: str, fact: str | None) -> None:
        super().__init__(why)
        self.why = why
        self.fact = fact


def _known(fact: _Fact | None, what: str, name: str) -> _Fact:
    if fact is None:
        raise _MissingFactError(f"{what} is not known", name)
    return fact


def rounded(amount: Fraction, unit: TimeUnit) -> Time:
    """Return `amount` as a `Time`; units that come in whole numbers are rounded up."""
    return Time(Fraction(math.ceil(amount)) if unit in WHOLE else amount, unit)


def convert(
    time: TimeLike,
    unit: str,
    *,
    dataset_num_samples: int | None = None,
    dataset_num_tokens: int | None = None,
    max_training_duration: TimeLike | None = None,
    batch_size: int | None = None,
    drop_last: bool = False,
) -> Time:
    """Convert a time to another unit, from given facts.

    Pairs: epochs and batches (needs `dataset_num_samples` and `batch_size`), epochs and samples
    (`dataset_num_samples`), batches and samples (`batch_size`; epochs end with a smaller batch
    if `dataset_num_samples` is known, too), epochs and tokens (`dataset_num_tokens`), `dur` and
    the unit of `max_training_duration`, and every chain of these.

    Batches, samples and tokens are rounded up to whole numbers: to the first batch whose end has
    reached the time.

    >>> convert("0.1dur", "ep", max_training_duration="90ep")
    Time('9ep')
    >>> convert("0.1dur", "ba", max_training_duration="90ep", dataset_num_samples=50_000,
    ...         batch_size=128)
    Time('3519ba')

    Args:
        time: what to convert.
        unit: the unit to convert to.
        dataset_num_samples: samples in an epoch.
        dataset_num_tokens: tokens in an epoch.
        max_training_duration: how long the run is.
        batch_size: samples in a batch, over all ranks.
        drop_last: skip an epoch's last batch if it would be smaller.

    Raises:
        ConversionError: a fact is missing, or is not a positive count.
        TimeError: a text is not a time.
    """
    run = None if max_training_duration is None else read_run(max_training_duration)
    facts = Facts(
        run,
        checked_count("dataset_num_samples", dataset_num_samples),
        checked_count("dataset_num_tokens", dataset_num_tokens),
    ).with_batch_sizes(checked_count("batch_size", batch_size), "drop" if drop_last else "keep")
    target = parse_unit(unit)
    return rounded(facts.amount(Time(time), target), target)


def checked_count(name: str, count: object) -> int | None:
    """Return a count as an int, or None; refuse all but integers of at least 1."""
    if count is None:
        return None
    what = ("use ", Argument(name), f"={shown(count)}")
    return checked_whole(count, ConversionError, what, "leave it out where it is not known")


def read_run(max_duration: TimeLike) -> Time:
    """Return the length of a run.

    Raises:
        TimeError: it is not a time.
        ConversionError: it is not positive, or is relative to itself.
    """
    try:
        run = Time(max_duration)
    except TimeError as error:
        if isinstance(max_duration, str):
            grammar.parse(max_duration, of_run=True)  # raises the same, with advice for a length
        what, why, advise = error.message.what, error.message.why, grammar.without_unit
        instead = advise(max_duration, of_run=True)
        raise TimeError.cannot(what, why=why, instead=instead) from None
    if run.unit is _DUR:
        why = "it is a fraction of itself"
        raise ConversionError.bad("max_duration", str(run), why, grammar.HOW_LONG)
    if run.amount <= 0:
        raise ConversionError.bad("max_duration", str(run), "it is not positive", "write '2ep'")
    return run
