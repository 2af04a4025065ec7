"""Pairs of a schedule and batch sizes; `Seesaw`.

A schedule that decays goes in, a schedule and a batch size policy come out. Both are functions of
time alone, so they are planned before the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, final

from stretto.batching.decay import Decay, cannot_grow
from stretto.batching.policy import (
    NO_SIGNALS,
    BatchSizePolicy,
    Bound,
    Hold,
    Size,
    flag,
    timed,
)
from stretto.batching.split import LearningRateRule, NoRule, is_learning_rate
from stretto.batching.steps import PolicyLike, as_policy
from stretto.batching.wrappers import checked_policy
from stretto.errors import Argument, BatchSizeError, ScheduleError, TimeError, shown
from stretto.schedules import (
    BoundSchedule,
    Product,
    RunScope,
    Schedule,
    ScheduleLike,
    Scope,
    as_schedule,
)
from stretto.schedules.fields import Check, Timed, check_fields, fill
from stretto.timing import Horizon, Timestamp, TimeUnit
from stretto.timing.grammar import exact

SLACK = 1e-9
"""By which part a cut may fall short: 0.1 ** 2 is a little more than 0.01."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCoupling:
    """The pair on one run."""

    decay: Decay
    sizes: Bound
    """The sizes without the growth."""
    factor: Fraction | None
    """By how much the batch grows at once; None: continuously."""
    smooth: bool
    maximum: int
    multiple_of: int
    reference: int
    power: float

    def rate(self, timestamp: Timestamp) -> float:
        """Return the factor of the learning rate, which the power of the size is part of."""
        return self.base(timestamp) * math.pow(self.size_at(timestamp) / self.reference, self.power)

    def base(self, timestamp: Timestamp) -> float:
        """Return the factor that it would be at a constant batch of the reference size."""
        cut = self.decay.cut_at(timestamp)
        if self.smooth or self.factor is None or self.decay.is_before_peak(timestamp):
            return self.decay.value(timestamp)
        return self.decay.top * _fallen(self.factor, _steps(cut, self.factor))

    def size_at(self, timestamp: Timestamp) -> int:
        """Return the size: that without the growth, times the growth, rounded and bounded."""
        return self.grown(self.size_without(timestamp), self.decay.cut_at(timestamp))

    def size_without(self, timestamp: Timestamp) -> int:
        """Return the size without the growth."""
        return self.sizes.decide(timestamp, {}, NO_SIGNALS)[0]

    @property
    def bound(self) -> Bound:
        """The batch sizes."""
        ends = self.sizes.bounds
        return timed(
            self.size_at,
            units=self.sizes.units | {self.decay.axis.unit},
            bounds=None if ends is None else (self.grown(ends[0], 1.0), self.grown(ends[1], 0.0)),
            holds_until=self.holds_until,
            is_coupled=True,
        )

    def holds_until(self, timestamp: Timestamp) -> Hold | None:
        """Return a hold until the schedule has fallen enough for another size."""
        inner = self.sizes.holds_until(timestamp, {})
        if inner is None:
            return None
        size, now = self.size_without(timestamp), self.size_at(timestamp)
        tick = self.decay.next_change(timestamp, lambda cut: self.grown(size, cut) > now)
        return inner if tick is None else inner & Hold(((self.decay.axis, tick),))

    def grown(self, size: int, cut: float) -> int:
        """Return what becomes of `size` once the schedule is cut to the part `cut` of its peak."""
        grown = min(self._grown(size, cut), self.maximum)
        return max(self.multiple_of, grown - grown % self.multiple_of)

    def _grown(self, size: int, cut: float) -> int:
        if cut >= 1:
            return size
        if self.factor is None:
            growth = min((1 + SLACK) / cut, self.maximum) if cut else self.maximum
            return math.floor(size * Fraction(growth))
        steps, enough = _steps(cut, self.factor), math.log(self.maximum) / _log(self.factor)
        steps = math.ceil(enough if steps is None else min(steps, enough))
        return math.floor(size * self.factor**steps)


@lru_cache(maxsize=2)
def _bound_once(coupling: Coupling, horizon: Horizon) -> BoundCoupling:
    """Bind a pair: a plan asks its sizes, its schedule and its warnings for the same."""
    return coupling._bound(horizon)


def _steps(cut: float, factor: Fraction) -> int | None:
    """How often the factor goes into a cut; None where there is nothing left."""
    if cut <= 0:
        return None
    return max(0, math.floor(-math.log(cut) / _log(factor) + SLACK))


