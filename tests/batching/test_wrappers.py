from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import (
    NO_SIGNALS,
    AtLeast,
    AtMost,
    BatchSizePolicy,
    Bound,
    Fixed,
    Hysteresis,
    LinearRamp,
    Monotone,
    MultipleOf,
    PiecewiseConstant,
    PolicyState,
    PowerOfTwo,
    Signals,
    SizeFunction,
)
from stretto.errors import BatchSizeError
from stretto.planning import plan
from stretto.timing import Horizon, Time, Timestamp

HORIZON = Horizon("1000ba")


def sizes_of(policy: BatchSizePolicy, wanted: list[int]) -> list[int]:
    """What a policy around a list of sizes decides, its state going through JSON each time."""
    bound, got = policy.bind(HORIZON), []
    state = bound.start
    for batch in range(len(wanted)):
        size, state = bound.decide(Timestamp(batch=batch), state, NO_SIGNALS)
        state = json.loads(json.dumps(state))
        got.append(size)
    return got


def listed(wanted: list[int]) -> SizeFunction:
    return SizeFunction(lambda timestamp, current: wanted[timestamp.batch])


wanted_sizes = st.lists(st.integers(1, 300), min_size=1, max_size=12)


@given(wanted_sizes, st.integers(1, 300))
def test_bounds(wanted: list[int], bound: int) -> None:
    assert sizes_of(AtMost(listed(wanted), bound), wanted) == [min(s, bound) for s in wanted]
    assert sizes_of(AtLeast(listed(wanted), bound), wanted) == [max(s, bound) for s in wanted]


@given(wanted_sizes, st.integers(1, 100))
def test_multiples(wanted: list[int], factor: int) -> None:
    down = sizes_of(MultipleOf(listed(wanted), factor), wanted)
    up = sizes_of(MultipleOf(listed(wanted), factor, "up"), wanted)
    for size, lower, upper in zip(wanted, down, up, strict=True):
        assert lower % factor == upper % factor == 0
        assert lower == max(factor, size - size % factor)
        assert upper - factor < size <= upper


@given(wanted_sizes)
def test_powers_of_two(wanted: list[int]) -> None:
    assert sizes_of(PowerOfTwo(listed(wanted)), wanted) == [
        2 ** math.floor(math.log2(size)) for size in wanted
    ]
    assert sizes_of(PowerOfTwo(listed(wanted), "up"), wanted) == [
        2 ** math.ceil(math.log2(size)) for size in wanted
    ]


@given(wanted_sizes)
def test_monotone_is_the_largest_so_far(wanted: list[int]) -> None:
    got = sizes_of(Monotone(listed(wanted)), wanted)
    assert got == [max(wanted[: number + 1]) for number in range(len(wanted))]


@given(wanted_sizes, st.sampled_from([1.1, 1.5, 2.0]), st.integers(0, 4))
def test_hysteresis_is_its_rule(wanted: list[int], ratio: float, wait: int) -> None:
    pause = Time(wait, "ba") if wait else None
    got = sizes_of(Hysteresis(listed(wanted), ratio, wait=pause), wanted)
    size, changed = wanted[0], None
    for batch, want in enumerate(wanted):
        is_far = want >= size * ratio or want <= size / ratio
        if is_far and want != size and (changed is None or batch - changed >= wait):
            size, changed = want, batch
        assert got[batch] == size


def test_hysteresis_waits_in_any_unit() -> None:
    horizon = Horizon("2ep", dataset_num_samples=100)
    policy = Hysteresis(PiecewiseConstant("0sp:10 10sp:20 20sp:40"), 2, wait="0.5ep").bind(horizon)
    state = policy.start
    got = []
    for sample in (0, 10, 20, 59, 60, 61):
        size, state = policy.decide(Timestamp(sample=sample), state, NO_SIGNALS)
        got.append(size)
    assert got == [10, 20, 20, 20, 40, 40]
    assert policy.units == {"sp", "ep"}


def test_hysteresis_by_wall_time_is_not_static() -> None:
    assert Hysteresis(Fixed(8), 2, wait="50%").bind(HORIZON).is_static


def test_a_plan_does_not_leap_over_the_end_of_a_wait() -> None:
    # The steps hold for 30 batches, the wait of 10 is over before, and a plan must see that.
    run = Horizon("60ba")
    waits = Hysteresis(PiecewiseConstant("0ba:8 5ba:16 10ba:32 40ba:64"), 2, wait="10ba")
    assert [(stage.size, stage.first.batch) for stage in plan(run, waits).stages] == [
        (8, 0),
        (16, 5),
        (32, 15),
        (64, 40),
    ]
    assert not Hysteresis(Fixed(8), 2, wait="5m").bind(HORIZON).is_static


