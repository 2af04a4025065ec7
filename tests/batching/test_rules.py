from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import Horizon, plan
from stretto.batching import (
    LearningRateRule,
    LinearRule,
    RuleLike,
    SquareRootRule,
    as_rule,
)
from stretto.errors import BatchSizeError, ScheduleError


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_rules_are_their_formulas(size: int, reference: int) -> None:
    assert LinearRule(reference)(size) == size / reference
    assert SquareRootRule(reference)(size) == math.sqrt(size / reference)
    assert LinearRule(size)(size) == SquareRootRule(size)(size) == 1.0


def clipped(size: int) -> float:
    return min(2, size / 256)


@pytest.mark.parametrize("rule", [LinearRule(256), SquareRootRule(256)], ids=repr)
def test_rules_are_values(rule: LearningRateRule) -> None:
    assert eval(repr(rule)) == rule
    assert isinstance(rule(1024), float)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0, None, "1"], ids=repr)
def test_wrong_factors_name_the_call(factor: object) -> None:
    def mine(size: int) -> float:
        return factor  # type: ignore[return-value]

    with pytest.raises(ScheduleError, match="mine"):
        plan(Horizon("64sp"), 8, schedules={"lr": 1}, rule=mine)


@pytest.mark.parametrize("rule", [LinearRule, SquareRootRule])
@pytest.mark.parametrize("reference", [0, -1, 1.5, True, None], ids=repr)
def test_references_are_batch_sizes(rule: type[LinearRule], reference: int) -> None:
    with pytest.raises(BatchSizeError, match="reference"):
        rule(reference)


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ({"linear": 256}, LinearRule(256)),
        ({"sqrt": 256}, SquareRootRule(256)),
        (clipped, clipped),
        (LinearRule(8), LinearRule(8)),
    ],
    ids=["linear", "sqrt", "function", "rule"],
)
def test_a_rule_is_written_as_in_a_run_file_or_as_a_function(
    written: RuleLike, rule: LearningRateRule
) -> None:
    assert as_rule(written) == rule


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("sqrt", "sqrt"),
        ("root", "exactly"),
        (256, "exactly"),
        ({}, "exactly"),
        ({"sqrt": 8, "linear": 8}, "exactly"),
        ({"squared": 8}, "exactly"),
        ({"sqrt": "8ba"}, "reference"),
    ],
    ids=repr,
)
def test_what_is_no_rule_says_what_to_write(written: RuleLike, message: str) -> None:
    with pytest.raises(BatchSizeError, match=message):
        as_rule(written)