def _log(factor: Fraction) -> float:
    return math.log1p(float(factor - 1))  # a float has 7 digits more of 1e-7 than of 1 + 1e-7


def _fallen(factor: Fraction, steps: int | None) -> float:
    """What is left of 1 after so many divisions by the factor."""
    return 0.0 if steps is None else float(1 / factor**steps)


Decaying: TypeAlias = Annotated[ScheduleLike, Check(lambda value, *_: as_schedule(value))]
Sizes: TypeAlias = Annotated[PolicyLike, Check(lambda value, *_: checked_policy(value))]
Continuous: TypeAlias = Literal["continuous"]
"""The batch grows whenever another sample fits in, not by a factor at once."""

DEFAULT_GROWTH = 64
"""How many times as large batches grow where no maximum is given. A schedule that falls to 0 asks
for batches without end: the last one of a cosine is as many times as large as the first as the 2/3
power of the run's number of batches. Beyond 64 times a cosine has 0.2 percent of its steps left to
save."""
_LEAST_FACTOR, _LARGEST_FACTOR = Fraction("1.01"), 2**20
"""Powers of a smaller factor have thousands of digits, and it is as good as 'continuous'."""
_FAR = Timestamp(*[2**62] * len(Timestamp._fields))
"""After the end of any run: where a warm-up of the batch is over."""


@dataclass(frozen=True, slots=True, repr=False)
class Coupling(Timed):
    """A schedule that decays, and a batch size that takes over its decay or a part of it.

    Wherever the schedule falls by a factor, the batch grows by it, and the learning rate falls by
    what `power` leaves: `rate(t) = base(t) * (size(t) / reference) ** power` at every time, where
    `base` is the schedule that constant batches of `reference` would have. That holds through
    rounding and bounds, so from the `maximum` on it is the learning rate alone that falls.

    >>> from stretto.batching import Seesaw
    >>> isinstance(Seesaw(1.0, 16), Coupling)
    True
    """

    error = BatchSizeError
    power: ClassVar[float]
    """The power of the batch size that the learning rate is multiplied by."""
    decay: Decaying
    """The schedule of a run whose batch does not grow."""
    size: Sizes
    """The sizes as they are without the growth: one, or a warm-up of the batch."""
    factor: float | Continuous = field(default=2.0, kw_only=True)
    """By how much the batch grows at once."""
    smooth: bool = field(default=False, kw_only=True)
    """Whether the learning rate follows the curve between two steps of the size."""
    maximum: Size | None = field(default=None, kw_only=True)
    """The size beyond which the learning rate alone falls; None: 64 times that before it grows."""
    multiple_of: Size = field(default=1, kw_only=True)
    """Only multiples of this, at least one: rounded down."""
    reference: Size | None = field(default=None, kw_only=True)
    """The size that the schedule is meant for; None: that of the end of the warm-up."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.maximum is not None and self.multiple_of > self.maximum:
            raise BatchSizeError.cannot(
                f"grow the batch to {self.maximum} by multiples of {self.multiple_of}",
                why="every multiple is beyond that",
                instead=f"write a maximum of at least {self.multiple_of}, or a smaller multiple_of",
            )
        smooth = flag("smooth", self.smooth)
        fill(self, factor=_checked_factor(self.factor, smooth=smooth))

    @property
    @final
    def schedule(self) -> Schedule:
        """The learning rate's schedule."""
        return CoupledSchedule(self)

    @property
    @final
    def policy(self) -> BatchSizePolicy:
        """The batch sizes."""
        return CoupledSizes(self)

    @property
    @final
    def base(self) -> Schedule:
        """The schedule that the same run with constant batches of `reference` would have.

        It is `decay` itself; where the learning rate moves in steps, `decay` rounded up to one.
        """
        return CoupledSchedule(self, follows_size=False)

    @final
    def bind(self, horizon: Horizon) -> BoundCoupling:
        """Resolve every time for one run.

        Raises:
            BatchSizeError: the schedule follows batches or wall time, does not fall on this run or
                rises again; or the sizes without the growth are not a function of time, are beyond
                the maximum, or above the size that the schedule is meant for.
            ConversionError: a time needs a fact that is not known.
        """
        horizon = horizon.with_batch_sizes(None)
        try:
            hash((self, horizon))
        except TypeError:  # of somebody's callable
            return self._bound(horizon)
        return _bound_once(self, horizon)

    @final
    def _bound(self, horizon: Horizon) -> BoundCoupling:
        decay, sizes = (
            Decay.on(horizon, as_schedule(self.decay)),
            as_policy(self.size).bind(horizon),
        )
        if sizes.start or sizes.reads:
            why = f"the sizes before it falls, {self.size!r}, are neither one nor steps nor a ramp"
            raise cannot_grow(self.decay, why, "write a number, steps or a ramp")
        last = sizes.decide(_FAR, {}, NO_SIGNALS)[0]
        maximum = self.maximum or DEFAULT_GROWTH * last
        self._check_factor(decay)
        self._check_sizes(sizes, last, maximum)
        return BoundCoupling(
            decay=decay,
            sizes=sizes,
            factor=None if self.factor == "continuous" else exact(self.factor),
            smooth=self.smooth or self.factor == "continuous",
            maximum=maximum,
            multiple_of=self.multiple_of,
            reference=self.reference or last,
            power=self.power,
        )

    @final
    def _check_factor(self, decay: Decay) -> None:
        """Refuse a factor that the schedule never falls by: nothing would ever move."""
        if self.factor == "continuous" or not decay.last:
            return
        if self.factor > decay.top / decay.last * (1 + SLACK):
            why = f"it falls by less than a factor of {self.factor:g} before the run ends"
            raise cannot_grow(self.decay, why, "write a smaller factor, or 'continuous'")

    @final
    def _check_sizes(self, sizes: Bound, last: int, maximum: int) -> None:
        """Refuse sizes before the growth that would be cut, or lift the rate above the schedule."""
        largest = last if sizes.bounds is None else sizes.bounds[1]
        if largest > max(self.reference or last, last):
            why = f"the batch's warm-up has {largest} and ends with {last}, which lifts the rate"
            reference = Argument("reference", largest)
            instead = (f"write none above {last}, or ", reference, " if the rate is for that")
            raise cannot_grow(self.decay, why, instead)
        if largest > maximum:
            why = f"it has {largest} samples before, which is beyond the maximum of {maximum}"
            bound = Argument("maximum", largest)
            raise cannot_grow(self.decay, why, ("write ", bound, " or more"))
        if (self.reference or last) < self.multiple_of:
            multiple = self.multiple_of
            why = f"it has {last} samples before, and no multiple of {multiple} is that few"
            raise cannot_grow(self.decay, why, f"begin with {multiple}, or round to smaller ones")


