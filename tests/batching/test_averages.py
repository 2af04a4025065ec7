"""Student's distribution, which the interval goes by, and what may be asked of an interval."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching.averages import checked_confidence, student
from stretto.errors import BatchSizeError

# Two-sided, from the usual tables.
TABLE = {
    1: {0.8: 3.078, 0.9: 6.314, 0.95: 12.706, 0.99: 63.657, 0.999: 636.62},
    2: {0.8: 1.886, 0.9: 2.920, 0.95: 4.303, 0.99: 9.925, 0.999: 31.599},
    3: {0.8: 1.638, 0.9: 2.353, 0.95: 3.182, 0.99: 5.841, 0.999: 12.924},
    4: {0.8: 1.533, 0.9: 2.132, 0.95: 2.776, 0.99: 4.604, 0.999: 8.610},
    5: {0.8: 1.476, 0.9: 2.015, 0.95: 2.571, 0.99: 4.032, 0.999: 6.869},
    10: {0.8: 1.372, 0.9: 1.812, 0.95: 2.228, 0.99: 3.169, 0.999: 4.587},
    15: {0.8: 1.341, 0.9: 1.753, 0.95: 2.131, 0.99: 2.947, 0.999: 4.073},
    120: {0.8: 1.289, 0.9: 1.658, 0.95: 1.980, 0.99: 2.617, 0.999: 3.373},
}
confidences = st.floats(1e-6, 0.9999)


@pytest.mark.parametrize("freedom", TABLE)
def test_student_is_what_tables_say(freedom: int) -> None:
    for confidence, value in TABLE[freedom].items():
        assert student(confidence, freedom) == pytest.approx(value, rel=5e-4)


@given(confidences)
def test_student_is_as_its_closed_forms(confidence: float) -> None:
    half = confidence / 2
    assert student(confidence, 1) == pytest.approx(math.tan(math.pi * half), rel=1e-3)
    root = math.sqrt(2 / (4 * (0.5 + half) * (0.5 - half)))
    assert student(confidence, 2) == pytest.approx(2 * half * root, rel=1e-3)


@given(confidences, st.floats(1, 1000), st.floats(1.05, 2))
def test_more_freedom_needs_fewer_standard_errors(
    confidence: float, freedom: float, more: float
) -> None:
    assert student(confidence, freedom * more) <= student(confidence, freedom) * 1.0001


@given(confidences)
def test_the_integral_goes_over_into_the_expansion(confidence: float) -> None:
    assert student(confidence, 14.9999) == pytest.approx(student(confidence, 15), rel=2e-3)


@pytest.mark.parametrize("confidence", [0.99991, 0.9999999999999999])
def test_nobody_is_as_sure_as_that(confidence: float) -> None:
    with pytest.raises(BatchSizeError, match=r"not a number from 0\.01 to 0\.9999; write"):
        checked_confidence(confidence)
    assert checked_confidence(0.9999) == 0.9999
