"""Batch sizes from one policy after another."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias, cast, final

from stretto.batching.policy import (
    BatchSizePolicy,
    Bound,
    Decision,
    Hold,
    PolicyState,
    Signals,
    inner_state,
)
from stretto.batching.steps import PolicyLike, as_policy, line
from stretto.errors import BatchSizeError
from stretto.schedules.fields import fill, interval, time_or_rest
from stretto.timing import Axis, Horizon, Time, TimeLike, Timestamp, TimeUnit
from stretto.timing.time import rounded

_COUNTERS = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.SECOND: "run_nanoseconds",
}
"""The counters that a period starts anew, by unit."""


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
    """Periods on one run; remembers the present one and the timestamp of its start."""

    horizon: Horizon
    periods: tuple[Period, ...]

    @property
    def bound(self) -> Bound:
        """The policy: static if all are and no length is a wall time."""
        inner = [period.bound for period in self.periods]
        axes = [period.axis.unit for period in self.periods[:-1]]
        known = [one.bounds for one in inner if one.bounds is not None]
        bounds = None
        if len(known) == len(inner):
            bounds = min(least for least, _ in known), max(most for _, most in known)
        return Bound(
            decide=self.decide,
            start=self._began(0, 0, Timestamp()),
            holds_until=self.holds_until,
            is_static=all(one.is_static for one in inner) and TimeUnit.SECOND not in axes,
            units=frozenset(axes).union(*(one.units for one in inner)),
            reads=frozenset[str]().union(*(one.reads for one in inner)),
            bounds=bounds,
            log_values=lambda state: self._present(state).bound.log_values(inner_state(state)),
            sizes=lambda state: self._present(state).bound.sizes(inner_state(state)),
            fits=self._fits,
        )

    def _fits(self, state: PolicyState) -> bool:
        if set(state) != {"period", "anchor", *_COUNTERS.values(), "inner"}:
            return False
        is_known = cast(int, state["period"]) in range(len(self.periods))
        return is_known and self._present(state).bound.accepts(inner_state(state))

    def _present(self, state: PolicyState) -> Period:
        return self.periods[cast(int, state["period"])]

    def decide(self, timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
        """Return what the policy of the present period decides, on the period's clock."""
        # Move on past every period that has ended.
        while (end := self._end(state)) is not None:
            period = self._present(state)
            if period.axis.read(timestamp) < end:
                break
            number, anchor = cast(int, state["period"]) + 1, cast(int, state["anchor"])
            following = self.periods[number]
            if following.chain != period.chain:
                anchor = following.axis.read(timestamp)
            began = {_COUNTERS[following.axis.unit]: math.ceil(anchor + following.begin)}
            state = self._began(number, anchor, timestamp._replace(**began))
        since, inner = self._since(timestamp, state), inner_state(state)
        size, inner = self._present(state).bound.decide(since, inner, signals)
        return size, {**state, "inner": inner}

    def holds_until(self, timestamp: Timestamp, state: PolicyState) -> Hold | None:
        """Return the hold of the policy of the present period, ended with the period."""
        period, end, began = self._present(state), self._end(state), _timestamp(state)
        hold = period.bound.holds_until(self._since(timestamp, state), inner_state(state))
        if hold is None:
            return None
        moved = Hold(tuple((axis, tick + axis.read(began)) for axis, tick in hold.limits))
        return moved if end is None else moved & Hold(((period.axis, end),))

    def _end(self, state: PolicyState) -> int | None:
        """Return the tick at which the present period ends; None for the last one."""
        end = self._present(state).end
        if end is None or state["period"] == len(self.periods) - 1:
            return None
        return math.ceil(cast(int, state["anchor"]) + end)

    def _began(self, number: int, anchor: int, began: Timestamp) -> PolicyState:
        """Return the state of a period that begins at `began`."""
        counts = {name: getattr(began, name) for name in _COUNTERS.values()}
        inner = self.periods[number].bound.start
        return {"period": number, "anchor": anchor, **counts, "inner": inner}

    def _since(self, timestamp: Timestamp, state: PolicyState) -> Timestamp:
        """Return the clock of the present period: the time since it began."""
        began = _timestamp(state)
        epoch, batch, sample, token, _, within, _, wall, *_ = timestamp
        epoch, sample = epoch - began.epoch, sample - began.sample
        if self.horizon.dataset_num_samples is not None:
            epoch, within = divmod(sample, self.horizon.dataset_num_samples)
        return timestamp._replace(
            epoch=epoch,
            batch=batch - began.batch,
            sample=sample,
            token=token - began.token,
            sample_in_epoch=within,
            run_nanoseconds=wall - began.run_nanoseconds,
        )


def _timestamp(state: PolicyState) -> Timestamp:
    return Timestamp(**{name: cast(int, state[name]) for name in _COUNTERS.values()})


