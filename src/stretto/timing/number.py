"""Exact fractions and whole counts from numbers of any type."""

from __future__ import annotations

import operator
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from numbers import Number, Rational

from stretto.errors import StrettoError, Text, TimeError, shown

MAX_DIGITS = 200
"""Most digits in the numerator and the denominator of an amount: enough for a dozen float factors,
and few enough that every amount can be printed, read back and converted to a float."""


def exact(number: object) -> Fraction:
    """Return the exact value of a number; a float counts as the decimal that it prints as.

    NumPy scalars count, too: they are registered as `numbers.Rational` and `numbers.Real`, so this
    does not import NumPy.

    >>> exact(0.29)
    Fraction(29, 100)

    Raises:
        TimeError: it is not a finite number, or it is a boolean.
    """
    if type(number) is int:
        return Fraction(number)
    if type(number) is Fraction:
        return number
    if not isinstance(number, (float, bool)) and isinstance(number, Rational):
        # int(): the arithmetic of NumPy's integers wraps around at 64 bits.
        return Fraction(int(number.numerator), int(number.denominator))
    decimal = _decimal(number)
    if decimal is None:
        raise TimeError.cannot(
            f"take {shown(number)} as an amount of time",
            why=f"it is not a finite number of at most {MAX_DIGITS} digits",
            instead="write an int, a finite float, a Fraction or a Decimal",
        )
    # Not Fraction(decimal): its type checks cost as much again.
    return Fraction(*decimal.as_integer_ratio())


def is_number(value: object) -> bool:
    """Return whether `value` is a number of any type; a boolean is none.

    >>> is_number(0.5), is_number(True)
    (True, False)
    """
    return isinstance(value, Number) and not isinstance(value, (bool, complex))


def whole(value: object) -> int | None:
    """Return `value` as an int if it is a whole number of any integer type, else None.

    Booleans and floats are not whole numbers here: `True` samples or `32.0` samples are mistakes.

    >>> whole(5), whole(5.0)
    (5, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def checked_whole(
    value: object,
    kind: type[StrettoError],
    what: Text,
    instead: Text,
    *,
    least: int = 1,
) -> int:
    """Return `value` as an int; refuse all but integers of at least `least`.

    Raises:
        StrettoError: of the `kind`; it is something else.
    """
    number = whole(value)
    if number is None or number < least:
        why = f"it is not an integer of at least {least}"
        raise kind.cannot(what, why=why, instead=instead)
    return number


def _decimal(number: object) -> Decimal | None:
    """Return the decimal that a number prints as.

    None if there is none, or if it is too long to expand, such as Decimal('1e999999999').
    """
    if not is_number(number):
        return None
    try:
        # Not repr(): NumPy's float64 is a float whose repr is 'np.float64(0.29)'.
        decimal = Decimal(float.__repr__(number) if isinstance(number, float) else str(number))
    except InvalidOperation:
        return None
    if not decimal:
        return Decimal(0)
    if not decimal.is_finite():
        return None
    exponent = decimal.as_tuple().exponent
    fits = decimal.adjusted() <= 2 * MAX_DIGITS and int(exponent) >= -2 * MAX_DIGITS
    return decimal if fits else None
