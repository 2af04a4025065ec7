"""Wrong input at batch size policies, splits and learning rate rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.batching import (
    NO_SIGNALS,
    AtMost,
    DoublingRamp,
    Fixed,
    Hysteresis,
    IncreaseFunction,
    LinearRamp,
    LinearRule,
    MultipleOf,
    NoiseScale,
    NormTest,
    PeriodSizes,
    PiecewiseConstant,
    SizeFunction,
    StagedRamp,
    as_policy,
    as_rule,
    rampup,
    split,
)
from stretto.planning import next_step, plan
from stretto.timing import Horizon, Timestamp

wrong: Any = None
"""A value that a type checker would refuse."""


def increase_by_half(epoch: int, current_batch_size: int) -> Any:
    """An increase function that returns a float."""
    del epoch
    return current_batch_size / 2


def size_zero(timestamp: Timestamp, current: int | None) -> int:
    """A size function that returns no size."""
    del timestamp, current
    return 0


def infinite(size: int) -> float:
    """A learning rate rule that returns no factor."""
    del size
    return float("inf")


def decide(policy: Any, horizon: Horizon) -> object:
    """Decide the first batch of a run."""
    bound = policy.bind(horizon)
    return next_step(horizon, bound, Timestamp(), bound.start, NO_SIGNALS)


RUN = Horizon("2ep", dataset_num_samples=100)

CASES: list[tuple[str, Callable[[], object]]] = [
    ("batching-size-zero", lambda: Fixed(0)),
    ("batching-size-negative", lambda: Fixed(-8)),
    ("batching-size-bool", lambda: Fixed(True)),
    ("batching-size-float", lambda: as_policy(64.0)),
    ("batching-size-none", lambda: as_policy(wrong)),
    ("batching-size-list", lambda: as_policy([8, 16])),
    ("batching-size-digits", lambda: Fixed(10**400)),
    ("batching-steps-digits", lambda: as_policy("9" * 5000)),
    (
        "batching-equal-seconds",
        lambda: DoublingRamp(8, 64, "1h", equal="batches").bind(Horizon("1ep")),
    ),
    ("batching-equal-word", lambda: DoublingRamp(8, 64, "1h", equal=wrong)),
    ("batching-steps-none", lambda: PiecewiseConstant("")),
    ("batching-steps-no-colon", lambda: PiecewiseConstant("768")),
    ("batching-steps-bare-zero", lambda: PiecewiseConstant("0:768 250Btok:1536")),
    ("batching-steps-not-a-size", lambda: PiecewiseConstant("0tok:1e3")),
    ("batching-steps-start-late", lambda: PiecewiseConstant("5ep:8")),
    ("batching-steps-megatron", lambda: PiecewiseConstant("0:768 250B:1536")),
    ("batching-steps-unsorted", lambda: PiecewiseConstant("0ep:8 20ba:12 2ep:16 1ep:32")),
    ("batching-steps-twice", lambda: PiecewiseConstant("0ep:8 2ep:16 2ep:32")),
    ("batching-steps-list", lambda: PiecewiseConstant(["0ep:8"])),  # type: ignore[arg-type]
    ("batching-steps-key", lambda: PiecewiseConstant({"0ep": 8, 5: 16})),  # type: ignore[arg-type]
    ("batching-steps-time", lambda: PiecewiseConstant("0ep:8 3epoch:16")),
    ("batching-steps-unsorted-here", lambda: PiecewiseConstant("0ep:8 21ba:16 160sp:32").bind(RUN)),
    ("batching-steps-unsized", lambda: PiecewiseConstant("0ep:8 0.5ep:16").bind(Horizon("2ep"))),
    ("batching-ramp-shrinks", lambda: LinearRamp(64, 8, "1ep")),
    ("batching-ramp-increment", lambda: LinearRamp(8, 20, "1ep", increment=8)),
    ("batching-ramp-no-length", lambda: DoublingRamp(8, 64, "0ep")),
    ("batching-ramp-stages-few", lambda: StagedRamp([8], "1ep")),
    ("batching-ramp-stages-unsorted", lambda: StagedRamp([8, 64, 32], "1ep")),
    ("batching-ramp-unsized", lambda: DoublingRamp(8, 64, "1ep").bind(Horizon("2ep"))),
    ("batching-ramp-scaled", lambda: DoublingRamp(8, 64, "1ep").scaled(0)),
    ("batching-rampup-uneven", lambda: rampup(100, "1ep", world_size=8, micro_batch_size=4)),
    ("batching-periods-none", lambda: PeriodSizes([])),
    ("batching-periods-pair", lambda: PeriodSizes([("10%", 8, 9)])),  # type: ignore[list-item]
    ("batching-periods-no-length", lambda: PeriodSizes([("0ep", 8), ("rest", 16)])),
    ("batching-periods-two-rests", lambda: PeriodSizes([("rest", 8), ("rest", 16)])),
    ("batching-periods-no-rest", lambda: PeriodSizes([("2ep", 8), ("rest", 16)]).bind(RUN)),
    (
        "batching-periods-unknown-rest",
        lambda: PeriodSizes([("10ba", 8), ("rest", 16), ("10ba", 32)]).bind(RUN),
    ),
    ("batching-increase-start", lambda: IncreaseFunction(increase_by_half, 65, 64)),
    ("batching-increase-cap", lambda: IncreaseFunction(increase_by_half, 8, wrong)),
    ("batching-increase-float", lambda: decide(IncreaseFunction(increase_by_half, 8, 64), RUN)),
    ("batching-function-not-one", lambda: SizeFunction(wrong)),
    ("batching-function-size", lambda: decide(SizeFunction(size_zero), RUN)),
    ("batching-function-every", lambda: SizeFunction(size_zero, every="0ep")),
    ("batching-at-most-zero", lambda: AtMost(Fixed(8), 0)),
    ("batching-multiple-of-zero", lambda: MultipleOf(Fixed(8), 0)),
    ("batching-rounding", lambda: MultipleOf(Fixed(8), 8, "nearest")),  # type: ignore[arg-type]
    ("batching-hysteresis-ratio", lambda: Hysteresis(Fixed(8), 1)),
    ("batching-hysteresis-wait", lambda: Hysteresis(Fixed(8), 2, wait="0ep")),
    ("batching-words-none", lambda: as_policy({"at_most": 8})),
    ("batching-split-ranks", lambda: split(8, 0)),
    ("batching-split-start", lambda: split(8, 2, start=-1)),
    ("batching-split-uneven", lambda: split(40, 4, 4, even=True)),
    ("batching-rule-reference", lambda: LinearRule(0)),
    ("batching-rule-function", lambda: as_rule(wrong)),
    ("batching-rule-factor", lambda: plan(RUN, 8, schedules={"lr": 1}, rule=infinite)),
    ("batching-noise-of-one", lambda: NoiseScale(1, 64)),
    ("batching-noise-down-to-one", lambda: NoiseScale(8, 64, minimum=1)),
    ("batching-norm-test-of-one", lambda: NormTest(1, 64)),
]
