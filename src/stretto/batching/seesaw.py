"""`Seesaw` and other pairs of a schedule and batch sizes.

A pair is made of a schedule that decays. Its schedule and its batch size policy are functions of
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
    Count,
    Hold,
    Size,
    timed,
)
from stretto.batching.split import LearningRateRule, is_learning_rate
from stretto.batching.steps import PolicyLike, as_policy
from stretto.batching.wrappers import checked_policy
from stretto.errors import Argument, BatchSizeError, ScheduleError, Text
from stretto.schedules import (
    BoundSchedule,
    Product,
    RunScope,
    Schedule,
    ScheduleLike,
    Scope,
    as_schedule,
)
from stretto.schedules.fields import Check, Timed, check_fields, number
from stretto.timing import Horizon, Timestamp, TimeUnit
from stretto.timing.grammar import exact

SLACK = 1e-9
"""Tolerance of a cut, relative: 0.1 ** 2 is a little more than 0.01."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCoupling:
    """The pair on one run."""

    decay: Decay
    sizes: Bound
    """The sizes without growth."""
    factor: Fraction | None
    """The factor by which the batch grows at once; None: continuously."""
    smooth: bool
    maximum: int
    multiple_of: int
    reference: int
    power: float

    def rate(self, timestamp: Timestamp) -> float:
        """Return the factor of the learning rate, including the power of the size."""
        return self.base(timestamp) * math.pow(self.size_at(timestamp) / self.reference, self.power)

    def base(self, timestamp: Timestamp) -> float:
        """Return the factor for constant batches of the reference size."""
        cut = self.decay.cut_at(timestamp)
        if self.smooth or self.factor is None or self.decay.is_before_peak(timestamp):
            return self.decay.value(timestamp)
        steps = _steps(cut, self.factor)
        return 0.0 if steps is None else self.decay.top * float(1 / self.factor**steps)

    def size_at(self, timestamp: Timestamp) -> int:
        """Return the size without growth times the growth, rounded and bounded."""
        return self.grown(self.size_without(timestamp), self.decay.cut_at(timestamp))

    def size_without(self, timestamp: Timestamp) -> int:
        """Return the size without growth."""
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
        """Return `size` after the growth for a schedule at the fraction `cut` of its peak."""
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
    """Bind a pair once for its sizes, its schedule and its warnings."""
    return coupling._bound(horizon)


def _steps(cut: float, factor: Fraction) -> int | None:
    """Return how many times the factor goes into a cut; None if the cut is 0."""
    if cut <= 0:
        return None
    return max(0, math.floor(-math.log(cut) / _log(factor) + SLACK))


def _log(factor: Fraction) -> float:
    return math.log1p(float(factor - 1))  # for factors near 1, more exact than log


Decaying: TypeAlias = Annotated[ScheduleLike, Check(lambda value, *_: as_schedule(value))]
Sizes: TypeAlias = Annotated[PolicyLike, Check(lambda value, *_: checked_policy(value))]
Continuous: TypeAlias = Literal["continuous"]
"""The batch grows whenever another sample fits in, not by a factor at once."""
# Powers of a factor below 1.01 have thousands of digits.
_FACTOR = number("'continuous' or from 1.01 to 2^20", lambda value: 1.01 <= value <= 2**20)


def _growth(value: object, *given: Any) -> object:
    return value if value == "continuous" else _FACTOR.converted(value, *given)


Growth: TypeAlias = Annotated[float | Continuous, Check(_growth)]
DEFAULT_GROWTH = 64
"""The largest growth without a given maximum. A schedule that falls to 0 would grow batches without
end: the last batch of a cosine is N ** (2/3) times as large as the first in a run of N batches.
Beyond 64 times, a cosine has 0.2 percent of its steps left to save."""
_FAR = Timestamp(*[2**62] * len(Timestamp._fields))
"""After the end of any run, so after a warm-up of the batch."""


