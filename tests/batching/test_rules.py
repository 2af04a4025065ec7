from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import (
    FunctionRule,
    LearningRateRule,
    LinearRule,
    NoRule,
    RuleLike,
    SquareRootRule,
    as_rule,
)
from stretto.errors import BatchSizeError


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_rules_are_their_formulas(size: int, reference: int) -> None:
    assert NoRule()(size) == 1.0
    assert LinearRule(reference)(size) == size / reference
    assert SquareRootRule(reference)(size) == math.sqrt(size / reference)
    assert LinearRule(size)(size) == SquareRootRule(size)(size) == 1.0


def clipped(size: int) -> float:
    return min(2, size / 256)


@pytest.mark.parametrize(
    "rule", [NoRule(), LinearRule(256), SquareRootRule(256), FunctionRule(clipped)], ids=repr
)
def test_rules_are_values(rule: LearningRateRule) -> None:
    assert eval(repr(rule)) == rule
    assert isinstance(rule(1024), float)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0, None, "1", True], ids=repr)
def test_wrong_factors_name_the_call(factor: object) -> None:
    def mine(size: int) -> float:
        return factor  # type: ignore[return-value]

    with pytest.raises(BatchSizeError, match="finite"):
        FunctionRule(mine)(64)


@pytest.mark.parametrize("rule", [LinearRule, SquareRootRule])
@pytest.mark.parametrize("reference", [0, -1, 1.5, True, None], ids=repr)
def test_references_are_batch_sizes(rule: type[LinearRule], reference: int) -> None:
    with pytest.raises(BatchSizeError, match="reference"):
        rule(reference)


def test_a_rule_is_a_function() -> None:
    with pytest.raises(BatchSizeError, match="learning"):
        FunctionRule("sqrt")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ({"linear": 256}, LinearRule(256)),
        ({"sqrt": 256}, SquareRootRule(256)),
        (clipped, FunctionRule(clipped)),
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
        ("sqrt", r"which batch size .* write for example {'sqrt': 256}"),
        ("root", "it is not a rule, a mapping or a function; write .*{'sqrt': 256}"),
        (256, "it is not a rule, a mapping or a function; write .*{'sqrt': 256}"),
        ({}, "not exactly one of 'linear' and 'sqrt'"),
        ({"sqrt": 8, "linear": 8}, "not exactly one of 'linear' and 'sqrt'"),
        ({"squared": 8}, "not exactly one of 'linear' and 'sqrt'"),
        ({"sqrt": "8"}, "use '8' as the reference of a learning rate rule"),
    ],
    ids=repr,
)
def test_what_is_no_rule_says_what_to_write(written: RuleLike, message: str) -> None:
    with pytest.raises(BatchSizeError, match=message):
        as_rule(written)
