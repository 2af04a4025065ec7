"""`Time`: an exact amount of one unit."""

from __future__ import annotations

import math
import warnings
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar, NoReturn, TypeAlias

from stretto.errors import ConversionError, TimeError, UnitError, shown
from stretto.timing import grammar
from stretto.timing.grammar import NAMES, WHOLE, TimeUnit, exact, is_number, parse_unit, whole

Number: TypeAlias = int | float | Fraction | Decimal


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
    facts about the run: use `Horizon.convert` or `convert`.

    Args:
        value: text, a `timedelta`, another `Time`, or a number that goes with `unit`.
        unit: the unit of a number; only for numbers.

    Raises:
        TimeError: the value is not a time; the message says what to write.
    """

    __slots__ = ("_amount", "_unit")
    # Tells NumPy's numbers to leave `np.float32(0.29) * time` to `Time`, unrounded.
    __array_ufunc__: ClassVar[None] = None
    _amount: Fraction
    _unit: TimeUnit

    def __new__(cls, value: Time | str | timedelta | Number, unit: str | None = None) -> Time:
        """Create a time; the class documents the values."""
        return _read(value, unit)

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

    def to_timestring(self) -> str:
        """Return the text of the time, as `str` does; `Time` reads it back.

        >>> Time(90, "ep").to_timestring()
        '90ep'
        """
        return grammar.show(self._amount, self._unit)

    __str__ = to_timestring

    def __repr__(self) -> str:
        return f"Time('{self}')"

    def __hash__(self) -> int:
        # Only the amount: a Time equals a raw integer, so it must hash like one.
        return hash(self._amount)

    def __bool__(self) -> bool:
        return self._amount != 0

    def __int__(self) -> int:
        if self._amount.denominator != 1:
            why, instead = "it is not whole", "use math.floor or math.ceil on .amount"
            raise TimeError.cannot(f"take '{self}' as an int", why=why, instead=instead)
        return self._amount.numerator

    def __float__(self) -> float:
        return float(self._amount)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Time):
            return self._unit is other._unit and self._amount == other._amount
        count = whole(other)
        return NotImplemented if count is None else self._amount == self._raw(count, level=3)

    def __lt__(self, other: Time | int) -> bool:
        return self._excess(other) < 0

    def __le__(self, other: Time | int) -> bool:
        return self._excess(other) <= 0

    def __gt__(self, other: Time | int) -> bool:
        return self._excess(other) > 0

    def __ge__(self, other: Time | int) -> bool:
        return self._excess(other) >= 0

    def __neg__(self) -> Time:
        return _trusted(-self._amount, self._unit)

    def __abs__(self) -> Time:
        return _trusted(abs(self._amount), self._unit)

    def __add__(self, other: Time | int) -> Time:
        return _checked(self._amount + self._like(other, "add"), self._unit)

    __radd__ = __add__

    def __sub__(self, other: Time | int) -> Time:
        return _checked(self._amount - self._like(other, "subtract"), self._unit)

    def __rsub__(self, other: int) -> Time:
        return _checked(self._like(other, "subtract") - self._amount, self._unit)

    def __mul__(self, other: Time | Number) -> Time:
        if not isinstance(other, Time):
            return _checked(self._amount * exact(other), self._unit)
        if other._unit is TimeUnit.DURATION:
            return _checked(self._amount * other._amount, self._unit)
        if self._unit is TimeUnit.DURATION:
            return _checked(self._amount * other._amount, other._unit)
        why, instead = "neither is in 'dur'", "multiply by a number or by a time in 'dur'"
        raise UnitError.cannot(f"multiply '{self}' by '{other}'", why=why, instead=instead)

    __rmul__ = __mul__

    def __truediv__(self, other: Time | Number) -> Time:
        """A time over a number is a time; over a time of its unit, a fraction (`dur`)."""
        if isinstance(other, Time):
            return _checked(self._over(self._same(other, "divide")), TimeUnit.DURATION)
        return _checked(self._over(exact(other)), self._unit)

    def __floordiv__(self, other: Time) -> int:
        """How many whole times `other` goes into this time."""
        return math.floor(self._over(self._same(other, "divide")))

    def __mod__(self, other: Time) -> Time:
        """What is left of this time after whole multiples of `other`."""
        divisor = self._same(other, "divide")
        return _checked(self._amount - math.floor(self._over(divisor)) * divisor, self._unit)

    def _over(self, divisor: Fraction) -> Fraction:
        if divisor == 0:
            raise ZeroDivisionError(f"cannot divide '{self}' by zero")
        return self._amount / divisor

    def _excess(self, other: Time | int) -> Fraction:
        """How much more this time is than another one of its unit."""
        return self._amount - self._like(other, "compare", level=5)

    def _like(self, other: object, verb: str, *, level: int = 4) -> Fraction:
        """The amount of `other`, which must be of this time's unit or a raw integer."""
        if isinstance(other, Time):
            return self._same(other, verb)
        count = whole(other)
        return self._same(other, verb) if count is None else self._raw(count, level=level)

    def _same(self, other: object, verb: str) -> Fraction:
        """The amount of `other`, which must be of this time's unit."""
        if not isinstance(other, Time):
            why, instead = "the second has no unit", f"write Time(..., '{self._unit}')"
            raise UnitError.cannot(f"{verb} '{self}' and {shown(other)}", why=why, instead=instead)
        if other._unit is not self._unit:
            why = f"one counts {NAMES[self._unit]} and the other {NAMES[other._unit]}"
            instead = "convert one with Horizon.convert or stretto.convert"
            raise UnitError.cannot(f"{verb} '{self}' and '{other}'", why=why, instead=instead)
        return other._amount

    def _raw(self, count: int, *, level: int) -> Fraction:
        """A raw integer taken in this time's unit, with a warning to the caller `level` up."""
        said = f"{shown(count)} has no unit and is taken as '{shown(count)}{self._unit}'"
        instead = f"write Time({shown(count)}, '{self._unit}')"
        warnings.warn(f"{said}; {instead}", UserWarning, stacklevel=level)
        return Fraction(count)