@dataclass(frozen=True, slots=True, repr=False)
class Coupling(Timed):
    """A schedule that decays, and a batch size that takes over its decay or a part of it.

    When the schedule falls by a factor, the batch grows by it and the learning rate falls by the
    rest: `rate(t) = base(t) * (size(t) / reference) ** power` at every time, where `base` is the
    schedule for constant batches of `reference`. This includes rounding and bounds, so from the
    `maximum` on only the learning rate falls.

    >>> from stretto.batching import Seesaw
    >>> isinstance(Seesaw(1.0, 16), Coupling)
    True
    """

    error = BatchSizeError
    power: ClassVar[float]
    """The power of the batch size that the learning rate is multiplied by."""
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
    multiple_of: Count = field(default=1, kw_only=True)
    """Sizes are rounded down to multiples of this, at least one."""
    reference: Size | None = field(default=None, kw_only=True)
    """The size that the schedule is meant for; None: the size after the warm-up of the batch."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.maximum is not None and self.multiple_of > self.maximum:
            why, instead = f"it is below multiple_of={self.multiple_of}", "write at least that"
            raise BatchSizeError.bad("maximum", self.maximum, why, instead)

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
        """The schedule for constant batches of `reference`.

        It is `decay`, rounded up to a step if the learning rate moves in steps.
        """
        return CoupledSchedule(self, follows_size=False)

    @final
    def bind(self, horizon: Horizon) -> BoundCoupling:
        """Resolve every time for one run.

        Raises:
            BatchSizeError: the schedule follows batches or wall time, does not fall on this run or
                rises again; or the sizes without growth do not follow from time alone, or exceed
                the maximum or the reference.
            ConversionError: a time needs a fact that is not known.
        """
        horizon = horizon.with_batch_sizes(None)
        try:
            hash((self, horizon))
        except TypeError:  # a callable without a hash
            return self._bound(horizon)
        return _bound_once(self, horizon)

    @final
    def _bound(self, horizon: Horizon) -> BoundCoupling:
        decay = Decay.on(horizon, as_schedule(self.decay))
        sizes = as_policy(self.size).bind(horizon)
        if sizes.start or sizes.reads:
            why = f"{self.size!r} does not follow from time alone"
            raise self._refused(why, "write a number, steps or a ramp")
        last = sizes.decide(_FAR, {}, NO_SIGNALS)[0]
        maximum, reference = self.maximum or DEFAULT_GROWTH * last, self.reference or last
        factor = None if self.factor == "continuous" else exact(self.factor)
        # Otherwise nothing would ever move.
        if factor and decay.last and factor > decay.top / decay.last * (1 + SLACK):
            why = f"it falls by less than a factor of {self.factor:g} before the run ends"
            raise self._refused(why, "write a smaller factor, or 'continuous'")
        largest = last if sizes.bounds is None else sizes.bounds[1]
        if largest > max(reference, last):
            why = f"its warm-up has {largest} and ends with {last}, which lifts the rate"
            raise self._refused(why, ("write smaller ones, or ", Argument("reference", largest)))
        if largest > maximum:
            why = f"{largest} is already above the maximum of {maximum}"
            raise self._refused(why, ("write ", Argument("maximum", largest), " or more"))
        if reference < self.multiple_of:
            why = f"no multiple of {self.multiple_of} is as small as {reference}"
            raise self._refused(why, f"begin with {self.multiple_of}, or round to smaller ones")
        return BoundCoupling(
            decay=decay,
            sizes=sizes,
            factor=factor,
            smooth=self.smooth or factor is None,
            maximum=maximum,
            multiple_of=self.multiple_of,
            reference=reference,
            power=self.power,
        )

    def _refused(self, why: str, instead: Text) -> BatchSizeError:
        return cannot_grow(self.decay, why, instead)


@final
@dataclass(frozen=True, slots=True, repr=False)
class CoupledSchedule(Schedule):
    """The schedule of a `Coupling`, which covers the whole run."""

    coupling: Coupling
    follows_size: bool = True
    """Whether it is the schedule for the growing batch; if not, for a constant one."""

    def reads(self, horizon: Horizon) -> frozenset[TimeUnit]:
        """Return what the schedule reads, and the units of the sizes."""
        times = as_policy(self.coupling.size).times()
        own = frozenset(horizon.axis(time.unit).unit for time in times)
        return own | as_schedule(self.coupling.decay).reads(horizon)

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over the run as a function of the timestamp.

        Raises:
            BatchSizeError: the schedule or the sizes do not allow it.
            ConversionError: a time needs a fact that is not known.
            ScheduleError: it is inside a period.
        """
        if scope != RunScope(scope.horizon):
            why = "its batch sizes are those of the whole run"
            instead = "write the periods inside it: Seesaw(Periods([...]), 16)"
            raise ScheduleError.cannot(f"follow {self!r} in a period", why=why, instead=instead)
        bound = self.coupling.bind(scope.horizon)
        return bound.rate if self.follows_size else bound.base

    def __repr__(self) -> str:
        return f"{self.coupling!r}.{'schedule' if self.follows_size else 'base'}"