@final
@dataclass(frozen=True, slots=True)
class Noisy(BatchSizePolicy):
    """A policy that follows the measured noise scale as it is: what later ones start from."""

    def bind(self, horizon: Horizon) -> Bound:
        return Bound(decide=self.decide, start={"size": 32})

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        above, below = signals.noise_numerator, signals.noise_denominator
        size = state["size"]
        assert isinstance(size, int)
        if above is not None and below is not None and below > 0 and math.isfinite(above / below):
            size = max(1, min(10**9, round(above / below)))
        return size, {"size": size}


anything = st.none() | st.floats()


@given(st.lists(st.tuples(anything, anything, anything, anything), min_size=1, max_size=8))
def test_no_signal_leaves_the_bounds(signals: list[tuple[float | None, ...]]) -> None:
    policy = AtMost(AtLeast(MultipleOf(Hysteresis(Monotone(Noisy()), 1.2), 8), 16), 256)
    bound = policy.bind(HORIZON)
    assert not bound.is_static
    state, previous = bound.start, 0
    for number, (loss, metric, above, below) in enumerate(signals):
        seen = Signals(loss=loss, metric=metric, noise_numerator=above, noise_denominator=below)
        size, state = bound.decide(Timestamp(batch=number), state, seen)
        state = json.loads(json.dumps(state))
        assert bound.holds_until(Timestamp(batch=number), state) is None
        assert 16 <= size <= 256
        assert size % 8 == 0
        assert size >= previous
        previous = size


def test_wrappers_take_policies_as_they_are_written() -> None:
    assert AtMost(512, 256) == AtMost(Fixed(512), 256)  # type: ignore[arg-type]
    assert Monotone("0ep:8 1ep:4") == Monotone(PiecewiseConstant("0ep:8 1ep:4"))  # type: ignore[arg-type]


RAMP = LinearRamp(8, 64, "2ep")


@pytest.mark.parametrize(
    "policy",
    [
        AtMost(RAMP, 32),
        AtLeast(RAMP, 16),
        MultipleOf(RAMP, 8),
        MultipleOf(RAMP, 8, "up"),
        PowerOfTwo(RAMP),
        PowerOfTwo(RAMP, "up"),
        Monotone(RAMP),
        Hysteresis(RAMP, 1.25),
        Hysteresis(RAMP, 2, wait="1ep"),
    ],
    ids=repr,
)
def test_values(policy: BatchSizePolicy) -> None:
    assert eval(repr(policy)) == policy
    assert hash(eval(repr(policy))) == hash(policy)
    assert policy.times()[0] == Time("2ep")
    scaled = policy.scaled(2)
    assert type(scaled) is type(policy)
    assert scaled.times()[0] == Time("4ep")
    assert all(a == b * 2 for a, b in zip(scaled.times(), policy.times(), strict=True))
    bound = policy.bind(Horizon("4ep", dataset_num_samples=10))
    assert bound.is_static
    assert "sp" in bound.units


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: AtMost(RAMP, 0), "use 0 as a batch size"),
        (lambda: AtLeast(RAMP, 1.5), "use 1.5 as a batch size"),
        (lambda: MultipleOf(RAMP, 0), "use 0"),
        (lambda: MultipleOf(RAMP, 8, "nearest"), "use rounding='nearest'"),  # type: ignore[arg-type]
        (lambda: PowerOfTwo(RAMP, "no"), "use rounding='no'"),  # type: ignore[arg-type]
        (lambda: AtMost(None, 8), "use None as a batch size"),  # type: ignore[arg-type]
        (lambda: Hysteresis(RAMP, 1), "ratio=1"),
        (lambda: Hysteresis(RAMP, float("nan")), "ratio=nan"),
        (lambda: Hysteresis(RAMP, "2"), "ratio"),  # type: ignore[arg-type]
        (lambda: Hysteresis(RAMP, True), "ratio"),
        (lambda: Hysteresis(RAMP, 2, wait="0ep"), "use wait='0ep'"),
    ],
)
def test_wrong_wrappers_are_refused(make: object, match: str) -> None:
    assert callable(make)
    with pytest.raises(BatchSizeError, match=match):
        make()


class Timed(BatchSizePolicy):
    """A policy of somebody else's that has a time and does not say how it is stretched."""

    def bind(self, horizon: Horizon) -> Bound:
        return Noisy().bind(horizon)

    def times(self) -> tuple[Time, ...]:
        return (Time("5ba"),)


def test_what_a_policy_need_not_say() -> None:
    noisy = Noisy()
    assert AtMost(noisy, 64).times() == ()
    assert AtMost(noisy, 64).scaled(0.5) == AtMost(noisy, 64)
    with pytest.raises(BatchSizeError, match="define"):
        AtMost(Timed(), 64).scaled(0.5)
