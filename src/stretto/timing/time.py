"""`Time`: an exact amount of one unit."""

from __future__ import annotations

import math
import warnings
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import NoReturn, TypeAlias, final

from stretto.errors import TimeError, UnitError, cannot
from stretto.timing import grammar
from stretto.timing.unit import NAMES, TimeUnit, parse_unit

Number: TypeAlias = int | float | Fraction | Decimal


@final
class Time:
    """An exact rational amount of one unit: 90 epochs, 2 billion tokens, a tenth of the run.

    A time is made from text, from a number and a unit, or from a `datetime.timedelta`:

    >>> Time("90ep")
    Time('90ep')
    >>> Time(90, "ep") == Time("90ep")
    True
    >>> Time("1h30m") + Time("45sec")
    Time('1h30m45s')

    A float counts as the decimal that it prints as, so nothing is lost to binary fractions:

    >>> Time("100ep") * 0.29
    Time('29ep')

    Times of different units are never equal, and comparing or adding them raises: converting needs
    facts about the run, which `Horizon.convert` and `convert` have.

    Args:
        value: text, a `timedelta`, another `Time`, or a number that goes with `unit`.
        unit: the unit of a number; left out for everything else.

    Raises:
        TimeError: the value is not a time; the message says what to write.
    """

    __slots__ = ("_amount", "_unit")
    _amount: Fraction
    _unit: TimeUnit

    def __init__(self, value: Time | str | timedelta | Number, unit: str | None = None) -> None:
        amount, found = _read(value, unit)
        object.__setattr__(self, "_amount", amount)
        object.__setattr__(self, "_unit", found)

    @property
    def amount(self) -> Fraction:
        """How many units, exactly.

        >>> Time("0.5ep").amount
        Fraction(1, 2)
        """
        return self._amount

    @property
    def unit(self) -> TimeUnit:
        """The unit that the amount counts.

        >>> Time("0.5ep").unit
        <TimeUnit.EPOCH: 'ep'>
        """
        return self._unit

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Time cannot be changed: tried to set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Time cannot be changed: tried to delete {name!r}")

    def __reduce__(self) -> tuple[type[Time], tuple[str]]:
        return Time, (str(self),)

    def __str__(self) -> str:
        return grammar.show(self._amount, self._unit)

    def __repr__(self) -> str:
        return f"Time('{self}')"

    def __hash__(self) -> int:
        # Of the amount alone: a Time equals a raw integer, so it must hash like one.
        return hash(self._amount)

    def __bool__(self) -> bool:
        return self._amount != 0

    def __int__(self) -> int:
        if self._amount.denominator != 1:
            raise TimeError(
                cannot(
                    f"take '{self}' as an int",
                    why="it is not whole",
                    instead="use .amount, or math.floor, math.ceil or round on it",
                )
            )
        return self._amount.numerator

    def __float__(self) -> float:
        return float(self._amount)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Time):
            return self._unit is other._unit and self._amount == other._amount
        if _is_raw_integer(other):
            return self._amount == self._raw(other)
        return NotImplemented

    def __lt__(self, other: Time | int) -> bool:
        return self._amount < self._like(other, "compare")

    def __le__(self, other: Time | int) -> bool:
        return self._amount <= self._like(other, "compare")

    def __gt__(self, other: Time | int) -> bool:
        return self._amount > self._like(other, "compare")

    def __ge__(self, other: Time | int) -> bool:
        return self._amount >= self._like(other, "compare")

    def __neg__(self) -> Time:
        return Time(-self._amount, self._unit)

    def __abs__(self) -> Time:
        return Time(abs(self._amount), self._unit)

    def __add__(self, other: Time | int) -> Time:
        return Time(self._amount + self._like(other, "add"), self._unit)

    __radd__ = __add__

    def __sub__(self, other: Time | int) -> Time:
        return Time(self._amount - self._like(other, "subtract"), self._unit)

    def __rsub__(self, other: int) -> Time:
        return Time(self._like(other, "subtract") - self._amount, self._unit)

    def __mul__(self, other: Time | Number) -> Time:
        if not isinstance(other, Time):
            return Time(self._amount * _exact(other), self._unit)
        if other._unit is TimeUnit.DURATION:
            return Time(self._amount * other._amount, self._unit)
        if self._unit is TimeUnit.DURATION:
            return Time(self._amount * other._amount, other._unit)
        raise UnitError(
            cannot(
                f"multiply '{self}' by '{other}'",
                why="neither is a number or a fraction of the run",
                instead="multiply by a number or by a time in 'dur'",
            )
        )

    __rmul__ = __mul__

    def __truediv__(self, other: Time | Number) -> Time:
        """A time over a number is a time; over a time of its unit, a fraction (`dur`)."""
        if isinstance(other, Time):
            return Time(self._over(self._like(other, "divide")), TimeUnit.DURATION)
        return Time(self._over(_exact(other)), self._unit)

    def __floordiv__(self, other: Time) -> int:
        """How many whole times `other` goes into this time."""
        return math.floor(self._over(self._like(other, "divide")))

    def __mod__(self, other: Time) -> Time:
        """What is left of this time after whole multiples of `other`."""
        return Time(self._amount - (self // other) * other._amount, self._unit)

    def _over(self, divisor: Fraction) -> Fraction:
        if divisor == 0:
            raise ZeroDivisionError(f"cannot divide '{self}' by zero")
        return self._amount / divisor

    def _like(self, other: Time | int, verb: str) -> Fraction:
        """The amount of `other`, which must be of this time's unit or a raw integer."""
        if isinstance(other, Time) and other._unit is self._unit:
            return other._amount
        if _is_raw_integer(other):
            return self._raw(other)
        if isinstance(other, Time):
            why = f"one counts {NAMES[self._unit]} and the other {NAMES[other._unit]}"
            raise UnitError(
                cannot(
                    f"{verb} '{self}' and '{other}'",
                    why=why,
                    instead="convert one of them first with Horizon.convert or stretto.convert",
                )
            )
        raise UnitError(
            cannot(
                f"{verb} '{self}' and {other!r}",
                why=f"a {type(other).__name__} has no unit",
                instead=f"write Time({str(other)!r}, '{self._unit}')"
                if isinstance(other, (float, Fraction, Decimal))
                else "pass a Time",
            )
        )

    def _raw(self, other: int) -> Fraction:
        warnings.warn(
            f"{other} has no unit and is taken as '{other}{self._unit}'; "
            f"write Time({other}, '{self._unit}')",
            UserWarning,
            stacklevel=4,
        )
        return Fraction(other)


TimeLike: TypeAlias = Time | str | timedelta
"""What is accepted as a time at the edges."""


def _is_raw_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _exact(number: object) -> Fraction:
    """The exact value of a number; a float counts as the decimal that it prints as."""
    if isinstance(number, (int, Fraction)) and not isinstance(number, bool):
        return Fraction(number)
    if isinstance(number, float) and math.isfinite(number):
        return Fraction(repr(number))
    if isinstance(number, Decimal) and number.is_finite():
        return Fraction(number)
    raise TimeError(
        cannot(
            f"take {number!r} as an amount of time",
            why="it is not a finite number",
            instead="write an int, a finite float, a Fraction or a Decimal",
        )
    )


def _read(value: object, unit: str | None) -> tuple[Fraction, TimeUnit]:
    if isinstance(value, (Time, str, timedelta)):
        if unit is not None:
            raise TimeError(
                cannot(
                    f"read {value!r} as a time in {unit!r}",
                    why="it has a unit of its own",
                    instead=f"write Time({value!r})",
                )
            )
        if isinstance(value, Time):
            return value._amount, value._unit
        if isinstance(value, str):
            return grammar.parse(value)
        return Fraction(value // timedelta(microseconds=1), 10**6), TimeUnit.SECOND
    if unit is None:
        shown = f"Time({value!r}, 'ep')" if isinstance(value, (int, float)) else "Time('90ep')"
        raise TimeError(
            cannot(f"read {value!r} as a time", why="it has no unit", instead=f"write {shown}")
        )
    found = parse_unit(unit)
    return grammar.check(_exact(value), found, f"{value}{found}"), found