@final
@dataclass(frozen=True, slots=True, repr=False)
class CoupledSizes(BatchSizePolicy):
    """The batch sizes of a `Coupling`."""

    coupling: Coupling
    is_coupled = True

    def bind(self, horizon: Horizon) -> Bound:
        """Resolve every time for one run.

        Raises:
            BatchSizeError: the schedule or the sizes do not allow it.
            ConversionError: a time needs a fact that is not known.
        """
        return self.coupling.bind(horizon).bound

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return a line if the default maximum stops the growth."""
        bound = self.coupling.bind(horizon)
        if self.coupling.maximum is not None or largest <= bound.maximum - bound.multiple_of:
            return ()
        before = f"{DEFAULT_GROWTH} times the {bound.maximum // DEFAULT_GROWTH:,} before"
        return (f"batches grow to {largest:,}, by default at most {before}; pass a maximum",)

    def __repr__(self) -> str:
        return f"{self.coupling!r}.policy"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Seesaw(Coupling):
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
    >>> run = plan(Horizon("640sp"), pair.policy, schedules={"lr": pair.schedule})
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
            of the batch. Smaller sizes before have a smaller learning rate; larger ones need a
            reference as large.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, or there is no such factor; at
            binding, the schedule or the sizes do not allow it.
        ScheduleError: `decay` is not a schedule.
    """

    power = 0.5


@final
@dataclass(frozen=True, slots=True, repr=False)
class IncreaseInsteadOfDecay(Coupling):
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
    >>> run = plan(Horizon("9600sp"), pair.policy, schedules={"lr": pair.schedule})
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
            of the batch. Smaller sizes before have a smaller learning rate; larger ones need a
            reference as large.

    Raises:
        BatchSizeError: a size is not an integer of at least 1, or there is no such factor; at
            binding, the schedule or the sizes do not allow it.
        ScheduleError: `decay` is not a schedule.
    """

    power = 1.0


def couplings_in(schedule: Schedule) -> Iterator[Coupling]:
    """Yield the pairs whose schedule is `schedule` or one of its factors.

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
    """Refuse batch sizes and rules that do not fit the schedules of pairs.

    Args:
        schedules: all schedules of the run, by name.
        policy: its batch sizes, which must be those of the same pair; None: unknown.
        rule: its learning rate rule, which would count the size twice.

    Raises:
        BatchSizeError: there is another batch size or a rule.
    """
    pairs = [(name, one) for name, each in schedules.items() for one in couplings_in(each)]
    for name, pair in pairs:
        if is_learning_rate(name) and rule is not None:
            why, instead = f"the learning rate of {pair!r} already follows it", "leave the rule out"
            raise BatchSizeError.bad("rule", rule, why, instead)
        if policy is not None and policy != pair.policy:
            why = f"the learning rate follows the sizes of {pair!r}"
            instead = "pass the pair itself as batch_size, or pair.base for constant batches"
            raise BatchSizeError.bad("batch_size", policy, why, instead)


def paired(
    sizes: PolicyLike | Coupling, schedules: Mapping[str, Any], rule: object = None
) -> tuple[BatchSizePolicy, dict[str, Any]]:
    """Return batch sizes and schedules; a pair such as `Seesaw` is both.

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
            what = f"use the schedule of {rates[0]!r} with {sizes!r}"
            why, instead = "the pair has the schedule of the learning rate", "leave the other out"
            raise BatchSizeError.cannot(what, why=why, instead=instead)
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
        what, why = f"use {policy!r} alone", "the learning rate would not follow these sizes"
        raise BatchSizeError.cannot(what, why=why, instead="pass the pair itself as batch_size")
    return policy, dict(schedules)
