"""Batch sizes from one policy after another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, final

from stretto.batching.policy import (
    BatchSizePolicy,
    Bound,
    Decision,
    Hold,
    PolicyState,
    Signals,
    check_units,
)
from stretto.batching.steps import PolicyLike, as_policy, sample_axis
from stretto.errors import BatchSizeError
from stretto.schedules import Rest
from stretto.schedules.fields import Timed, checked_interval, fill, times_of
from stretto.schedules.periods import Span, Until, read_periods
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


class BoundPeriod(NamedTuple):
    """One period on a run, in ticks of its counter from an anchor.

    Periods on one counter without a break have one anchor, so that thirds add up to a whole.
    """

    bound: Bound
    """The policy on the period's own run."""
    axis: Axis
    begin: Fraction
    """0: the anchor is the first batch of this period."""
    end: Fraction | None
    """None: the end of the run."""


def _in_turn(horizon: Horizon, periods: Sequence[BoundPeriod]) -> Bound:
    """Return one policy after another, which remembers where the present period began."""

    def present(state: PolicyState) -> BoundPeriod:
        return periods[state["period"]]

    def end_of(state: PolicyState) -> int | None:
        """Return the tick at which the present period ends; None for the last one."""
        end, anchor = present(state).end, Fraction(state["anchor"])
        is_last = state["period"] == len(periods) - 1
        return None if end is None or is_last else math.ceil(anchor + end)

    def started(number: int, anchor: int, began: Timestamp) -> PolicyState:
        counts = {name: getattr(began, name) for name in _COUNTERS.values()}
        return {"period": number, "anchor": anchor, **counts, "inner": periods[number].bound.start}

    def decide(timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
        while (end := end_of(state)) is not None and present(state).axis.read(timestamp) >= end:
            number, anchor = state["period"] + 1, state["anchor"]
            following = periods[number]
            if following.begin == 0:
                anchor = following.axis.read(timestamp)
            began = {_COUNTERS[following.axis.unit]: math.ceil(anchor + following.begin)}
            state = started(number, anchor, timestamp._replace(**began))
        since = _since(horizon, timestamp, state)
        size, inner = present(state).bound.decide(since, state["inner"], signals)
        return size, {**state, "inner": inner}

    def holds_until(timestamp: Timestamp, state: PolicyState) -> Hold | None:
        period, end, began = present(state), end_of(state), _began(state)
        hold = period.bound.holds_until(_since(horizon, timestamp, state), state["inner"])
        if hold is None:
            return None
        moved = Hold(tuple((axis, tick + axis.read(began)) for axis, tick in hold.limits))
        return moved if end is None else moved & Hold(((period.axis, end),))

    def fits(state: PolicyState) -> bool:
        is_complete = set(state) == {"period", "anchor", *_COUNTERS.values(), "inner"}
        is_known = is_complete and state["period"] in range(len(periods))
        return is_known and present(state).bound.accepts(state["inner"])

    inner = [period.bound for period in periods]
    axes = [period.axis.unit for period in periods[:-1]]
    known = [bound.bounds for bound in inner if bound.bounds is not None]
    is_bounded = len(known) == len(inner)
    return Bound(
        decide=decide,
        start=started(0, 0, Timestamp()),
        holds_until=holds_until,
        is_static=all(bound.is_static for bound in inner) and TimeUnit.SECOND not in axes,
        units=frozenset(axes).union(*(bound.units for bound in inner)),
        reads=frozenset[str]().union(*(bound.reads for bound in inner)),
        bounds=(min(known)[0], max(most for _, most in known)) if is_bounded else None,
        log_values=lambda state: present(state).bound.log_values(state["inner"]),
        sizes=lambda state: present(state).bound.sizes(state["inner"]),
        fits=fits,
    )


def _began(state: PolicyState) -> Timestamp:
    return Timestamp(**{name: state[name] for name in _COUNTERS.values()})


def _since(horizon: Horizon, timestamp: Timestamp, state: PolicyState) -> Timestamp:
    """Return the clock of the present period: the time since it began."""
    began = _began(state)
    epoch, sample = timestamp.epoch - began.epoch, timestamp.sample - began.sample
    within = timestamp.sample_in_epoch
    if horizon.dataset_num_samples is not None:
        epoch, within = divmod(sample, horizon.dataset_num_samples)
    return timestamp._replace(
        epoch=epoch,
        batch=timestamp.batch - began.batch,
        sample=sample,
        token=timestamp.token - began.token,
        sample_in_epoch=within,
        run_nanoseconds=timestamp.run_nanoseconds - began.run_nanoseconds,
    )


@final
@dataclass(frozen=True, slots=True, init=False)
class PeriodSizes(BatchSizePolicy):
    """Policies one after another; each sees a clock that starts with its period.

    Times inside a period are relative to it: a ramp starts when the period does, and fractions
    (`dur`) are of the period's length (rounded to whole counts if its unit has no fractions). One
    period may take the `"rest"`; without one, the last policy continues after its period.

    Lengths may be in different units. A length in another unit than the period before it is counted
    from the first batch of its period. `"until 10Ttok"` says where a period ends on the clock of
    the run; all periods before it must count the same.

    >>> PeriodSizes([("10%", 8), ("rest", "0dur:16 50%:32")])
    PeriodSizes([('0.1dur', Fixed(8)), ('rest', PiecewiseConstant('0dur:16 0.5dur:32'))])

    Args:
        periods: pairs of a length, `"until"` and a time, or `"rest"`, and a policy (or a size, or
            steps as text).

    Raises:
        BatchSizeError: there are no periods, one has no length, two are `"rest"`, or an `until`
            comes after it, or is in periods inside a period.
        TimeError: a length cannot be read.
    """

    periods: tuple[tuple[Span, BatchSizePolicy], ...]

    def __init__(self, periods: Iterable[tuple[TimeLike | Rest, PolicyLike]]) -> None:
        fill(self, periods=read_periods(periods, checked_interval, as_policy, BatchSizeError))
        for _, policy in self.periods:
            policy.replaced(_refuse_until)  # its clock starts with its period
        check_units(self)

    def bind(self, horizon: Horizon) -> Bound:
        """Resolve the lengths for one run, and each policy on its own period.

        Raises:
            BatchSizeError: nothing is left for the `"rest"`, or its length cannot be known.
            ConversionError: a time needs a fact that is not known.
        """
        axis = run_axis = sample_axis(horizon, horizon.axis(TimeUnit.DURATION))
        found: list[BoundPeriod] = []
        offset = Fraction(0)
        for number, (span, policy) in enumerate(self.periods):
            if span == "rest":
                own, ticks = axis if found else run_axis, self._rest(horizon, run_axis, offset)
            else:
                length = span.time if isinstance(span, Until) else span
                own = sample_axis(horizon, horizon.axis(length.unit))
                ticks = horizon.ticks(length, own)
            if isinstance(span, Until) and ticks is not None:
                ticks -= offset
                if ticks <= 0 or any(one.axis is not own for one in found):
                    raise _bad_until(span, "it is not known to begin before that")
            if own is not axis:
                axis, offset = own, Fraction(0)
            if ticks is None:
                if number < len(self.periods) - 1:
                    raise _unknown_rest("put the 'rest' last")
                if any(time.unit is TimeUnit.DURATION for time in policy.times()):
                    raise _unknown_rest(f"write the times of {policy!r} in other units")
            end = None if ticks is None else offset + ticks
            inside = horizon if ticks is None else _inside(horizon, axis, ticks)
            found.append(BoundPeriod(policy.bind(inside), axis, offset, end))
            offset = end or offset
        return _in_turn(horizon, found)

    def warnings(self, horizon: Horizon, largest: int) -> tuple[str, ...]:
        """Return the warnings of the policies inside."""
        return tuple(line for _, one in self.periods for line in one.warnings(horizon, largest))

    def _rest(self, horizon: Horizon, axis: Axis, begin: Fraction) -> Fraction | None:
        """Return the ticks of the rest on the axis of the run; None if only the run can tell."""
        spans = [span for span, _ in self.periods]
        units = [time.unit for span in spans for time in times_of(span)]
        if any(sample_axis(horizon, horizon.axis(unit)) is not axis for unit in units):
            return None
        later = [time for span in spans[spans.index("rest") :] for time in times_of(span)]
        whole = horizon.ticks(horizon.max_duration, axis) - begin
        rest = whole - sum(horizon.ticks(time, axis) for time in later)
        if rest <= 0:
            why = f"the others leave nothing of the run of {horizon.max_duration}"
            raise BatchSizeError.bad("duration", "rest", why, "write shorter ones")
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


def _refuse_until(value: object) -> object:
    if isinstance(value, Until):
        raise _bad_until(value, "it is inside a period, whose clock starts with it")
    return value.replaced(_refuse_until) if isinstance(value, Timed) else value


def _bad_until(span: Until, why: str) -> BatchSizeError:
    instead = "write a duration, or all periods before it in its unit and in order"
    return BatchSizeError.bad("period", str(span), why, instead)


def _unknown_rest(instead: str) -> BatchSizeError:
    why = "only the run can tell how long it is"
    return BatchSizeError.bad(
        "duration", "rest", why, f"{instead}, or all lengths in the unit of max_duration"
    )
