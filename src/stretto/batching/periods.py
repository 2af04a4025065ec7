"""Batch sizes from one policy after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NoReturn, TypeAlias, cast, final

from stretto.batching.policy import (
    BatchSizePolicy,
    Bound,
    Decision,
    Hold,
    PolicyState,
    Signals,
    inner_state,
)
from stretto.batching.steps import line
from stretto.batching.wrappers import checked_policy
from stretto.errors import BatchSizeError, shown
from stretto.schedules.fields import fill
from stretto.timing import Axis, Horizon, Time, TimeLike, Timestamp, TimeUnit
from stretto.timing.conversion import rounded

_COUNTERS = ("epoch", "batch", "sample", "token", "run_nanoseconds")
_AXIS_COUNTERS = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.SECOND: "run_nanoseconds",
}


@final
@dataclass(frozen=True, slots=True)
class Period:
    """One period on a run. Periods that are counted on one axis without a break form a chain."""

    bound: Bound
    """The policy on the period's own run."""
    axis: Axis
    chain: int
    begin: Fraction
    """Ticks from the start of its chain; exact, so that thirds add up to a whole."""
    end: Fraction | None
    """None: the end of the run."""


@final
@dataclass(frozen=True, slots=True)
class PeriodsRun:
    """Periods on one run; remembers the present one and what the clock read when it began."""

    horizon: Horizon
    periods: tuple[Period, ...]

    @property
    def bound(self) -> Bound:
        """The policy: static if all are and no period is as long as a wall time."""
        inner = [period.bound for period in self.periods]
        axes = [period.axis.unit for period in self.periods[:-1]]
        known = [one.bounds for one in inner if one.bounds is not None]
        return Bound(
            decide=self.decide,
            start=self._began(0, 0, Timestamp()),
            holds_until=self.holds_until,
            is_static=all(one.is_static for one in inner) and TimeUnit.SECOND not in axes,
            units=frozenset(axes).union(*(one.units for one in inner)),
            reads=frozenset[str]().union(*(one.reads for one in inner)),
            bounds=(min(least for least, _ in known), max(most for _, most in known))
            if len(known) == len(inner)
            else None,
            log_values=lambda state: self._present(state).log_values(inner_state(state)),
            sizes=lambda state: self._present(state).sizes(inner_state(state)),
            fits=self._fits,
        )

    def _fits(self, state: PolicyState) -> bool:
        names = {"period", "anchor", "inner", *_COUNTERS}
        if set(state) != names or not 0 <= cast(int, state["period"]) < len(self.periods):
            return False
        return self._present(state).accepts(inner_state(state))

    def _present(self, state: PolicyState) -> Bound:
        return self.periods[cast(int, state["period"])].bound

    def decide(self, timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
        """Return what the policy of the present period decides, on the period's clock."""
        state = self._entered(timestamp, state)
        began = _timestamp(state)
        since, inner = self._since(timestamp, began), inner_state(state)
        size, inner = self._present(state).decide(since, inner, signals)
        return size, {**state, "inner": inner}

    def holds_until(self, timestamp: Timestamp, state: PolicyState) -> Hold | None:
        """Return the hold of the policy of the present period, ended with the period."""
        number, began = cast(int, state["period"]), _timestamp(state)
        bound = self.periods[number].bound
        hold = bound.holds_until(self._since(timestamp, began), inner_state(state))
        if hold is None:
            return None
        moved = Hold(tuple((axis, tick + axis.read(began)) for axis, tick in hold.limits))
        end = self._end(number, state)
        return moved if end is None else moved & Hold(((self.periods[number].axis, end),))

    def _entered(self, timestamp: Timestamp, state: PolicyState) -> PolicyState:
        """The state after moving on past every period that has ended at `timestamp`."""
        while True:
            number = cast(int, state["period"])
            axis, end = self.periods[number].axis, self._end(number, state)
            if end is None or axis.read(timestamp) < end:
                return state
            following, anchor = self.periods[number + 1], cast(int, state["anchor"])
            if following.chain != self.periods[number].chain:
                anchor = following.axis.read(timestamp)
            began = math.ceil(anchor + following.begin)
            counter = _AXIS_COUNTERS[following.axis.unit]
            state = self._began(number + 1, anchor, timestamp._replace(**{counter: began}))

    def _end(self, number: int, state: PolicyState) -> int | None:
        """The tick at which a period ends; None for the last one, which goes on."""
        end = self.periods[number].end
        if end is None or number == len(self.periods) - 1:
            return None
        return math.ceil(cast(int, state["anchor"]) + end)

    def _began(self, number: int, anchor: int, began: Timestamp) -> PolicyState:
        """The state of a period that begins at `began`."""
        counts = {name: began[Timestamp._fields.index(name)] for name in _COUNTERS}
        state: PolicyState = {"period": number, "anchor": anchor, **counts}
        return {**state, "inner": self.periods[number].bound.start}

    def _since(self, timestamp: Timestamp, began: Timestamp) -> Timestamp:
        """The clock of a period: what has passed since it began."""
        epoch, batch, sample, token, _, within, _, wall, *_ = timestamp
        epoch, sample = epoch - began.epoch, sample - began.sample
        num_samples = self.horizon.dataset_num_samples
        if num_samples is not None:
            epoch, within = divmod(sample, num_samples)
        return timestamp._replace(
            epoch=epoch,
            batch=batch - began.batch,
            sample=sample,
            token=token - began.token,
            sample_in_epoch=within,
            run_nanoseconds=wall - began.run_nanoseconds,
        )


def _timestamp(state: PolicyState) -> Timestamp:
    return Timestamp(**{name: cast(int, state[name]) for name in _COUNTERS})


Rest: TypeAlias = Literal["rest"]
"""The length of the period that takes what the others leave of the run."""
Periods: TypeAlias = Iterable[tuple[TimeLike, object]]
"""Lengths, each with a policy or what one is written as."""


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

    def bind(self, horizon: Horizon) -> Bound:
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
            inside = horizon if ticks is None else _inside(horizon, axis, ticks)
            if ticks is None and any(one.unit is TimeUnit.DURATION for one in policy.times()):
                _refuse(
                    [repr(policy)],
                    "how long the 'rest' is, which its fractions are of, only the run can tell",
                    "its times in other units, or all lengths in the unit of max_duration",
                )
            periods.append(Period(policy.bind(inside), axis, chain, offset, end))
            offset = end or offset
        return PeriodsRun(horizon, tuple(periods)).bound

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


def _inside(horizon: Horizon, axis: Axis, ticks: Fraction) -> Horizon:
    """The run that a period of `ticks` is to the policy inside it."""
    unit = axis.unit
    if unit is TimeUnit.SAMPLE and horizon.dataset_num_samples is not None:
        unit = TimeUnit.EPOCH  # which has parts, so that no fraction of a sample is rounded away
    each = horizon.ticks(Time(1, unit), axis)
    return Horizon(
        rounded(ticks / each, unit),
        dataset_num_samples=horizon.dataset_num_samples,
        dataset_num_tokens=horizon.dataset_num_tokens,
        tokens_per_sample=horizon.tokens_per_sample,
        last_batch=horizon.last_batch,
    )


def _pair(pair: object) -> tuple[Time | Rest, BatchSizePolicy]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        _refuse(pair, "it is not a pair (length, policy)", "('10%', 8)")
    length, policy = pair
    return "rest" if length == "rest" else Time(length), checked_policy(policy)


def _refuse(periods: object, why: str, write: str) -> NoReturn:
    raise BatchSizeError.cannot(
        f"follow the periods {shown(periods)}", why=why, instead=f"write {write}"
    )