@final
@dataclass(frozen=True, slots=True, repr=False)
class CoupledSchedule(Schedule):
    """The schedule of a `Coupling`, which covers the whole run."""

    coupling: Coupling
    follows_size: bool = True
    """Whether it is that of the growing batch, or that of a constant one."""

    def reads(self, horizon: Horizon) -> frozenset[TimeUnit]:
        """Return what the schedule reads, and the units of the sizes."""
        own = frozenset(
            horizon.axis(time.unit).unit for time in as_policy(self.coupling.size).times()
        )
        return own | as_schedule(self.coupling.decay).reads(horizon)

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over the run as a function of the timestamp.

        Raises:
            BatchSizeError: the schedule or the sizes do not allow it.
            ConversionError: a time needs a fact that is not known.
            ScheduleError: it is inside a period, where the batch size is not.
        """
        if scope != RunScope(scope.horizon):
            raise ScheduleError.cannot(
                f"follow {self!r} in a period",
                why="its batch sizes are those of the whole run",
                instead="write the periods inside it: Seesaw(Periods([...]), 16)",
            )
        bound = self.coupling.bind(scope.horizon)
        return bound.rate if self.follows_size else bound.base

    def __repr__(self) -> str:
        return f"{self.coupling!r}.{'schedule' if self.follows_size else 'base'}"


@final
@dataclass(frozen=True, slots=True, repr=False)
class CoupledSizes(BatchSizePolicy):
    """The batch sizes of a `Coupling`."""

    coupling: Coupling

    @property
    def is_coupled(self) -> bool:
        """The learning rate goes by them."""
        return True

    def bind(self, horizon: Horizon) -> Bound:
        """Resolve every time for one run.

        Raises:
            BatchSizeError: the schedule or the sizes do not allow it.
            ConversionError: a time needs a fact that is not known.
        """
        return self.coupling.bind(horizon).bound

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Say so where the bound is none that was given."""
        bound = self.coupling.bind(horizon)
        if self.coupling.maximum is not None or largest <= bound.maximum - bound.multiple_of:
            return ()
        warning = (
            f"batches grow to {largest:,} and no further: {DEFAULT_GROWTH} times the "
            f"{bound.maximum // DEFAULT_GROWTH:,} before, as no maximum is given; give the size "
            "up to which they train as well"
        )
        return (warning,)

    def __repr__(self) -> str:
        return f"{self.coupling!r}.policy"


