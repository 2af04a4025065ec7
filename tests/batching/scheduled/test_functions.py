from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import (
    NO_SIGNALS,
    AsManyAsFit,
    AtMost,
    BatchSizePolicy,
    IncreaseFunction,
    NoiseScale,
    PeriodSizes,
    Plateau,
    Signals,
    SizeFunction,
    as_policy,
    awaits_maximum,
    with_maximum,
)
from stretto.errors import BatchSizeError, ConversionError
from stretto.planning import walk
from stretto.timing import Horizon, LastBatch, Time, Timestamp


def by_epoch(epoch: int, current_batch_size: int) -> int:
    """The example of the RFC, with numbers in it."""
    if epoch in (1, 3):
        return 8
    return 0


def growing(timestamp: Timestamp, current: int | None) -> int:
    return (current or 2) * 2


def rfc(sizes_of_epochs: int, start: int, largest: int, increments: list[int]) -> list[int]:
    """The RFC's own lines: the size of each epoch."""
    sizes, batch_size = [], start
    for epoch in range(sizes_of_epochs):
        increase_value = increments[epoch]
        if increase_value and increase_value + batch_size <= largest:
            batch_size += increase_value
        sizes.append(batch_size)
    return sizes


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(0, 20),
    st.sampled_from(["keep", "carry"]),
)
def test_increases_are_those_of_the_rfc(
    increments: list[int], start: int, more: int, mode: LastBatch
) -> None:
    horizon = Horizon(Time(len(increments), "ep"), dataset_num_samples=60, last_batch=mode)
    calls = []

    def function(epoch: int, current_batch_size: int) -> int:
        calls.append(epoch)
        return increments[epoch]

    policy = IncreaseFunction(function, start, start + more).bind(horizon)
    first: dict[int, int] = {}
    state = policy.start
    for step in walk(horizon, policy):
        first.setdefault(step.timestamp.epoch, step.decided)
    assert list(first.values()) == rfc(len(increments), start, start + more, increments)
    # Once an epoch: the state remembers, so later batches do not ask again.
    calls.clear()
    for epoch, batch in itertools.product(range(len(increments)), range(3)):
        _, state = policy.decide(Timestamp(epoch=epoch, batch=batch), state, NO_SIGNALS)
    assert calls == list(range(len(increments)))


def test_a_batch_over_several_epochs_asks_about_each() -> None:
    asked = []

    def function(epoch: int, current_batch_size: int) -> int:
        asked.append((epoch, current_batch_size))
        return 10

    bound = IncreaseFunction(function, 10, 1000).bind(Horizon("9ep", dataset_num_samples=5))
    size, state = bound.decide(Timestamp(), bound.start, NO_SIGNALS)
    assert (size, bound.decide(Timestamp(epoch=3), state, NO_SIGNALS)[0]) == (20, 50)
    assert asked == [(0, 10), (1, 20), (2, 30), (3, 40)]


def test_no_increase_may_be_said_with_none() -> None:
    bound = IncreaseFunction(lambda epoch, size: None, 8, 16).bind(Horizon("9ep"))
    assert bound.decide(Timestamp(), bound.start, NO_SIGNALS)[0] == 8


def test_increases_hold_for_the_epoch() -> None:
    bound = IncreaseFunction(by_epoch, 8, 64).bind(Horizon("9ep", dataset_num_samples=50))
    _, state = bound.decide(Timestamp(sample=20), bound.start, NO_SIGNALS)
    hold = bound.holds_until(Timestamp(sample=20), state)
    assert hold is not None
    assert hold.covers(Timestamp(sample=49))
    assert not hold.covers(Timestamp(epoch=1, sample=50))
    assert bound.is_static
    assert bound.units == {"ep"}


@pytest.mark.parametrize("increment", [-1, 1.0, "8ep", True, float("nan")], ids=repr)
def test_wrong_increments_name_the_call(increment: object) -> None:
    def function(epoch: int, current: int) -> int:
        return increment  # type: ignore[return-value]

    bound = IncreaseFunction(function, 8, 64).bind(Horizon("9ep"))
    with pytest.raises(BatchSizeError, match="function"):
        bound.decide(Timestamp(), bound.start, NO_SIGNALS)


def test_the_start_must_fit() -> None:
    with pytest.raises(BatchSizeError, match="max_batch_size"):
        IncreaseFunction(by_epoch, 65, 64)
    with pytest.raises(BatchSizeError, match="max_batch_size"):
        IncreaseFunction(by_epoch, 8, "most")
    with pytest.raises(BatchSizeError, match="function"):
        IncreaseFunction(8, 8, 64)  # type: ignore[arg-type]


def test_the_largest_size_may_be_found_later() -> None:
    policy = AtMost(PeriodSizes([("rest", IncreaseFunction(by_epoch, 8, "auto"))]), 100)
    assert awaits_maximum(policy)
    with pytest.raises(BatchSizeError, match="Trainer"):
        policy.bind(Horizon("9ep", dataset_num_samples=10))
    found = with_maximum(policy, 64)
    assert found == AtMost(PeriodSizes([("rest", IncreaseFunction(by_epoch, 8, 64))]), 100)
    assert not awaits_maximum(found)
    assert with_maximum(found, 1) is found
    with pytest.raises(BatchSizeError, match="max_batch_size"):
        with_maximum(policy, 4)


