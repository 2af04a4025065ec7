"""`Seesaw` and other pairs: the batch grows as a schedule decays, and a rule sets the rate.

A pair is three ordinary values, which are planned as any others: sizes that grow as a schedule
decays, the schedule for constant batches, and the rule by which the learning rate follows the size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, final

from stretto.batching.decay import Decay, cannot_grow
from stretto.batching.policy import (
    NO_SIGNALS,
    BatchSizePolicy,
    Bound,
    Hold,
    PositiveInt,
    Size,
    SizePart,
    check_units,
    grain_of,
    timed,
)
from stretto.batching.split import LearningRateRule, LinearRule, SquareRootRule, is_learning_rate
from stretto.batching.steps import PolicyLike, as_policy
from stretto.batching.wrappers import AtMost, MultipleOf
from stretto.errors import BatchSizeError, ScheduleError
from stretto.schedules import BoundSchedule, Schedule, ScheduleLike, Scope, as_schedule
from stretto.schedules.fields import Check, Timed, check_fields, number_field
from stretto.timing import Horizon, Timestamp
from stretto.timing.grammar import exact

SLACK = 1e-9
"""Tolerance of a cut, relative: 0.1 ** 2 is a little more than 0.01."""
Decaying: TypeAlias = Annotated[ScheduleLike, Check(lambda value, *_: as_schedule(value))]
Sizes: TypeAlias = Annotated[PolicyLike, Check(lambda value, *_: as_policy(value))]
Continuous: TypeAlias = Literal["continuous"]
"""The batch grows whenever another sample fits in, not by a factor at once."""
# Powers of a factor below 1.01 have thousands of digits.
_FACTOR = number_field("'continuous' or from 1.01 to 2^20", lambda value: 1.01 <= value <= 2**20)


def _growth(value: object, *given: Any) -> object:
    return value if value == "continuous" else _FACTOR.converted(value, *given)


Growth: TypeAlias = Annotated[float | Continuous, Check(_growth)]
MOST_GROWTH = 64
"""The largest growth by default. A schedule that falls to 0 would grow batches without end: the
last batch of a cosine is N ** (2/3) times as large as the first in a run of N batches. Beyond 64
times, a cosine has 0.2 percent of its steps left to save."""
_FAR = 50.0
"""The logarithm of more growth than any batch has: powers beyond are not computed."""


def _decay(horizon: Horizon, schedule: ScheduleLike) -> Decay:
    return Decay.on(horizon.with_batch_sizes(None), as_schedule(schedule))


def _steps(cut: float, factor: Fraction) -> int | None:
    """Return how many times the factor goes into a cut; None if the cut is 0."""
    if cut <= 0:
        return None
    # For factors near 1, log1p is more exact than log.
    return max(0, math.floor(-math.log(cut) / math.log1p(float(factor - 1)) + SLACK))


@final
@dataclass(frozen=True, slots=True, repr=False)
class Staircase(Schedule):
    """A schedule that decays, rounded up to its peak divided by a power of `factor`.

    Formula: `peak * factor ** -floor(log_factor(peak / decay(t)))` after the peak.

    >>> from stretto.schedules import Linear
    >>> factor = Staircase(Linear(1, 0), 2).bind(Horizon("8sp"))
    >>> [factor(Timestamp(sample=sample)) for sample in (0, 3, 4, 6, 7)]
    [1.0, 1.0, 0.5, 0.25, 0.125]

    Args:
        decay: a schedule that falls after an optional warm-up, with times in samples, epochs,
            tokens or fractions of the run.
        factor: what it falls by at once, 1.01 or more.

    Raises:
        BatchSizeError: `factor` is no such number; at binding, the schedule does not allow it.
        ScheduleError: `decay` is not a schedule; at binding, it is inside a period.
    """

    decay: Decaying
    factor: Annotated[float, _FACTOR]

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over the run as a function of the timestamp.

        Raises:
            BatchSizeError: the schedule does not only fall after its peak.
            ConversionError: a time needs a fact that is not known.
            ScheduleError: it is inside a period.
        """
        if scope != Scope.of(scope.horizon):
            why = "its steps are those of the whole run"
            instead = "write the periods inside it: Seesaw(Periods([...]), 16)"
            raise ScheduleError.cannot(f"follow {self!r} in a period", why=why, instead=instead)
        decay, factor = _decay(scope.horizon, self.decay), exact(self.factor)

        def value(timestamp: Timestamp) -> float:
            if decay.is_before_peak(timestamp):
                return decay.value(timestamp)
            steps = _steps(decay.cut_at(timestamp), factor)
            return 0.0 if steps is None else decay.top * float(1 / factor**steps)

        return value


