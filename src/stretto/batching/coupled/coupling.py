"""`Coupling`: a schedule that decays goes in, a schedule and a batch size policy come out.

The two belong together. Both are functions of time alone, so they are planned before the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, TypeAlias, final

from stretto.batching.coupled.bound_coupling import SLACK, BoundCoupledSizes, BoundCoupling
from stretto.batching.coupled.decay import Decay, cannot_grow
from stretto.batching.parse import PolicyLike, as_policy
from stretto.batching.policy import BatchSizePolicy, BoundPolicy, Size, TimedPolicy
from stretto.batching.wrappers import checked_policy
from stretto.batching.written import flag
from stretto.errors import Argument, BatchSizeError, ScheduleError, TimeError, shown
from stretto.schedules import (
    BoundSchedule,
    RunScope,
    Schedule,
    ScheduleLike,
    Scope,
    as_schedule,
)
from stretto.schedules.fields import Check, Timed, check_fields, fill
from stretto.timing import Horizon, Timestamp, TimeUnit
from stretto.timing.number import exact

Decaying: TypeAlias = Annotated[ScheduleLike, Check(lambda value, *_: as_schedule(value))]
Sizes: TypeAlias = Annotated[PolicyLike, Check(lambda value, *_: checked_policy(value))]
Continuous: TypeAlias = Literal["continuous"]
"""The batch grows whenever another sample fits in, not by a factor at once."""

DEFAULT_GROWTH = 64
"""How many times as large batches grow where no maximum is given. A schedule that falls to 0 asks
for batches without end: the last one of a cosine is as many times as large as the first as the 2/3
power of the run's number of batches. Beyond 64 times a cosine has 0.2 percent of its steps left to
save."""
_LARGEST_FACTOR = 2**20
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
        decay, sizes = (
            Decay.on(horizon, as_schedule(self.decay)),
            as_policy(self.size).bind(horizon),
        )
        if not isinstance(sizes, TimedPolicy):
            why = f"the sizes before it falls, {self.size!r}, are neither one nor steps nor a ramp"
            raise cannot_grow(self.decay, why, "write a number, steps or a ramp")
        last = sizes.size_at(_FAR)
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
    def _check_sizes(self, sizes: TimedPolicy, last: int, maximum: int) -> None:
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

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Resolve every time for one run.

        Raises:
            BatchSizeError: the schedule or the sizes do not allow it.
            ConversionError: a time needs a fact that is not known.
        """
        return BoundCoupledSizes(self.coupling.bind(horizon))

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
    if not 1 < ratio <= _LARGEST_FACTOR or float(ratio) == 1:
        raise BatchSizeError.cannot(
            f"grow the batch by a factor of {shown(factor)}",
            why=f"it is not a number above 1 and up to {_LARGEST_FACTOR:,}",
            instead="write 2, or 'continuous'",
        )
    return float(ratio)
