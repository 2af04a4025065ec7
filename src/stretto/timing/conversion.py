"""Exact conversion between units, from stated facts about the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import final

from stretto.errors import ConversionError, cannot
from stretto.timing.batch_sizes import BatchSizes, ConstantBatchSize
from stretto.timing.time import Time, TimeLike
from stretto.timing.unit import NAMES, WHOLE, TimeUnit, parse_unit

_EP, _BA, _SP, _TOK = TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN
_DUR, _SEC = TimeUnit.DURATION, TimeUnit.SECOND


@final
@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run, and the conversions that follow from it; None is not known.

    Everything goes by way of the sample, the atom, but for epochs and tokens, which need only the
    tokens of an epoch. A fact that is missing is named in the error.

    >>> Facts(num_samples=100).amount(Time("0.5ep"), TimeUnit.SAMPLE)
    Fraction(50, 1)
    """

    max_duration: Time | None = None
    num_samples: int | None = None
    num_tokens: int | None = None
    tokens_per_sample: int | None = None
    batch_sizes: BatchSizes | None = None

    def amount(self, time: Time, unit: TimeUnit) -> Fraction:
        """Return how much `time` is in `unit`, exactly and not yet rounded to whole samples.

        A time in batches that lies between two batches is taken at the second one.

        Raises:
            ConversionError: a fact is missing.
        """
        try:
            return self._amount(time.amount, time.unit, unit)
        except _Missing as missing:
            raise ConversionError(
                cannot(f"convert {time} to {unit}", why=missing.why, instead=missing.instead)
            ) from None

    def _amount(self, amount: Fraction, unit: TimeUnit, target: TimeUnit) -> Fraction:
        if unit is target:
            return amount
        if unit is _DUR:
            return self._amount(amount * self._run.amount, self._run.unit, target)
        if target is _DUR:
            return self._amount(amount, unit, self._run.unit) / self._run.amount
        if _SEC in (unit, target):
            raise _Missing(
                "how long a batch will take is not known before the run",
                f"say it in '{unit if target is _SEC else target}', or give max_duration in hours",
            )
        if unit is _BA:
            start = self._batches.sample_at_batch(math.ceil(amount))
            return self._amount(Fraction(start), _SP, target)
        if target is _BA:
            sample = math.ceil(self._amount(amount, unit, _SP))
            return Fraction(self._batches.batch_at_sample(sample))
        return amount * self._rate(unit, target)

    def _rate(self, unit: TimeUnit, target: TimeUnit) -> Fraction:
        """How many `target` one `unit` is, among epochs, samples and tokens."""
        if (unit, target) == (_EP, _SP):
            return Fraction(self._known_samples())
        if (unit, target) == (_EP, _TOK):
            return Fraction(self._tokens_per_epoch)
        if (unit, target) == (_SP, _TOK):
            return self._tokens_of_a_sample
        return 1 / self._rate(target, unit)

    @property
    def _run(self) -> Time:
        if self.max_duration is None:
            raise _Missing("the length of the run is not known", "pass max_training_duration")
        return self.max_duration

    @property
    def _batches(self) -> BatchSizes:
        if self.batch_sizes is None:
            raise _Missing(
                "the batch size is not known in advance",
                "pass batch_size, or say it in 'sp', 'tok', 'ep' or 'dur'",
            )
        return self.batch_sizes

    def _known_samples(self) -> int:
        if self.num_samples is None:
            run = self.max_duration
            also = f"max_duration is in {NAMES[run.unit]} and " if run else ""
            raise _Missing(
                f"{also}the number of samples in the data set is not known",
                "pass dataset_num_samples",
            )
        return self.num_samples

    @property
    def _tokens_per_epoch(self) -> int:
        if self.num_tokens is not None:
            return self.num_tokens
        if self.tokens_per_sample is None:
            raise _Missing(
                "the number of tokens in the data set is not known", "pass dataset_num_tokens"
            )
        return self.tokens_per_sample * self._known_samples()

    @property
    def _tokens_of_a_sample(self) -> Fraction:
        if self.tokens_per_sample is not None:
            return Fraction(self.tokens_per_sample)
        return Fraction(self._tokens_per_epoch, self._known_samples())


class _Missing(Exception):
    """A fact that a conversion needs; becomes a ConversionError that names the conversion."""

    def __init__(self, why: str, instead: str) -> None:
        super().__init__(why)
        self.why, self.instead = why, instead


def rounded(amount: Fraction, unit: TimeUnit) -> Time:
    """Return `amount` as a `Time`: whole units at the first whole one that has reached it."""
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
    """Convert a time to another unit, from stated facts that do not change later.

    Pairs: epochs and batches (needs `dataset_num_samples` and `batch_size`), epochs and samples
    (`dataset_num_samples`), batches and samples (`batch_size`; epochs end with a smaller batch
    where `dataset_num_samples` is known too), epochs and tokens (`dataset_num_tokens`), `dur` and
    the unit of `max_training_duration`, and every chain of these.

    What does not come out whole in batches, samples or tokens is rounded up: the first batch at
    whose end the time has been reached.

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
        drop_last: an epoch's last batch is passed over where it would be smaller.

    Raises:
        ConversionError: a fact is missing, or is not a positive count.
        TimeError: a text is not a time.
    """
    for name, count in (
        ("dataset_num_samples", dataset_num_samples),
        ("dataset_num_tokens", dataset_num_tokens),
        ("batch_size", batch_size),
    ):
        check_count(name, count)
    run = None if max_training_duration is None else check_run(Time(max_training_duration))
    sizes = None
    if batch_size is not None:
        sizes = ConstantBatchSize(batch_size, dataset_num_samples, "drop" if drop_last else "keep")
    facts = Facts(run, dataset_num_samples, dataset_num_tokens, None, sizes)
    target = parse_unit(unit)
    return rounded(facts.amount(Time(time), target), target)


def check_count(name: str, count: object) -> None:
    """Refuse a count that is given and is not an integer of at least 1."""
    if count is not None and (type(count) is not int or count < 1):
        raise ConversionError(
            cannot(
                f"use {name}={count!r}",
                why="it is not an integer of at least 1",
                instead="leave it out where it is not known",
            )
        )


def check_run(max_duration: Time) -> Time:
    """Refuse a length of the run that is not positive or is relative to itself."""
    if max_duration.unit is _DUR:
        raise ConversionError(
            cannot(
                f"use '{max_duration}' as the length of the run",
                why="it is a fraction of itself",
                instead="write it in 'ep', 'ba', 'sp', 'tok' or as hours",
            )
        )
    if max_duration.amount <= 0:
        raise ConversionError(
            cannot(
                f"use '{max_duration}' as the length of the run",
                why="it is not positive",
                instead="write a length such as '2ep'",
            )
        )
    return max_duration