@final
@dataclass(frozen=True, slots=True, repr=False)
class DecayGrowth(BatchSizePolicy):
    """Sizes that grow by as much as a schedule has fallen since its peak.

    Formula: where the schedule has been cut by `c(t)`, `size(t) * factor ** k` with
    `k = floor(log_factor(1 / c(t)))`, or `size(t) / c(t)` if continuous; rounded down.

    >>> from stretto.schedules import Linear
    >>> bound = DecayGrowth(Linear(1, 0), 8).bind(Horizon("1000sp"))
    >>> [bound.decide(Timestamp(sample=at), {}, NO_SIGNALS)[0] for at in (0, 499, 500, 999)]
    [8, 8, 16, 512]

    Args:
        decay: a schedule that falls after an optional warm-up, with times in samples, epochs,
            tokens or fractions of the run.
        size: the size until the schedule has fallen: a number, steps or a ramp.
        factor: the factor by which the batch grows at once, 1.01 or more; `"continuous"`: as soon
            as another sample fits in.
        most: the largest growth.

    Raises:
        BatchSizeError: there is no such factor or growth; at binding, the schedule or the sizes do
            not allow it.
        ScheduleError: `decay` is not a schedule.
    """

    decay: Decaying
    size: Sizes
    factor: Growth = 2.0
    most: PositiveInt = MOST_GROWTH

    def bind(self, horizon: Horizon) -> Bound:
        """Resolve every time for one run.

        Raises:
            BatchSizeError: the schedule follows batches or wall time, does not fall on this run or
                rises again; or the sizes do not follow from time alone.
            ConversionError: a time needs a fact that is not known.
        """
        decay, inner = _decay(horizon, self.decay), as_policy(self.size).bind(horizon)
        factor = None if self.factor == "continuous" else exact(self.factor)
        if inner.start or inner.reads:
            why = f"{self.size!r} does not follow from time alone"
            raise cannot_grow(self.decay, why, "write a number, steps or a ramp")
        # Otherwise nothing would ever move.
        if factor and decay.last and factor > decay.top / decay.last * (1 + SLACK):
            why = f"it falls by less than a factor of {self.factor:g} before the run ends"
            raise cannot_grow(self.decay, why, "write a smaller factor, or 'continuous'")

        grain = grain_of(self, horizon)

        def grown(size: int, cut: float) -> int:
            # Whole samples: otherwise a hold would end with each token that fits in.
            fits = 0 if cut >= 1 else math.floor(size * self._growth(cut, factor) / grain) * grain
            return max(size, fits)

        def plain(timestamp: Timestamp) -> int:
            return inner.decide(timestamp, {}, NO_SIGNALS)[0]

        def holds_until(timestamp: Timestamp) -> Hold | None:
            hold, size = inner.holds_until(timestamp, {}), plain(timestamp)
            if hold is None:
                return None
            now = grown(size, decay.cut_at(timestamp))
            tick = decay.next_change(timestamp, lambda cut: grown(size, cut) > now)
            return hold if tick is None else hold & Hold(((decay.axis, tick),))

        ends = inner.bounds
        return timed(
            lambda timestamp: grown(plain(timestamp), decay.cut_at(timestamp)),
            units=inner.units | {decay.axis.unit},
            bounds=None if ends is None else (ends[0], grown(ends[1], 0.0)),
            holds_until=holds_until,
        )

    def _growth(self, cut: float, factor: Fraction | None) -> Fraction:
        if factor is None:
            return Fraction(min((1 + SLACK) / cut, self.most) if cut > 0 else self.most)
        steps = _steps(cut, factor)
        if steps is None or steps * math.log(factor) > _FAR:
            return Fraction(self.most)
        return min(factor**steps, Fraction(self.most))

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return a line if the default bound stops the growth."""
        bounds = self.bind(horizon).bounds
        # Wrappers may round the largest size down.
        if self.most != MOST_GROWTH or bounds is None or largest * 64 <= bounds[1] * 63:
            return ()
        before = f"{MOST_GROWTH} times the {bounds[1] // MOST_GROWTH:,} before"
        return (f"batches grow to {largest:,}, by default at most {before}; pass a maximum",)


@dataclass(frozen=True, slots=True, repr=False)
class Pair(Timed):
    """A schedule that decays, and a batch size that takes over its decay or a part of it.

    `policy`, `schedule` and `rule` are ordinary values, and may be wrapped, multiplied and planned
    as any others: `rate(t) = schedule(t) * rule(size(t))` at every time. This includes rounding and
    bounds, so from the `maximum` on only the learning rate falls.

    >>> from stretto.schedules import Cosine
    >>> pair = Seesaw(Cosine(), 16)
    >>> pair.rule
    SquareRootRule(reference=16)
    """

    error = BatchSizeError
    rule_of: ClassVar[type[LinearRule | SquareRootRule]]
    """Makes the rule from the size that the schedule is meant for."""
    decay: Decaying
    """The schedule of a run with constant batches."""
    size: Sizes
    """The size without growth, or a warm-up of the batch."""
    factor: Growth = field(default=2.0, kw_only=True)
    """The factor by which the batch grows at once."""
    smooth: bool = field(default=False, kw_only=True)
    """Whether the learning rate follows the curve between two steps of the size."""
    maximum: Size | None = field(default=None, kw_only=True)
    """The size beyond which only the learning rate falls; None: 64 times the size before growth."""
    multiple_of: SizePart = field(default=1, kw_only=True)
    """Sizes are rounded down to multiples of this, at least one."""
    reference: Size | None = field(default=None, kw_only=True)
    """The size that the schedule is meant for; None: the size after the warm-up of the batch."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_units(self)
        last = as_policy(self.size).end_size()
        reference = self.reference or last
        if reference is None:
            why = f"the last size of {self.size!r} is not known before the run"
            raise BatchSizeError.bad("reference", None, why, "write for example reference=256")
        if self.maximum is not None and self.maximum < max(self.multiple_of, last or 1):
            why = f"a size before growth, or multiple_of={self.multiple_of}, is above it"
            raise BatchSizeError.bad("maximum", self.maximum, why, "write at least that")
        if reference < self.multiple_of:
            why = f"no multiple of it is as small as {reference}, the size of the schedule"
            instead = f"write at most {reference}, or reference={self.multiple_of}"
            raise BatchSizeError.bad("multiple_of", self.multiple_of, why, instead)

    @property
    @final
    def policy(self) -> BatchSizePolicy:
        """The batch sizes."""
        most = MOST_GROWTH if self.maximum is None else self.maximum
        policy: BatchSizePolicy = DecayGrowth(self.decay, self.size, self.factor, int(most))
        policy = policy if self.maximum is None else AtMost(policy, self.maximum)
        return policy if self.multiple_of == 1 else MultipleOf(policy, self.multiple_of)

    @property
    @final
    def schedule(self) -> Schedule:
        """The learning rate's schedule for constant batches of the reference."""
        if self.smooth or self.factor == "continuous":
            return as_schedule(self.decay)
        return Staircase(self.decay, self.factor)

    @property
    @final
    def rule(self) -> LearningRateRule:
        """The rule by which the learning rate follows the size."""
        reference = self.reference or as_policy(self.size).end_size()
        assert reference is not None  # checked at construction
        return type(self).rule_of(reference)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Seesaw(Pair):
    """Grow the batch while the learning rate decays by only the square root of the schedule.

    When a schedule would divide the learning rate by `a`, divide it by `sqrt(a)` and multiply the
    batch by `a`: about the same loss at the same samples in fewer optimizer steps, for Adam
    and normalised SGD, as long as the batch stays below the critical size. Nothing changes before
    the peak of the schedule.

    Formula: `rate(t) = base(t) * sqrt(size(t) / reference)`; with `factor` `a`, where the schedule
    has been cut by `c(t)` since its peak and `k = floor(log_a(1 / c(t)))`, `size(t) = size * a**k`
    and `base(t) = peak * a**-k` (`smooth`: the schedule itself). With `"continuous"`,
    `size(t) = floor(size / c(t))`. Source: Meterez et al. 2025, Seesaw (arXiv 2510.14717),
    algorithm 1.

    >>> from stretto import Horizon, Linear, Seesaw, plan
    >>> pair = Seesaw(Linear(1, 0), 8)
    >>> run = plan(Horizon("640sp"), pair.policy, schedules={"lr": pair.schedule}, rule=pair.rule)
    >>> [(stage.size, stage.batches, round(stage.values["lr"].first, 3)) for stage in run.stages]
    [(8, 40, 1.0), (16, 10, 0.707), (32, 3, 0.5), (64, 1, 0.354)]

    Args:
        decay: a schedule that falls after an optional warm-up, with times in samples, epochs,
            tokens or fractions of the run.
        size: the size until the schedule has fallen, or a warm-up of the batch: steps or a ramp,
            whose sizes are multiplied by the growth.
        factor: the factor by which the batch grows at once, 1.01 or more; `"continuous"`: as soon
            as another sample (or `multiple_of`) fits in.
        smooth: let the learning rate follow the curve between two steps of the size, and rise
            with the size; by default, it also moves in steps.
        maximum: the size beyond which only the learning rate falls; by default, 64 times the size
            before the growth.
        multiple_of: sizes are rounded down to multiples of this, at least one.
        reference: the size that the schedule is meant for; by default, the size after the warm-up
            of the batch, which your own functions do not tell. Smaller sizes before have a smaller
            learning rate, larger ones a larger one.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, or there is no such factor; at
            binding, the schedule or the sizes do not allow it.
        ScheduleError: `decay` is not a schedule.
    """

    rule_of = SquareRootRule


