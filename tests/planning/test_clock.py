"""The walk over batches against a model that counts one batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import (
    BatchSizePolicy,
    DoublingRamp,
    Fixed,
    IncreaseFunction,
    LinearRamp,
    PiecewiseConstant,
    SizeFunction,
)
from stretto.errors import BatchSizeError, PlanError
from stretto.planning import next_step, walk
from stretto.timing import Horizon, LastBatch, Time, Timer, Timestamp, advance

MODES: tuple[LastBatch, ...] = get_args(LastBatch)


class Case(NamedTuple):
    """A run and its policy, and the size by a formula of (sample, batch, epoch)."""

    horizon: Horizon
    policy: BatchSizePolicy
    size: Callable[[int, int, int], int]


def model(case: Case) -> Iterator[tuple[int, int]]:
    """The start and size of every batch, counted without any of the code under test."""
    horizon = case.horizon
    n, mode, run = horizon.dataset_num_samples, horizon.last_batch, horizon.max_duration
    assert n is not None
    tokens = horizon.tokens_per_sample
    lengths = {"ep": Fraction(n), "sp": Fraction(1), "tok": Fraction(1, tokens or 1)}
    length = lengths.get(run.unit)
    sample = batch = 0

    def over() -> bool:
        return batch >= run.amount if length is None else sample >= run.amount * length

    while not over():
        size = case.size(sample, batch, sample // n)
        left = n - sample % n
        if mode == "drop" and size > left:
            sample += left
            continue
        decided = size
        if mode == "keep":
            size = min(size, left)
        if mode != "drop" and length is not None:
            while sample + size - 1 >= run.amount * length:
                size -= 1
        yield sample, size
        sample, batch = sample + size, batch + 1
        if mode == "drop" and n - sample % n < decided:
            sample += n - sample % n


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small runs with every kind of policy, unit and end of an epoch."""
    n = draw(st.integers(1, 40))
    tokens = draw(st.sampled_from([None, 1, 7]))
    mode = draw(st.sampled_from(MODES))
    units = ["ep", "ba", "sp", *(["tok"] if tokens else [])]
    run_unit = draw(st.sampled_from(units))
    length = draw(st.fractions(Fraction(1, 3), 5, max_denominator=6))
    run = Time(length if run_unit == "ep" else -(-length * 20 // 1), run_unit)
    horizon = Horizon(run, dataset_num_samples=n, tokens_per_sample=tokens, last_batch=mode)
    largest = n if mode == "drop" else 3 * n
    start = draw(st.integers(1, largest))
    end = draw(st.integers(start, largest))
    unit = draw(st.sampled_from([*units, "dur"]))
    amount = draw(st.fractions(Fraction(1, 10), 3, max_denominator=10))
    whole = -(-amount * (20 if unit in ("ba", "sp", "tok") else 1) // 1)
    over = Time(amount if unit in ("ep", "dur") else whole, unit)
    return Case(horizon, *draw(st.sampled_from(POLICIES))(horizon, start, end, over))


def passed(horizon: Horizon, over: Time, sample: int, batch: int) -> Fraction:
    """Which part of `over` has passed, as an exact fraction."""
    amount, unit = over.amount, str(over.unit)
    if unit == "dur":
        amount, unit = amount * horizon.max_duration.amount, str(horizon.max_duration.unit)
    n, tokens = horizon.dataset_num_samples or 1, horizon.tokens_per_sample or 1
    now = {
        "ep": Fraction(sample, n),
        "ba": Fraction(batch),
        "sp": Fraction(sample),
        "tok": Fraction(sample * tokens),
    }[unit]
    return now / amount


Made = tuple[BatchSizePolicy, Callable[[int, int, int], int]]


def linear(horizon: Horizon, start: int, end: int, over: Time) -> Made:
    def size(sample: int, batch: int, epoch: int) -> int:
        part = min(Fraction(1), passed(horizon, over, sample, batch))
        return start + int((end - start) * part)

    return LinearRamp(start, end, over), size


def doubling(horizon: Horizon, start: int, end: int, over: Time) -> Made:
    sizes = [start]
    while sizes[-1] < end:
        sizes.append(min(end, sizes[-1] * 2))

    def size(sample: int, batch: int, epoch: int) -> int:
        part = min(Fraction(1), passed(horizon, over, sample, batch))
        return sizes[int((len(sizes) - 1) * part)]

    return DoublingRamp(start, end, over), size


def steps(horizon: Horizon, start: int, end: int, over: Time) -> Made:
    def size(sample: int, batch: int, epoch: int) -> int:
        return end if passed(horizon, over, sample, batch) >= 1 else start

    return PiecewiseConstant({Time("0sp"): start, over: end}), size


def increases(horizon: Horizon, start: int, end: int, over: Time) -> Made:
    step = 1 + int(over.amount) % 3

    def size(sample: int, batch: int, epoch: int) -> int:
        return start + min(epoch + 1, (end - start) // step) * step

    return IncreaseFunction(lambda epoch, current: step, start, end), size


def function(horizon: Horizon, start: int, end: int, over: Time) -> Made:
    def size(sample: int, batch: int, epoch: int) -> int:
        return start + (3 * sample + 5 * batch) % (end - start + 1)

    def asked(timestamp: Timestamp, current: int | None) -> int:
        return size(timestamp.sample, timestamp.batch, timestamp.epoch)

    return SizeFunction(asked), size


def fixed(horizon: Horizon, start: int, end: int, over: Time) -> Made:
    return Fixed(start), lambda sample, batch, epoch: start


POLICIES = [linear, doubling, steps, increases, function, fixed]


@given(cases())
def test_the_walk_is_the_model(case: Case) -> None:
    walked = walk(case.horizon, case.policy.bind(case.horizon))
    got = [(step.timestamp.sample, step.size) for step in itertools.islice(walked, 500)]
    assert got == list(itertools.islice(model(case), 500))


@given(cases())
def test_a_walk_resumes_anywhere(case: Case) -> None:
    policy = case.policy.bind(case.horizon)
    whole = list(itertools.islice(walk(case.horizon, policy), 60))
    for number in range(0, len(whole), 7):
        step = whole[number]
        now = advance(case.horizon, step.timestamp, step.size)
        again = walk(case.horizon, policy, timestamp=now, state=step.state)
        rest = list(itertools.islice(again, 59 - number))
        assert rest == whole[number + 1 : 60]


@given(cases())
def test_a_timer_moves_as_advance_does(case: Case) -> None:
    horizon = case.horizon
    timer = Timer(horizon, clock=lambda: 0)
    for step in itertools.islice(walk(horizon, case.policy.bind(horizon)), 100):
        if step.skipped:
            timer.end_epoch()
        assert timer.timestamp == step.timestamp
        timer.update(step.size, seconds=0.0)
        assert timer.timestamp == advance(horizon, step.timestamp, step.size)


@given(cases())
def test_epochs_end_where_the_clock_says_so(case: Case) -> None:
    horizon = case.horizon
    for step in itertools.islice(walk(horizon, case.policy.bind(horizon)), 200):
        after = advance(horizon, step.timestamp, step.size)
        n = horizon.dataset_num_samples or 1
        assert after.sample == after.epoch * n + after.sample_in_epoch
        assert after.epoch - step.timestamp.epoch == step.ends_epochs
        if horizon.tokens_per_sample:
            assert after.token == after.sample * horizon.tokens_per_sample


@pytest.mark.parametrize("mode", ["keep", "carry"])
@given(st.data())
def test_every_sample_comes_exactly_once(mode: LastBatch, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 50))
    horizon = Horizon("3ep", dataset_num_samples=n, last_batch=mode)
    policy = LinearRamp(1, data.draw(st.integers(1, 2 * n)), "70%").bind(horizon)
    seen = [i for step in walk(horizon, policy)
            for i in range(step.timestamp.sample, step.timestamp.sample + step.size)]  # fmt: skip
    assert seen == list(range(3 * n))


def test_a_walk_returns_the_clock_at_the_end() -> None:
    horizon = Horizon("20sp", dataset_num_samples=20, last_batch="drop")
    walked = walk(horizon, PiecewiseConstant("0sp:4 16sp:10").bind(horizon))
    sizes = []
    while True:
        try:
            sizes.append(next(walked).size)
        except StopIteration as stop:
            end = stop.value
            break
    # The 4 samples that a batch of 10 does not fit into are passed over, and the run is over.
    assert sizes == [4, 4, 4, 4]
    assert (end.sample, end.batch, end.epoch) == (20, 4, 1)


def test_after_the_run_there_is_no_step() -> None:
    horizon = Horizon("1ep", dataset_num_samples=4)
    policy = Fixed(4).bind(horizon)
    now = advance(horizon, Timestamp(), 4)
    assert next_step(horizon, policy, now, policy.start) == (now, None)


def test_a_batch_larger_than_an_epoch_cannot_be_dropped_to_fit() -> None:
    horizon = Horizon("2ep", dataset_num_samples=20, last_batch="drop")
    with pytest.raises(BatchSizeError, match="epoch"):
        list(walk(horizon, Fixed(21).bind(horizon)))


@pytest.mark.parametrize(
    ("horizon", "policy", "why"),
    [
        (Horizon("1h"), PiecewiseConstant("0sec:8 60sec:16"), "they follow the wall clock"),
        (Horizon("9tok"), PiecewiseConstant("0tok:8 6tok:16"), "they follow tokens"),
        (Horizon("9ep"), PiecewiseConstant("0ep:8 6ep:16"), "they follow epochs"),
        (
            Horizon("9ep", dataset_num_samples=9),
            SizeFunction(lambda timestamp, current: 8, planned=False),
            "they follow what the run measures",
        ),
    ],
    ids=["wall clock", "tokens", "unsized", "function"],
)
def test_sizes_that_only_the_run_knows_cannot_be_walked(
    horizon: Horizon, policy: BatchSizePolicy, why: str
) -> None:
    with pytest.raises(PlanError, match=why):
        next(walk(horizon, policy.bind(horizon)))