Rest: TypeAlias = Literal["rest"]
"""The length of the period that takes the rest of the run."""
Periods: TypeAlias = Iterable[tuple[TimeLike | Literal["rest"], PolicyLike]]
"""Lengths, each with a policy or its written form."""


@final
@dataclass(frozen=True, slots=True, init=False)
class PeriodSizes(BatchSizePolicy):
    """Policies one after another; each sees a clock that starts with its period.

    Times inside a period are relative to it: a ramp starts when the period does, and fractions
    (`dur`) are of the period's length (rounded to whole counts if its unit has no fractions). One
    period may take the `"rest"`; without one, the last policy continues after its period.

    Lengths may be in different units. A length in another unit than the period before it is counted
    from the first batch of its period.

    >>> PeriodSizes([("10%", 8), ("rest", "0dur:16 50%:32")])
    PeriodSizes([('0.1dur', Fixed(8)), ('rest', PiecewiseConstant('0dur:16 0.5dur:32'))])

    Args:
        periods: pairs of a length, or `"rest"`, and a policy (or a size, or steps as text).

    Raises:
        BatchSizeError: there are no periods, one has no length, or two are `"rest"`.
        TimeError: a length cannot be read.
    """

    periods: tuple[tuple[Time | Rest, BatchSizePolicy], ...]

    def __init__(self, periods: Periods) -> None:
        read = [_pair(pair) for pair in periods]
        if not read:
            raise BatchSizeError.bad("periods", read, "there are none", "write one")
        if sum(length == "rest" for length, _ in read) > 1:
            why, instead = "only one of them can take the rest", "write lengths for the others"
            raise BatchSizeError.bad("periods", read, why, instead)
        fill(self, periods=tuple(read))

    def bind(self, horizon: Horizon) -> Bound:
        """Resolve the lengths for one run, and each policy on its own period.

        Raises:
            BatchSizeError: nothing is left for the `"rest"`, or its length cannot be known.
            ConversionError: a time needs a fact that is not known.
        """
        axis = run_axis = line(horizon, horizon.axis(TimeUnit.DURATION))
        found: list[Period] = []
        offset, chain = Fraction(0), 0
        for number, (length, policy) in enumerate(self.periods):
            if length == "rest":
                own, ticks = axis if found else run_axis, self._rest(horizon, run_axis)
            else:
                own = line(horizon, horizon.axis(length.unit))
                ticks = horizon.ticks(length, own)
            if own is not axis:
                axis, offset, chain = own, Fraction(0), chain + bool(found)
            if ticks is None:
                if number < len(self.periods) - 1:
                    raise _unknown_rest("put the 'rest' last")
                if any(one.unit is TimeUnit.DURATION for one in policy.times()):
                    raise _unknown_rest(f"write the times of {policy!r} in other units")
            end = None if ticks is None else offset + ticks
            inside = horizon if ticks is None else _inside(horizon, axis, ticks)
            found.append(Period(policy.bind(inside), axis, chain, offset, end))
            offset = end or offset
        return PeriodsRun(horizon, tuple(found)).bound

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return the warnings of the policies inside."""
        return tuple(line for _, one in self.periods for line in one.warnings(horizon, largest))

    def _rest(self, horizon: Horizon, axis: Axis) -> Fraction | None:
        """Return the ticks of the rest on the axis of the run; None if only the run can tell."""
        lengths = [length for length, _ in self.periods if length != "rest"]
        if any(line(horizon, horizon.axis(length.unit)) is not axis for length in lengths):
            return None
        whole = horizon.ticks(horizon.max_duration, axis)
        rest = whole - sum(horizon.ticks(length, axis) for length in lengths)
        if rest <= 0:
            why = f"the others leave nothing of the run of {horizon.max_duration}"
            raise BatchSizeError.bad("length", "rest", why, "write shorter ones")
        return rest

    def __repr__(self) -> str:
        shown = ", ".join(f"({str(length)!r}, {policy!r})" for length, policy in self.periods)
        return f"PeriodSizes([{shown}])"


def _inside(horizon: Horizon, axis: Axis, ticks: Fraction) -> Horizon:
    """Return the run of a policy inside a period of `ticks`."""
    unit = axis.unit
    if unit is TimeUnit.SAMPLE and horizon.dataset_num_samples is not None:
        unit = TimeUnit.EPOCH  # it has fractions, so no part of a sample is rounded away
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
        why, instead = "it is not a pair (length, policy)", "write for example ('10%', 8)"
        raise BatchSizeError.bad("period", pair, why, instead)
    length, policy = pair
    return time_or_rest(length, interval, "length", BatchSizeError), as_policy(policy)


def _unknown_rest(instead: str) -> BatchSizeError:
    why = "only the run can tell how long it is"
    return BatchSizeError.bad(
        "length", "rest", why, f"{instead}, or all lengths in the unit of max_duration"
    )