def _checked_factor(factor: object, *, smooth: bool) -> float | Continuous:
    if factor == "continuous":
        if smooth:
            raise BatchSizeError.cannot(
                "use smooth=True with factor='continuous'",
                why="then both are smooth already",
                instead="leave out one of the two",
            )
        return "continuous"
    try:
        ratio = exact(factor)
    except TimeError:
        ratio = Fraction(0)
    if not _LEAST_FACTOR <= ratio <= _LARGEST_FACTOR:
        raise BatchSizeError.cannot(
            f"grow the batch by a factor of {shown(factor)}",
            why=f"it is not a number from 1.01 to {_LARGEST_FACTOR:,}",
            instead="write 2, or 'continuous'",
        )
    return float(ratio)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Seesaw(Coupling):
    """Grow the batch while the learning rate decays by only the root of what it would have.

    Wherever a schedule would divide the learning rate by `a`, divide it by `sqrt(a)` and multiply
    the batch by `a`: about the same loss at the same samples in fewer optimizer steps, for Adam
    and normalised SGD, as long as the batch stays below the critical size. Up to the peak of the
    schedule nothing changes.

    Formula: `rate(t) = base(t) * sqrt(size(t) / reference)`; with `factor` `a`, where the schedule
    has been cut by `c(t)` since its peak and `k = floor(log_a(1 / c(t)))`, `size(t) = size * a**k`
    and `base(t) = peak * a**-k` (`smooth`: the schedule itself). With `"continuous"`,
    `size(t) = floor(size / c(t))`. Source: Meterez et al. 2025, Seesaw (arXiv 2510.14717),
    algorithm 1.

    >>> from stretto import Horizon, Linear, Seesaw, plan
    >>> pair = Seesaw(Linear(1, 0), 8)
    >>> run = plan(Horizon("640sp"), pair.policy, schedules={"lr": pair.schedule})
    >>> [(stage.size, stage.batches, round(stage.values["lr"].first, 3)) for stage in run.stages]
    [(8, 40, 1.0), (16, 10, 0.707), (32, 3, 0.5), (64, 1, 0.354)]

    Args:
        decay: a schedule that falls after an optional warm-up, with times in samples, epochs,
            tokens or fractions of the run.
        size: the size until the schedule has fallen, or a warm-up of the batch: steps or a ramp,
            whose sizes are multiplied by the growth.
        factor: by how much the batch grows at once, 1.01 or more; `"continuous"`: as soon as
            another sample (or `multiple_of`) fits in.
        smooth: let the learning rate follow the curve between two steps of the size, and rise
            where the size does; left out, it moves in steps, too.
        maximum: the size beyond which the learning rate alone falls; left out, 64 times the size
            before the growth.
        multiple_of: only sizes that are multiples of this, at least one: rounded down.
        reference: the size that the schedule is meant for; left out, that of the end of the
            warm-up of the batch. Smaller sizes before have a smaller learning rate; larger ones
            need a reference as large.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, or there is no such factor; at
            binding, the schedule or the sizes do not allow it.
        ScheduleError: `decay` is not a schedule.
    """

    power = 0.5


@final
@dataclass(frozen=True, slots=True, repr=False)
class IncreaseInsteadOfDecay(Coupling):
    """Grow the batch where the learning rate would decay, and leave the learning rate as it is.

    Wherever a schedule would divide the learning rate by `a`, multiply the batch by `a`: with SGD,
    about the same loss at the same samples in fewer optimizer steps. With Adam it grows the batch
    too fast; use `Seesaw`. From the `maximum` on it is the learning rate that decays.

    Formula: `rate(t) = base(t) * size(t) / reference`, with sizes as for `Seesaw`. Source: Smith et
    al. 2018, "Don't Decay the Learning Rate, Increase the Batch Size" (arXiv 1711.00489).

    >>> from stretto import Horizon, plan
    >>> from stretto.batching import IncreaseInsteadOfDecay
    >>> from stretto.schedules import MultiStep
    >>> pair = IncreaseInsteadOfDecay(MultiStep(["30%", "60%"], 0.2), 32, factor=5, maximum=200)
    >>> run = plan(Horizon("9600sp"), pair.policy, schedules={"lr": pair.schedule})
    >>> [(stage.size, stage.batches, round(stage.values["lr"].last, 3)) for stage in run.stages]
    [(32, 90, 1.0), (160, 18, 1.0), (200, 20, 0.25)]

    Args:
        decay: a schedule that falls after an optional warm-up, with times in samples, epochs,
            tokens or fractions of the run.
        size: the size until the schedule has fallen, or a warm-up of the batch: steps or a ramp,
            whose sizes are multiplied by the growth.
        factor: by how much the batch grows at once, 1.01 or more; `"continuous"`: as soon as
            another sample (or `multiple_of`) fits in, which is the way for a schedule that has
            steps.
        smooth: let the learning rate follow the curve between two steps of the size, and rise
            where the size does; left out, it moves in steps, too.
        maximum: the size beyond which the learning rate alone falls; left out, 64 times the size
            before the growth.
        multiple_of: only sizes that are multiples of this, at least one: rounded down.
        reference: the size that the schedule is meant for; left out, that of the end of the
            warm-up of the batch. Smaller sizes before have a smaller learning rate; larger ones
            need a reference as large.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, or there is no such factor; at
            binding, the schedule or the sizes do not allow it.
        ScheduleError: `decay` is not a schedule.
    """

    power = 1.0