def test_every_policy_with_a_largest_size_may_wait_for_it() -> None:
    plateau = Plateau("validation/loss", start=8, maximum="auto")
    policy = PeriodSizes([("1ep", NoiseScale(8, "auto")), ("rest", plateau)])
    assert awaits_maximum(policy)
    for one in (NoiseScale(8, "auto"), plateau):
        with pytest.raises(BatchSizeError, match="Trainer"):
            one.bind(Horizon("9ep", dataset_num_samples=10))
    found = with_maximum(policy, 64)
    grown = Plateau("validation/loss", start=8, maximum=64)
    assert found == PeriodSizes([("1ep", NoiseScale(8, 64)), ("rest", grown)])
    tokens: Any = with_maximum(NoiseScale("8tok", "auto"), 64)
    assert tokens == NoiseScale("8tok", "64tok")


@pytest.mark.parametrize("maximum", ["memory", "8x memory", "8xmemory", " auto", "all", None, [8]])
def test_what_is_no_largest_size_is_refused(maximum: Any) -> None:
    for make in (
        lambda: NoiseScale(8, maximum),
        lambda: Plateau("validation/loss", start=8, maximum=maximum),
        lambda: IncreaseFunction(by_epoch, 8, maximum),
        lambda: AsManyAsFit(maximum),
    ):
        with pytest.raises(BatchSizeError, match="or 'auto'"):
            make()


def test_as_many_as_fit_may_stand_wherever_a_size_may() -> None:
    policy = PeriodSizes([("1ep", 8), ("rest", AtMost(AsManyAsFit(), 50))])
    assert awaits_maximum(policy)
    assert policy == PeriodSizes([("1ep", 8), ("rest", AtMost("auto", 50))])  # type: ignore[arg-type]
    found = with_maximum(policy, 64)
    horizon = Horizon("3ep", dataset_num_samples=100)
    assert {step.size for step in walk(horizon, found.bind(horizon))} == {8, 4, 50}
    with pytest.raises(BatchSizeError, match="Trainer"):
        policy.bind(horizon)


def test_a_size_of_a_policy_of_yours_is_left_alone() -> None:
    class Mine(BatchSizePolicy):
        size = "auto"

        def bind(self, horizon: Horizon) -> Any:
            raise NotImplementedError

    mine = Mine()
    assert not awaits_maximum(mine)
    assert with_maximum(mine, 8) is mine


def test_as_many_as_fit_is_as_many_as_fitted_when_the_run_began() -> None:
    bound = AsManyAsFit(64).bind(Horizon("3ep"))
    size, state = bound.decide(Timestamp(), {"found": 48}, Signals())
    assert (size, state) == (48, {"found": 48})
    assert bound.accepts(state)


def test_a_function_is_asked_before_every_batch() -> None:
    horizon = Horizon("100sp")
    sizes = [step.size for step in walk(horizon, SizeFunction(growing, 3).bind(horizon))]
    assert sizes == [6, 12, 24, 48, 10]
    sizes = [step.size for step in walk(horizon, SizeFunction(growing).bind(horizon))]
    assert sizes == [4, 8, 16, 32, 40]


def test_a_function_is_asked_now_and_then() -> None:
    horizon = Horizon("4ep", dataset_num_samples=10)
    policy = SizeFunction(growing, 1, every="1.5ep").bind(horizon)
    steps = list(walk(horizon, policy))
    assert [(step.timestamp.sample, step.size) for step in steps] == [
        (0, 2), (2, 2), (4, 2), (6, 2), (8, 2), (10, 2), (12, 2), (14, 2),
        (16, 4), (20, 4), (24, 4), (28, 2), (30, 8), (38, 2),
    ]  # fmt: skip


def test_a_function_of_measurements_is_not_static() -> None:
    assert SizeFunction(growing).bind(Horizon("1ep")).is_static
    assert not SizeFunction(growing, planned=False).bind(Horizon("1ep")).is_static
    assert not SizeFunction(growing, every="5m").bind(Horizon("1ep")).is_static


@pytest.mark.parametrize("size", [0, -8, 8.0, None, "8ep", True], ids=repr)
def test_wrong_sizes_name_the_function(size: object) -> None:
    def mine(timestamp: Timestamp, current: int | None) -> int:
        return size  # type: ignore[return-value]

    bound = SizeFunction(mine).bind(Horizon("9ep"))
    with pytest.raises(BatchSizeError, match="returned"):
        bound.decide(Timestamp(), bound.start, NO_SIGNALS)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(BatchSizeError, match="function"):
        SizeFunction(8)  # type: ignore[arg-type]
    with pytest.raises(BatchSizeError, match="every='0ep'"):
        SizeFunction(growing, every="0ep")
    with pytest.raises(BatchSizeError, match="batch"):
        SizeFunction(growing, 0)
    with pytest.raises(ConversionError, match="dataset_num_samples"):
        SizeFunction(growing, every="0.5ep").bind(Horizon("2ep"))


def test_values() -> None:
    policies = [
        SizeFunction(growing),
        SizeFunction(growing, 4, every="1ep", planned=False),
        IncreaseFunction(by_epoch, 8, 64),
    ]
    for policy in policies:
        assert eval(repr(policy)) == policy
    assert policies[1].scaled(3) == SizeFunction(growing, 4, every="3ep", planned=False)
    assert [policy.times() for policy in policies] == [(), (Time("1ep"),), ()]
    assert policies[2].scaled(3) == policies[2]


@pytest.mark.parametrize(
    "function", [max, lambda *_: 8, lambda now, current: 8], ids=["builtin", "any", "two"]
)
def test_any_other_function_is_asked_for_sizes(function: Any) -> None:
    assert as_policy(function) == SizeFunction(function)


def test_an_increment_returned_for_a_size_is_refused_with_what_increments_are_for() -> None:
    bound = as_policy(lambda e, b: 0).bind(Horizon("1ep"))
    with pytest.raises(BatchSizeError, match="increments"):
        bound.decide(Timestamp(), bound.start, NO_SIGNALS)