@final
@dataclass(frozen=True, slots=True, repr=False)
class IncreaseInsteadOfDecay(Pair):
    """Grow the batch when the learning rate would decay, and keep the learning rate.

    When a schedule would divide the learning rate by `a`, multiply the batch by `a`: with SGD,
    about the same loss at the same samples in fewer optimizer steps. With Adam it grows the batch
    too fast; use `Seesaw`. From the `maximum` on the learning rate decays.

    Formula: `rate(t) = base(t) * size(t) / reference`, with sizes as for `Seesaw`. Source: Smith et
    al. 2018, "Don't Decay the Learning Rate, Increase the Batch Size" (arXiv 1711.00489).

    >>> from stretto import Horizon, plan
    >>> from stretto.batching import IncreaseInsteadOfDecay
    >>> from stretto.schedules import MultiStep
    >>> pair = IncreaseInsteadOfDecay(MultiStep(["30%", "60%"], 0.2), 32, factor=5, maximum=200)
    >>> run = plan(Horizon("9600sp"), pair.policy, schedules={"lr": pair.schedule}, rule=pair.rule)
    >>> [(stage.size, stage.batches, round(stage.values["lr"].last, 3)) for stage in run.stages]
    [(32, 90, 1.0), (160, 18, 1.0), (200, 20, 0.25)]

    Args:
        decay: a schedule that falls after an optional warm-up, with times in samples, epochs,
            tokens or fractions of the run.
        size: the size until the schedule has fallen, or a warm-up of the batch: steps or a ramp,
            whose sizes are multiplied by the growth.
        factor: the factor by which the batch grows at once, 1.01 or more; `"continuous"`: as soon
            as another sample (or `multiple_of`) fits in. Use it for a schedule with steps.
        smooth: let the learning rate follow the curve between two steps of the size, and rise
            with the size; by default, it also moves in steps.
        maximum: the size beyond which only the learning rate falls; by default, 64 times the size
            before the growth.
        multiple_of: sizes are rounded down to multiples of this, at least one.
        reference: the size that the schedule is meant for; by default, the size after the warm-up
            of the batch, which your own functions do not tell. Smaller sizes before have a smaller
            learning rate, larger ones a larger one.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, or there is no such factor; at
            binding, the schedule or the sizes do not allow it.
        ScheduleError: `decay` is not a schedule.
    """

    rule_of = LinearRule


def paired(
    sizes: PolicyLike | Pair, schedules: Mapping[str, Any], rule: Any = None
) -> tuple[BatchSizePolicy, dict[str, Any], Any]:
    """Return batch sizes, schedules and the rule; a pair such as `Seesaw` is all three.

    >>> from stretto.schedules import Cosine
    >>> policy, schedules, rule = paired(Seesaw(Cosine(), 16, maximum=64), {})
    >>> list(schedules), rule
    (['lr'], SquareRootRule(reference=16))

    Raises:
        BatchSizeError: beside a pair there is a rule, or a schedule of the learning rate.
    """
    if not isinstance(sizes, Pair):
        return as_policy(sizes), dict(schedules), rule
    rates = [name for name in schedules if is_learning_rate(name)]
    if rates or rule is not None:
        other = f"the schedule of {rates[0]!r}" if rates else f"the rule {rule!r}"
        why, instead = "the pair has its own", "leave the other out"
        raise BatchSizeError.cannot(f"use {other} with {sizes!r}", why=why, instead=instead)
    return sizes.policy, {**schedules, "lr": sizes.schedule}, sizes.rule
