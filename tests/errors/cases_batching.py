"""Wrong input at batch size policies, splits and learning rate rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.batching import (
    NO_SIGNALS,
    DoublingRamp,
    Fixed,
    IncreaseFunction,
    NoiseScale,
    NormTest,
    SizeFunction,
    StagedRamp,
    as_policy,
    as_rule,
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
    ("batching-size-digits", lambda: Fixed(10**400)),
    ("batching-steps-digits", lambda: as_policy("9" * 5000)),
    ("batching-equal-word", lambda: DoublingRamp(8, 64, "1h", equal=wrong)),
    ("batching-ramp-stages-unsorted", lambda: StagedRamp([8, 64, 32], "1ep")),
    ("batching-increase-cap", lambda: IncreaseFunction(increase_by_half, 8, wrong)),
    ("batching-increase-float", lambda: decide(IncreaseFunction(increase_by_half, 8, 64), RUN)),
    ("batching-function-not-one", lambda: SizeFunction(wrong)),
    ("batching-function-size", lambda: decide(SizeFunction(size_zero), RUN)),
    ("batching-rule-function", lambda: as_rule(wrong)),
    ("batching-rule-factor", lambda: plan(RUN, 8, schedules={"lr": 1}, rule=infinite)),
    ("batching-noise-of-one", lambda: NoiseScale(1, 64)),
    ("batching-norm-test-of-one", lambda: NormTest(1, 64)),
]