def couplings_in(schedule: Schedule) -> Iterator[Coupling]:
    """Yield the pairs whose schedule is `schedule`, or one of those that it multiplies.

    >>> from stretto.batching import Seesaw
    >>> pair = Seesaw(1.0, 16)
    >>> list(couplings_in(pair.schedule * 0.5)) == [pair], list(couplings_in(pair.base))
    (True, [])
    """
    if isinstance(schedule, Product):
        for one in schedule.schedules:
            yield from couplings_in(one)
    elif isinstance(schedule, CoupledSchedule) and schedule.follows_size:
        yield schedule.coupling


def check_pairs(
    schedules: Mapping[str, Schedule],
    *,
    policy: BatchSizePolicy | None = None,
    rule: LearningRateRule | None = None,
) -> None:
    """Refuse what does not go with the schedules that follow a batch size by themselves.

    Args:
        schedules: all that the run has, by name.
        policy: its batch sizes, which must be those of the same pair; None: unknown.
        rule: its learning rate rule, which would count the size twice.

    Raises:
        BatchSizeError: there is another batch size or a rule.
    """
    pairs = [(name, one) for name, each in schedules.items() for one in couplings_in(each)]
    for name, pair in pairs:
        is_rate = is_learning_rate(name)  # a rule leaves all else alone
        if is_rate and rule is not None and not isinstance(rule, NoRule):
            raise BatchSizeError.cannot(
                f"follow the batch size by {rule!r}",
                why=f"{pair!r} says itself how the learning rate goes with it",
                instead="leave the rule out",
            )
        if policy is not None and policy != pair.policy:
            raise BatchSizeError.cannot(
                f"use the schedule of {pair!r} with batch sizes of {policy!r}",
                why="its learning rate goes by the sizes of the same pair",
                instead="pass batch_size=pair.policy and schedules={'lr': pair.schedule} of "
                "one pair, or pair.base for constant batches",
            )


def paired(
    sizes: PolicyLike | Coupling, schedules: Mapping[str, Any], rule: object = None
) -> tuple[BatchSizePolicy, dict[str, Any]]:
    """Return batch sizes and schedules, of which a pair such as `Seesaw` is both.

    Args:
        sizes: batch sizes, or a pair.
        schedules: by hyper-parameter, a schedule or several that multiply.
        rule: the learning rate rule; with one, the sizes of a pair need no schedule.

    >>> from stretto.schedules import Cosine
    >>> policy, schedules = paired(Seesaw(Cosine(), 16, maximum=64), {})
    >>> list(schedules)
    ['lr']

    Raises:
        BatchSizeError: there is another schedule of the learning rate beside a pair, or only the
            sizes of one.
    """
    rates = [name for name in schedules if is_learning_rate(name)]
    if isinstance(sizes, Coupling):
        if rates:
            raise BatchSizeError.cannot(
                f"use the schedule of {rates[0]!r} with {sizes!r}",
                why="the pair has the schedule of the learning rate",
                instead=f"leave schedules={{{rates[0]!r}: ...}} out",
            )
        return sizes.policy, {**schedules, "lr": sizes.schedule}
    policy = as_policy(sizes)
    found = [
        coupling
        for each in schedules.values()
        for one in (each if isinstance(each, (list, tuple)) else [each])
        if isinstance(one, Schedule)
        for coupling in couplings_in(one)
    ]
    if policy.is_coupled and not found and rule is None:
        raise BatchSizeError.cannot(
            f"use {policy!r} without its schedule",
            why="the learning rate would not follow these sizes",
            instead="pass the pair itself: batch_size=Seesaw(schedule, 16, maximum=256)",
        )
    return policy, dict(schedules)
