"""The curves from one factor to another."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.schedules.schedule import cosine_left, linear, transition
from stretto.schedules.scope import Mark, Scope
from stretto.timing import Horizon, Timestamp

FACTORS = st.floats(0, 10)


def span_of(start: Fraction, end: Fraction) -> Scope:
    """Return a stretch of a run of 100 batches."""
    run = Scope.of(Horizon("100ba"))
    return run.part(Mark(run.axis, start), Mark(run.axis, end))


@given(FACTORS, FACTORS, st.fractions(0, 50), st.fractions(0, 60), st.integers(-10, 120))
def test_a_line_is_that_of_exact_arithmetic(
    start: float, end: float, begin: Fraction, length: Fraction, batch: int
) -> None:
    to = begin + length
    bound = linear(span_of(begin, Fraction(100)), to, start, end)
    # A curve of no length is at its end from the beginning; the span ends at 100.
    passed = min(Fraction(batch), Fraction(100)) - begin
    part = min(max(passed / length, Fraction(0)), Fraction(1)) if length else Fraction(1)
    exact = Fraction(start) + (Fraction(end) - Fraction(start)) * part
    assert bound(Timestamp(batch=batch)) == pytest.approx(float(exact), rel=1e-14, abs=1e-14)


@given(FACTORS, FACTORS, st.integers(0, 10**6))
def test_rounding_steps_over_no_end(start: float, end: float, batch: int) -> None:
    span = Scope.of(Horizon("1_000_003ba"))
    assert span.end is not None
    low, high = min(start, end), max(start, end)
    assert low <= linear(span, span.end, start, end)(Timestamp(batch=batch)) <= high
    bound = transition(span, span.end, start, end, lambda x: end + (start - end) * cosine_left(x))
    assert low <= bound(Timestamp(batch=batch)) <= high