TimeLike: TypeAlias = Time | str | timedelta
"""Anything that `Time` accepts."""


def read_wall_clock(value: TimeLike) -> Time:
    """Return a positive wall-clock time.

    >>> read_wall_clock("1h30m").amount
    Fraction(5400, 1)

    Raises:
        TimeError: it is not a positive wall-clock time.
    """
    instead = "write '90s' or '1h30m'"
    try:
        time = Time(value)
    except TimeError as error:
        said = error.message
        raise TimeError.cannot(said.what, why=said.why, instead=instead) from None
    if time.unit is not TimeUnit.SECOND or time.amount <= 0:
        why = "it is not a wall-clock time longer than 0"
        raise TimeError.cannot(f"wait '{time}'", why=why, instead=instead)
    return time


def rounded(amount: Fraction, unit: TimeUnit) -> Time:
    """Return `amount` as a `Time`; units that come in whole numbers are rounded up."""
    return Time(Fraction(math.ceil(amount)) if unit in WHOLE else amount, unit)


def read_run(max_duration: TimeLike) -> Time:
    """Return the length of a run.

    Raises:
        TimeError: it is not a time.
        ConversionError: it is not positive, or is relative to itself.
    """
    try:
        run = Time(max_duration)
    except TimeError as error:
        if "%" not in error.message.instead and "dur'" not in error.message.instead:
            raise
        what, why = error.message.what, error.message.why
        raise TimeError.cannot(what, why=why, instead=grammar.HOW_LONG) from None
    if run.unit is TimeUnit.DURATION:
        why = "it is a fraction of itself"
        raise ConversionError.bad("max_duration", str(run), why, grammar.HOW_LONG)
    if run.amount <= 0:
        raise ConversionError.bad("max_duration", str(run), "it is not positive", "write '2ep'")
    return run


def _trusted(amount: Fraction, unit: TimeUnit) -> Time:
    """Build a time from an amount that is known to be one of `unit`."""
    time = object.__new__(Time)
    object.__setattr__(time, "_amount", amount)
    object.__setattr__(time, "_unit", unit)
    return time


def _checked(amount: Fraction, unit: TimeUnit) -> Time:
    return _trusted(grammar.check(amount, unit), unit)


def _read(value: object, unit: str | None) -> Time:
    if isinstance(value, (Time, str, timedelta)):
        if unit is not None:
            why, instead = f"{shown(value)} already has one", f"write Time({shown(value)})"
            raise TimeError.bad("unit", unit, why, instead)
        if isinstance(value, Time):
            return _trusted(value._amount, value._unit)
        if isinstance(value, str):
            return _trusted(*grammar.parse(value))
        return _trusted(Fraction(value // timedelta(microseconds=1), 10**6), TimeUnit.SECOND)
    if unit is None:
        what, why = f"read {shown(value)} as a time", "it has no unit"
        instead = grammar.without_unit(value) if is_number(value) else grammar.HOW
        raise TimeError.cannot(what, why=why, instead=instead)
    return _checked(exact(value), parse_unit(unit))
