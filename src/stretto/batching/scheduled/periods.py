"""`PeriodSizes`: one policy after another, each on a clock of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NoReturn, TypeAlias, final

from stretto.batching.policy import BatchSizePolicy, BoundPolicy
from stretto.batching.scheduled.bound_periods import BoundPeriods, Period, sub_horizon
from stretto.batching.scheduled.staircase import line
from stretto.batching.wrappers import checked_policy
from stretto.batching.written import WAYS, written
from stretto.errors import BatchSizeError, shown
from stretto.schedules.fields import fill
from stretto.timing import Axis, Horizon, Time, TimeLike, TimeUnit
from stretto.timing.conversion import rounded

Rest: TypeAlias = Literal["rest"]
"""The length of the period that takes what the others leave of the run."""
Periods: TypeAlias = Iterable[tuple[TimeLike, object]]
"""Lengths, each with a policy or what one is written as."""


@written(WAYS, "periods", "periods")
@final
@dataclass(frozen=True, slots=True, init=False)
class PeriodSizes(BatchSizePolicy):
    """Policies one after another; each sees a clock that starts with its period.

    Times inside a period are relative to it: a ramp starts when the period does, and fractions
    (`dur`) are of the period's length (in whole counts where its unit has no parts). One period
    may be as long as the `"rest"`; without one, the last policy goes on after its period.

    Lengths of different units may be mixed. One that is not in the unit of the period before it
    is counted from the first batch of its period.

    >>> PeriodSizes([("10%", 8), ("rest", "0dur:16 50%:32")])
    PeriodSizes([('0.1dur', Fixed(8)), ('rest', Steps('0dur:16 0.5dur:32'))])

    Args:
        periods: pairs of a length, or `"rest"`, and a policy (or a size, or steps as text).

    Raises:
        BatchSizeError: there are no periods, one has no length, or two are `"rest"`.
        TimeError: a length cannot be read.
    """

    periods: tuple[tuple[Time | Rest, BatchSizePolicy], ...]

    def __init__(self, periods: Periods) -> None:
        pairs = list(periods)
        read = [_pair(pair) for pair in pairs]
        if not read:
            _refuse(pairs, "there are none", "[('10%', 8), ('rest', 64)]")
        for length, _ in read:
            if isinstance(length, Time) and length.amount <= 0:
                _refuse(pairs, f"'{length}' is not longer than 0", "lengths such as '10%'")
        if sum(length == "rest" for length, _ in read) > 1:
            _refuse(pairs, "two of them are the 'rest'", "lengths such as '10%' for all but one")
        fill(self, periods=tuple(read))

    def bind(self, horizon: Horizon) -> BoundPolicy:
        """Resolve the lengths for one run, and each policy on its own period.

        Raises:
            BatchSizeError: nothing is left for the `"rest"`, or how much cannot be known.
            ConversionError: a time needs a fact that is not known.
        """
        run_axis = line(horizon, horizon.axis(TimeUnit.DURATION))
        periods: list[Period] = []
        axis, offset, chain = run_axis, Fraction(0), 0
        for length, policy in self.periods:
            ticks: Fraction | None
            if isinstance(length, Time):
                own = line(horizon, horizon.axis(length.unit))
                ticks = horizon.ticks(length, own)
            else:
                own, ticks = (axis if periods else run_axis), self._rest(horizon, run_axis)
            if own is not axis:
                axis, offset, chain = own, Fraction(0), chain + bool(periods)
            end = None if ticks is None else offset + ticks
            inside = _inside(horizon, axis, ticks)
            periods.append(
                Period(
                    policy, policy.bind(inside or horizon), inside is None, axis, chain, offset, end
                )
            )
            offset = end or offset
        return BoundPeriods(horizon, tuple(periods), {})

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return what the policies of the periods warn of."""
        return tuple(line for _, one in self.periods for line in one.warnings(horizon, largest))

    def _rest(self, horizon: Horizon, axis: Axis) -> Fraction | None:
        """The ticks of the rest on the axis of the run; None where only the run can tell."""
        lengths = [length for length, _ in self.periods if isinstance(length, Time)]
        if any(line(horizon, horizon.axis(length.unit)) is not axis for length in lengths):
            if self.periods[-1][0] != "rest":
                _refuse(
                    list(map(str, lengths)),
                    "what is left for the 'rest' cannot be known before the run",
                    "the lengths in the unit of max_duration, or put the 'rest' last",
                )
            return None
        whole = horizon.ticks(horizon.max_duration, axis)
        rest = whole - sum(horizon.ticks(length, axis) for length in lengths)
        if rest <= 0:
            _refuse(
                list(map(str, lengths)),
                f"they leave nothing of the run of {horizon.max_duration} for the 'rest'",
                "shorter ones, or leave out the 'rest'",
            )
        return rest

    def __repr__(self) -> str:
        shown = ", ".join(f"({str(length)!r}, {policy!r})" for length, policy in self.periods)
        return f"PeriodSizes([{shown}])"


def _inside(horizon: Horizon, axis: Axis, ticks: Fraction | None) -> Horizon | None:
    """The run that a period of `ticks` is to the policy inside it."""
    if ticks is None:
        return None
    unit = axis.unit
    if unit is TimeUnit.SAMPLE and horizon.dataset_num_samples is not None:
        unit = TimeUnit.EPOCH  # which has parts, so that no fraction of a sample is rounded away
    each = horizon.ticks(Time(1, unit), axis)
    return sub_horizon(horizon, rounded(ticks / each, unit))


def _pair(pair: object) -> tuple[Time | Rest, BatchSizePolicy]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        _refuse(pair, "it is not a pair (length, policy)", "('10%', 8)")
    length, policy = pair
    return "rest" if length == "rest" else Time(length), checked_policy(policy)


def _refuse(periods: object, why: str, write: str) -> NoReturn:
    raise BatchSizeError.cannot(
        f"follow the periods {shown(periods)}", why=why, instead=f"write {write}"
    )
