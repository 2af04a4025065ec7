"""Every length of a schedule is counted in its own unit, whatever the batch sizes do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st

from stretto import (
    DoublingRamp,
    Horizon,
    LinearRamp,
    Time,
    Timestamp,
    plan,
)
from stretto.batching import PolicyLike
from stretto.errors import BatchSizeError, ScheduleError
from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    Periods,
    Schedule,
    StepDecay,
)
from stretto.timing import LastBatch

NUM_SAMPLES, TOKENS = 60, 3
RUN = Horizon("3ep", dataset_num_samples=NUM_SAMPLES, tokens_per_sample=TOKENS)


class Place(NamedTuple):
    """A place in the run, in the unit in which it is exact."""

    amount: Fraction
    unit: str


class Model:
    """Schedules by counting: the clock of every batch is looked up in a list."""

    def __init__(self, clock: Sequence[Timestamp], end: Timestamp, run: Time) -> None:
        self.clock, self.end = clock, end
        self.run = Place(Fraction(0), str(run.unit)), Place(run.amount, str(run.unit))

    def values(self, schedule: Schedule) -> list[float]:
        """Return the factor of every batch."""
        return [self.value(schedule, now, *self.run, self.run[1].unit) for now in self.clock]

    @staticmethod
    def read(now: Timestamp, unit: str) -> Fraction:
        """Return the counter of `unit`."""
        samples = Fraction(now.sample)
        each = {"ep": samples / NUM_SAMPLES, "sp": samples, "tok": samples * TOKENS}
        return each.get(unit, Fraction(now.batch))

    def at(self, place: Place, unit: str) -> Fraction:
        """Return a place in another unit."""
        if place.unit == unit or place.amount <= 0:
            return max(place.amount, Fraction(0)) if place.unit != unit else place.amount
        if place.unit == "ba":
            batch = math.ceil(place.amount)
            return self.read(self.clock[batch] if batch < len(self.clock) else self.end, unit)
        samples = place.amount / self.read(Timestamp(sample=1), place.unit)
        if unit == "ba":
            later = [one.batch for one in self.clock if one.sample >= math.ceil(samples)]
            return Fraction(later[0] if later else self.end.batch)
        return samples * self.read(Timestamp(sample=1), unit)

    def after(self, first: Place, last: Place, unit: str, start: Place, time: Time) -> Place:
        """Return the place `time` after `start`; a fraction is of `first` to `last` in `unit`."""
        if time.unit == "dur":
            length = self.at(last, unit) - self.at(first, unit)
            return Place(self.at(start, unit) + time.amount * length, unit)
        return Place(self.at(start, time.unit) + time.amount, str(time.unit))

    def part(self, first: Place, time: Place, last: Place, now: Timestamp) -> Fraction:
        """Return how much of the way from `first` to `time` has passed, counted as `time` is."""
        start, stop = self.at(first, time.unit), self.at(last, time.unit)
        length = time.amount - start
        passed = min(max(self.read(now, time.unit), start), stop) - start
        return min(passed / length, Fraction(1)) if length else Fraction(1)

    def value(self, one: Schedule, now: Timestamp, first: Place, last: Place, unit: str) -> float:
        """Return the factor at `now` of a schedule from `first` to `last`."""
        if isinstance(one, Periods):
            return self._periods(one, now, first, last, unit)
        begin, warmup = first, getattr(one, "warmup", None)
        if warmup is not None:
            cut = self.after(first, last, unit, first, warmup)
            if self.read(now, cut.unit) < cut.amount:
                return float(self.part(first, cut, last, now))
            first = cut
        if isinstance(one, WSD):
            cut = self.after(begin, last, unit, last, -Time(one.decay))
            is_before = self.read(now, cut.unit) < cut.amount
            end = Place(self.at(last, cut.unit), cut.unit)
            return 1.0 if is_before else float(1 - self.part(cut, end, last, now))
        if isinstance(one, (Cosine, Linear)):
            cut = self.after(first, last, unit, first, Time(one.over))
            part = self.part(first, cut, last, now)
            wave = (1 + math.cos(math.pi * part)) / 2
            return wave if isinstance(one, Cosine) else float(1 - part)
        if isinstance(one, MultiStep):
            marks = [self.after(first, last, unit, first, Time(time)) for time in one.milestones]
            return math.prod(0.5 for mark in marks if self.read(now, mark.unit) >= mark.amount)
        return self._intervals(one, now, first, last, unit)

    def _intervals(
        self, one: Schedule, now: Timestamp, first: Place, last: Place, unit: str
    ) -> float:
        if isinstance(one, (Exponential, StepDecay)):
            each = self.after(first, last, unit, first, Time(one.every))
        elif isinstance(one, CosineRestarts):
            each = self.after(first, last, unit, first, Time(one.t_0))
        elif isinstance(one, InverseSqrt):
            assert one.timescale is not None
            each = self.after(first, last, unit, first, Time(one.timescale))
        else:
            return 1.0
        start = self.at(first, each.unit)
        passed = (max(self.read(now, each.unit), start) - start) / (each.amount - start)
        if isinstance(one, Exponential):
            return math.pow(0.5, passed)
        if isinstance(one, StepDecay):
            return math.pow(0.5, passed // 1)
        if isinstance(one, InverseSqrt):
            return 1 / math.sqrt(1 + passed)
        return (1 + math.cos(math.pi * (passed % 1))) / 2

    def _periods(self, one: Periods, now: Timestamp, first: Place, last: Place, unit: str) -> float:
        places, found = [first], first
        for duration, _ in one.periods[:-1]:
            assert isinstance(duration, Time), "last"
            found = self.after(first, last, unit, found, duration)
            places.append(found)
        number = sum(self.read(now, place.unit) >= place.amount for place in places[1:])
        duration, schedule = one.periods[number]
        begin = places[number]
        if duration == "rest":
            return self.value(schedule, now, begin, last, unit)
        assert isinstance(duration, Time), "until is tried elsewhere"
        stop = self.after(first, last, unit, begin, duration)
        return self.value(schedule, now, begin, stop, stop.unit)


def lengths() -> st.SearchStrategy[Time]:
    """Up to about a third of the run, in every unit."""
    return st.one_of(
        st.integers(1, 30).map(lambda n: Time(Fraction(n, 90), "dur")),
        st.integers(1, 20).map(lambda n: Time(Fraction(n, 20), "ep")),
        st.integers(1, 20).map(lambda n: Time(n, "ba")),
        st.integers(1, 60).map(lambda n: Time(n, "sp")),
        st.integers(1, 180).map(lambda n: Time(n, "tok")),
    )


@st.composite
def leaves(draw: st.DrawFn) -> Schedule:
    """Schedules whose lengths have different units."""
    warmup, time = draw(st.none() | lengths()), draw(lengths())
    later = draw(lengths())
    return draw(
        st.sampled_from(
            [
                Constant(warmup=warmup),
                Cosine(warmup=warmup),
                Cosine(over=time, warmup=warmup),
                Linear(1, 0, over=time, warmup=warmup),
                WSD(time, warmup=warmup),
                StepDecay(time, 0.5, warmup=warmup),
                Exponential(time, 0.5, warmup=warmup),
                CosineRestarts(time, warmup=warmup),
                InverseSqrt(time, warmup=warmup),
                MultiStep([time, later], 0.5, warmup=warmup),
            ]
        )
    )


def schedules() -> st.SearchStrategy[Schedule]:
    """Leaves, alone or in periods that end in other units than they begin."""
    head = st.lists(st.tuples(lengths(), leaves()), min_size=1, max_size=2)
    several = st.tuples(head, leaves()).map(lambda pair: Periods([*pair[0], ("rest", pair[1])]))
    nested = st.tuples(lengths(), several).map(lambda pair: Periods([pair, ("rest", 1.0)]))
    return leaves() | several | nested


def policies() -> st.SearchStrategy[PolicyLike]:
    """Batch sizes that are known before the run."""
    size, unit = st.integers(1, 16), st.sampled_from(["ba", "sp", "tok", "ep"])
    steps = st.tuples(size, size, st.integers(1, 30), unit)
    ramps = st.tuples(size, lengths())
    return st.one_of(
        size,
        steps.map(lambda one: f"0ba:{one[0]} {one[2] if one[3] != 'ep' else 1}{one[3]}:{one[1]}"),
        ramps.map(lambda one: DoublingRamp(one[0], 4 * one[0], one[1])),
        ramps.map(lambda one: LinearRamp(one[0], one[0] + 5, one[1])),
    )


def horizons() -> st.SearchStrategy[Horizon]:
    """Runs of about three epochs, in every unit."""
    runs = ["3ep", "2.5ep", "40ba", "170sp", "500tok"]
    modes: list[LastBatch] = ["keep", "drop", "carry"]
    return st.builds(
        lambda run, mode: Horizon(
            run, dataset_num_samples=NUM_SAMPLES, tokens_per_sample=TOKENS, last_batch=mode
        ),
        st.sampled_from(runs),
        st.sampled_from(modes),
    )


@given(schedules(), horizons(), policies())
@example(Cosine(warmup="20ba"), RUN, "0ba:1 10ba:9")
@example(Cosine(over="10ba", warmup="1ep"), RUN, "0ba:2 10ba:7")
def test_a_length_is_counted_in_its_own_unit(
    schedule: Schedule, horizon: Horizon, policy: PolicyLike
) -> None:
    try:
        planned = plan(horizon, policy, schedules={"lr": schedule})
    except (BatchSizeError, ScheduleError):  # steps out of order, or lengths longer than the run
        reject()
    batches = list(planned.batches())
    assert planned.end is not None
    model = Model([one.timestamp for one in batches], planned.end, horizon.max_duration)
    found = [one.values["lr"] for one in batches]
    assert found == pytest.approx(model.values(schedule), rel=1e-9, abs=1e-9)
