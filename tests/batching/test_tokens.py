from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from stretto import batching, schedules
from stretto.batching import (
    NO_SIGNALS,
    AtMost,
    BatchSizePolicy,
    DoublingRamp,
    Fixed,
    IncreaseFunction,
    LinearRamp,
    MultipleOf,
    NoiseScale,
    PeriodSizes,
    PiecewiseConstant,
    Plateau,
    Seesaw,
    SizeFunction,
    StagedRamp,
    Tokens,
    as_policy,
    checked_size,
    rampup,
)
from stretto.errors import BatchSizeError
from stretto.timing import Horizon, Time, Timestamp, TimeUnit

WRITTEN = [
    ("64Ktok", Fixed(Tokens(64_000))),
    (Time("4Mtok"), Fixed(Tokens(4_000_000))),
    (Tokens(8), Fixed(Tokens(8))),
    ("128sp", Fixed(128)),
    ({"0ep": "8Ktok", "1ep": Tokens(9)}, PiecewiseConstant("0ep:8_000tok 1ep:9tok")),
]


@pytest.mark.parametrize(("written", "policy"), WRITTEN, ids=repr)
def test_sizes_as_they_are_written(written: object, policy: BatchSizePolicy) -> None:
    assert as_policy(written) == policy
    assert as_policy(written).unit is policy.unit


def test_tokens_keep_their_unit() -> None:
    assert type(checked_size("64Ktok")) is type(checked_size(Tokens(5))) is Tokens
    assert type(checked_size("64Ksp")) is type(checked_size("64_000")) is int
    assert type(pickle.loads(pickle.dumps(Tokens(5)))) is Tokens
    assert checked_size(str(Tokens(12_345))) == Tokens(12_345)
    assert json.dumps([Tokens(5)]) == "[5]"


@pytest.mark.parametrize(
    ("size", "match"),
    [
        ("64Kba", "a time in batches"),
        ("1ep", "a time in epochs"),
        ("50%", "fractions"),
        ("64K", "'64Ktok'"),
        ("0tok", "less than 1"),
        ("-8tok", "less than 1"),
        (Tokens(0), "at least 1"),
        (Time("1h"), "seconds"),
        ("9" * 201, "not a number"),
        ("", "not a number"),
        ("x" * 10_000, "not a number"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_other_units_are_refused(size: object, match: str) -> None:
    with pytest.raises(BatchSizeError, match=match):
        checked_size(size)


IN_TOKENS = [
    "64Ktok",
    "0tok:16Ktok 2Mtok:64Ktok",
    LinearRamp("16Ktok", "64Ktok", "1ep"),
    LinearRamp("16Ktok", "64Ktok", "1ep", increment="8Ktok"),
    DoublingRamp("16Ktok", "64Ktok", "1ep"),
    StagedRamp(["16Ktok", "64Ktok"], "1ep"),
    PeriodSizes([("1ep", "16Ktok"), ("rest", "64Ktok")]),
    AtMost(Fixed("64Ktok"), "16Ktok"),
    MultipleOf(Fixed("64Ktok"), "4Ktok"),
    NoiseScale("16Ktok", "64Ktok"),
    Plateau("a/b", start="16Ktok", maximum="64Ktok"),
    Seesaw(1.0, "16Ktok", maximum="64Ktok", multiple_of="4Ktok").policy,
]


@pytest.mark.parametrize("written", IN_TOKENS, ids=repr)
def test_a_policy_in_tokens_reads_back(written: object) -> None:
    policy = as_policy(written)
    assert policy.unit is TimeUnit.TOKEN
    again = eval(repr(policy), vars(schedules) | vars(batching))
    assert again == policy
    assert again.unit is TimeUnit.TOKEN


MIXED: list[Callable[[], object]] = [
    lambda: PiecewiseConstant("0tok:16Ktok 2Mtok:64"),
    lambda: LinearRamp(8, "64Ktok", "1ep"),
    lambda: LinearRamp("8Ktok", "64Ktok", "1ep", increment=8),
    lambda: DoublingRamp("8Ktok", 64, "1ep"),
    lambda: StagedRamp([8, "64Ktok"], "1ep"),
    lambda: PeriodSizes([("1ep", 8), ("rest", "64Ktok")]),
    lambda: AtMost(Fixed(8), "64Ktok"),
    lambda: MultipleOf(Fixed("64Ktok"), 8),
    lambda: NoiseScale(8, "64Ktok"),
    lambda: NoiseScale("8Ktok", "64Ktok", minimum=8),
    lambda: Plateau("a/b", start=8, maximum="64Ktok"),
    lambda: AtMost(SizeFunction(lambda *_: 8), "64Ktok"),
    lambda: IncreaseFunction(lambda *_: 8, "8Ktok", 64),
    lambda: Seesaw(1.0, "16Ktok", maximum=64),
    lambda: Seesaw(1.0, "16Ktok", reference=64),
    lambda: Seesaw(1.0, "16Ktok", multiple_of=8),
]


@pytest.mark.parametrize("make", MIXED, ids=range(len(MIXED)))
def test_mixed_units_are_refused_when_it_is_made(make: Callable[[], object]) -> None:
    with pytest.raises(BatchSizeError, match=r"in (samples|tokens) and .* in (samples|tokens)"):
        make()


def decided(policy: BatchSizePolicy, **at: int) -> int:
    bound = policy.bind(Horizon("9ep"))
    return bound.decide(Timestamp(**at), bound.start, NO_SIGNALS)[0]


def test_a_function_states_its_unit() -> None:
    seen: list[object] = []

    def asked(timestamp: Timestamp, current: int | None) -> object:
        seen.append(current)
        return ["64Ktok", Tokens(5), 7][timestamp.batch]

    function: Any = asked
    for policy in (SizeFunction(function, in_tokens=True), SizeFunction(function, "8Ktok")):
        assert policy.unit is TimeUnit.TOKEN
        assert [decided(policy, batch=batch) for batch in range(3)] == [64_000, 5, 7]
    assert seen[-3:] == [8_000] * 3
    with pytest.raises(BatchSizeError, match="in_tokens=True"):
        decided(SizeFunction(function))
    assert decided(SizeFunction(function), batch=2) == 7
    samples: Any = lambda *_: "8sp"  # noqa: E731
    with pytest.raises(BatchSizeError, match="in tokens"):
        decided(SizeFunction(samples, in_tokens=True))


def test_increments_have_the_unit_of_the_start() -> None:
    grow: Any = lambda epoch, current: "8Ktok" if epoch else None  # noqa: E731
    assert decided(IncreaseFunction(grow, "8Ktok", "64Ktok"), epoch=2) == 24_000
    with pytest.raises(BatchSizeError, match="write the start in tokens"):
        decided(IncreaseFunction(grow, 8, 64), epoch=2)


def test_a_rampup_by_accumulation_has_one_unit() -> None:
    ramp = rampup("64Ktok", "10%", world_size=4, micro_batch_size="4Ktok")
    assert ramp == DoublingRamp("16Ktok", "64Ktok", "10%")
    with pytest.raises(BatchSizeError, match="multiple"):
        rampup("64Ktok", "10%", world_size=4, micro_batch_size=8)
    with pytest.raises(BatchSizeError, match="write 48Ktok or 64Ktok"):
        rampup("50Ktok", "10%", world_size=4, micro_batch_size="4Ktok")


def test_the_number_of_evaluations_is_no_amount() -> None:
    with pytest.raises(BatchSizeError, match="patience"):
        Plateau("a/b", start=8, maximum=64, patience="8tok")  # type: ignore[arg-type]
