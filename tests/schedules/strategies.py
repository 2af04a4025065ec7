"""Strategies for schedules that fit into a run, and helpers to read their values.

Every schedule fits into `RUN` and into each run `ratio` times as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import TypedDict, get_args

from hypothesis import strategies as st

from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Curve,
    Custom,
    DecayShape,
    Exponential,
    Floor,
    InverseSqrt,
    Linear,
    MultiStep,
    Periods,
    Polynomial,
    Product,
    Rest,
    Schedule,
    StepDecay,
    Sum,
)
from stretto.timing import Horizon, Time, Timer, Timestamp

RUN = Horizon("12ep", dataset_num_samples=30, batch_sizes=8)
"""The run that the schedules fit into: 360 samples in 48 batches."""


class Warmup(TypedDict):
    """The two arguments that most schedules share."""

    warmup: Time | None
    warmup_start: float


def values(schedule: Schedule, horizon: Horizon, timestamps: Iterable[Timestamp]) -> list[float]:
    """Return the factor at each timestamp.

    >>> values(Linear(), Horizon("4ba"), [Timestamp(batch=1), Timestamp(batch=2)])
    [0.75, 0.5]
    """
    bound = schedule.bind(horizon)
    return [bound(timestamp) for timestamp in timestamps]


def by_batch(count: int) -> list[Timestamp]:
    """Return timestamps of the first batches, of one sample each, in an endless epoch.

    >>> [timestamp.batch for timestamp in by_batch(3)]
    [0, 1, 2]
    """
    return [Timestamp(batch=batch, sample=batch) for batch in range(count)]


def samples_of_run() -> st.SearchStrategy[Timestamp]:
    """Timestamps at samples of `RUN`, at its ends and far beyond.

    >>> samples_of_run().example().sample >= 0  # doctest: +SKIP
    True
    """
    sample = st.integers(0, 400) | st.sampled_from([0, 359, 360, 361, 10**15])
    return sample.map(lambda sample: Timestamp(sample=sample, epoch=sample // 30))


def factors() -> st.SearchStrategy[float]:
    """Factors from 0 to 10."""
    return st.floats(0, 10) | st.sampled_from([0.0, 0.1, 0.3, 1.0])


def fractions_of_scope(most: int = 90) -> st.SearchStrategy[Time]:
    """Lengths relative to the scope, up to so many ninetieths of it."""
    return st.integers(0, most).map(lambda part: Time(Fraction(part, 90), "dur"))


def intervals() -> st.SearchStrategy[Time]:
    """Positive lengths, in epochs or relative to the scope."""
    part = st.integers(2, 180).map(lambda part: Time(Fraction(part, 90), "dur"))
    return part | st.integers(3, 300).map(lambda part: Time(Fraction(part, 60), "ep"))


@st.composite
def leaves(draw: st.DrawFn, *, with_functions: bool = True) -> Schedule:
    """Schedules without periods and products.

    Args:
        draw: passed by hypothesis.
        with_functions: include schedules with a function, whose repr can't be evaluated.
    """
    kinds = ["constant", "curve", "interval", "milestones", "wsd"]
    kind = draw(st.sampled_from([*kinds, "function"] if with_functions else kinds))
    warmup: Warmup = {
        "warmup": draw(st.none() | fractions_of_scope(45)),
        "warmup_start": draw(factors()),
    }
    match kind:
        case "constant":
            return Constant(draw(factors()), **warmup)
        case "curve":
            over = draw(fractions_of_scope() | intervals())
            start, end = draw(factors()), draw(factors())
            glides = [
                Linear(start, end, over=over, **warmup),
                Cosine(start, end, over=over, **warmup),
                Polynomial(start, end, power=2.5, over=over, **warmup),
            ]
            return draw(st.sampled_from(glides))
        case "interval":
            return draw(_by_interval(warmup))
        case "milestones":
            milestones = draw(st.sets(fractions_of_scope().filter(bool), min_size=1, max_size=4))
            return MultiStep(sorted(milestones), draw(st.floats(0, 1)), **warmup)
        case "wsd":
            shapes: tuple[DecayShape, ...] = get_args(DecayShape)
            shape = draw(st.sampled_from(shapes))
            return WSD(draw(fractions_of_scope(45)), draw(factors()), shape=shape, **warmup)
    over = draw(fractions_of_scope())
    return draw(st.sampled_from([Custom(_by_the_clock), Curve(_triangle, over=over, **warmup)]))


@st.composite
def _by_interval(draw: st.DrawFn, warmup: Warmup) -> Schedule:
    every, gamma = draw(intervals()), draw(st.floats(0, 1))
    kind = draw(st.sampled_from([Exponential, StepDecay, InverseSqrt, CosineRestarts]))
    if kind is InverseSqrt:
        end, floor = draw(st.floats(0, 1)), draw(st.floats(0, 1))
        return InverseSqrt(every, end=end, floor=floor, **warmup)
    if kind is CosineRestarts:
        start, end = draw(factors()), draw(factors())
        return CosineRestarts(every, draw(st.integers(1, 3)), start=start, end=end, **warmup)
    return (StepDecay if kind is StepDecay else Exponential)(every, gamma, **warmup)


def periods(inner: st.SearchStrategy[Schedule]) -> st.SearchStrategy[Schedule]:
    """Up to three periods of `inner`, one of which may take the rest."""
    short = st.integers(0, 10).map(lambda part: Time(Fraction(part, 80), "ep"))
    duration = fractions_of_scope(22) | short
    fixed = st.lists(st.tuples(duration, inner), min_size=1, max_size=2)

    def with_rest(drawn: tuple[list[tuple[Time, Schedule]], Schedule | None, int]) -> Schedule:
        pairs: list[tuple[Time | Rest, Schedule]] = [*drawn[0]]
        if drawn[1] is not None:
            pairs.insert(drawn[2], ("rest", drawn[1]))
        return Periods(pairs)

    return st.tuples(fixed, st.none() | inner, st.integers(0, 2)).map(with_rest)


def schedules(*, with_functions: bool = True) -> st.SearchStrategy[Schedule]:
    """Schedules of any kind, in periods, products and sums too, that fit into `RUN`.

    Args:
        with_functions: include schedules with a function, whose repr can't be evaluated.
    """
    one = leaves(with_functions=with_functions)
    some = one | periods(one)
    pair = st.sampled_from([Product, Sum]).flatmap(lambda kind: st.builds(kind, some, one))
    return some | pair | st.builds(Floor, some, factors())


def _by_the_clock(timer: Timer) -> float:
    return 1 - timer.get_elapsed_duration() / 2


def _triangle(passed: float) -> float:
    return min(passed, 1 - passed)
