"""Numbers of any type: exact fractions and whole counts."""

from __future__ import annotations

from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.timing.grammar import exact, is_number, whole


class Size(IntEnum):
    SMALL = 8


@given(
    st.integers() | st.fractions() | st.decimals(allow_nan=False, allow_infinity=False, places=9)
)
def test_exact_numbers_stay_what_they_are(number: int | Fraction | Decimal) -> None:
    assert exact(number) == number
    assert type(exact(number)) is Fraction


@given(st.floats(2.0**-20, 2.0**20, width=32))
def test_a_numpy_float_is_the_decimal_that_it_prints_as(number: float) -> None:
    assert exact(np.float32(number)) == Fraction(str(np.float32(number)))
    assert exact(np.float64(number)) == exact(number) == Fraction(repr(number))


@given(st.integers(-(2**63), 2**63 - 1))
def test_numpy_integers_do_not_wrap_around(number: int) -> None:
    assert exact(np.int64(number)) ** 3 == number**3
    assert type(whole(np.int64(number))) is int


@pytest.mark.parametrize(
    ("value", "count"),
    [(5, 5), (Size.SMALL, 8), (np.uint8(5), 5), (True, None), (np.True_, None), (5.0, None),
     (Fraction(5), None), (Decimal(5), None), ("5", None), (None, None), (np.float32(5), None)],
)  # fmt: skip
def test_whole(value: object, count: int | None) -> None:
    assert whole(value) == count
    assert type(whole(value)) is type(count)


@pytest.mark.parametrize("zero", [Decimal(0), Decimal("0E+999999"), Decimal("-0"), -0.0])
def test_zero_in_any_spelling(zero: Decimal) -> None:
    assert exact(zero) == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, True), (0.5, True), (Fraction(1), True), (Decimal(1), True), (np.int8(1), True),
     (np.float32(1), True), (True, False), (1j, False), ("1", False), (None, False)],
)  # fmt: skip
def test_what_is_a_number(value: object, expected: bool) -> None:
    assert is_number(value) is expected
