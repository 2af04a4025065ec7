"""Units, exact numbers, and text of times to (amount, unit) and back.

The grammar is small on purpose: one number with one unit (`90ep`, `3e4tok`, `1.5Msp`, `10%`), or a
wall-clock length in falling parts (`1h30m`, `2d12h`, `90s`). Its cost is bounded for any text, so
hostile run files can't make it work hard: see `MAX_TEXT`, `MAX_DIGITS`.
"""

from __future__ import annotations

import math
import operator
import re
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from fractions import Fraction
from numbers import Number, Rational

from stretto.errors import StrettoError, TimeError, shown


class TimeUnit(StrEnum):
    """A unit of time in a training run; its value is how it is written.

    >>> TimeUnit("ep") is TimeUnit.EPOCH
    True
    """

    EPOCH = "ep"
    """Passes over the data set; may be fractional."""
    BATCH = "ba"
    """Optimizer steps."""
    SAMPLE = "sp"
    """Samples, counted over all ranks."""
    TOKEN = "tok"
    """Tokens, counted over all ranks."""
    DURATION = "dur"
    """A fraction of the run, relative to its `max_duration`."""
    SECOND = "sec"
    """Seconds of wall clock."""


NAMES = {
    TimeUnit.EPOCH: "epochs",
    TimeUnit.BATCH: "batches",
    TimeUnit.SAMPLE: "samples",
    TimeUnit.TOKEN: "tokens",
    TimeUnit.DURATION: "fractions of the run",
    TimeUnit.SECOND: "seconds",
}
"""The name of each unit in messages and tables."""

WHOLE = frozenset({TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN})
"""Units that come in whole numbers only."""


def parse_unit(value: object) -> TimeUnit:
    """Return the unit that `value` names.

    >>> parse_unit("sp")
    <TimeUnit.SAMPLE: 'sp'>

    Raises:
        TimeError: `value` is not the short name of a unit.
    """
    try:
        return TimeUnit(value)  # type: ignore[arg-type]
    except ValueError:
        instead = "write 'ep', 'ba', 'sp', 'tok', 'dur' or 'sec'"
        raise TimeError.bad("unit", value, "there is no such unit", instead) from None


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
        why = f"it is not a finite number of at most {MAX_DIGITS} digits"
        raise TimeError.bad("amount", number, why, "write for example 90 or 0.5")
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


def as_float(value: float) -> float:
    """Return a number of any library as a float; too large ones become infinite.

    >>> as_float(3), as_float(-(10**400))
    (3.0, -inf)
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def checked_whole(
    value: object,
    kind: type[StrettoError],
    what: str,
    instead: str,
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


MAX_TEXT = 500
"""Longest text that is parsed, in characters; `show` writes at most 420."""
_LIMIT = 10**MAX_DIGITS

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
"""As IEC 80000-13: a batch of "4M tokens" is often 1,024 sequences of 4,096, which is 4Mi."""
_CLOCK = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_UNITS = {
    **{
        suffix + unit: (times, 1, unit)
        for suffix, times in (_SUFFIXES | _BINARY).items()
        for unit in TimeUnit
    },
    **{part: (length, 1, TimeUnit.SECOND) for part, length in _CLOCK.items()},
    "%": (1, 100, TimeUnit.DURATION),
}
"""What may follow a number: its unit, and its multiple as numerator and denominator."""
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_NUMBER = re.compile(
    rf"(-?)({_DIGITS})(?:/({_DIGITS})|(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?)([^0-9].*)?",
    re.DOTALL,
)
_PARTS = re.compile(
    r"(?P<sign>-?)(?:(?P<d>[0-9]+)d)?(?:(?P<h>[0-9]+)h)?(?:(?P<m>[0-9]+)m)?"
    r"(?:(?P<s>[0-9]+(?:\.[0-9]+|/[0-9]+)?)s)?"
)


HOW = "write a number with a unit such as '90ep', '500ba', '1_000sp', '2Btok', '10%' or '1h30m'"
"""The default suggestion."""
HOW_LONG = "write a length such as '90ep', '500ba', '1_000sp', '2Btok' or '1h30m'"
"""That for the length of a run, which is no fraction of itself."""
_WORDS: dict[str, str] = {
    **{unit: unit for unit in TimeUnit},
    "batch": "ba", "step": "ba", "iteration": "ba", "iter": "ba", "update": "ba", "sample": "sp",
    "token": "tok", "epoch": "ep", "second": "sec", "minute": "m", "min": "m", "hour": "h",
    "hr": "h", "day": "d", "percent": "%",
}  # fmt: skip
"""Words that people write for a unit, without a plural."""


def parse(text: str) -> tuple[Fraction, TimeUnit]:
    """Return the exact amount and the unit of `text`.

    >>> parse("1h30m")
    (Fraction(5400, 1), <TimeUnit.SECOND: 'sec'>)

    Args:
        text: the text of a time.

    Raises:
        TimeError: `text` is not a time; the message says what to write.
    """
    if len(text) > MAX_TEXT:
        raise _refused(shown(text), f"it has {len(text)} characters", HOW)
    text = text.strip()
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise _refused(shown(text), *_explain(text, None))
    sign, whole, below, point, exponent, name = match.groups()
    known = _UNITS.get(name)
    if known is None:
        parts = _PARTS.fullmatch(text)
        if parts is None or name is None:
            raise _refused(shown(text), *_explain(text, name))
        return check(_clock_amount(text, parts), TimeUnit.SECOND, text), TimeUnit.SECOND
    above, per, unit = known
    if point:
        above, per = above * int(whole + point), per * 10 ** len(point)
    else:
        above *= int(whole)
    if exponent:
        power = int(exponent)
        if abs(power) > MAX_DIGITS:
            raise _refused(shown(text), f"the exponent is beyond {MAX_DIGITS}", HOW)
        above, per = (above * 10**power, per) if power > 0 else (above, per * 10**-power)
    if below:
        per *= int(below)
        if per == 0:
            raise _refused(shown(text), "it divides by zero", HOW)
    # Integers until here, and no division by one: either way a Fraction costs 1 us.
    amount = Fraction(above) if per == 1 else Fraction(above, per)
    return check(-amount if sign else amount, unit, text), unit


def check(amount: Fraction, unit: TimeUnit, text: str | None = None) -> Fraction:
    """Return `amount` if it is valid for `unit`, else raise `TimeError`."""
    above, below = amount.numerator, amount.denominator
    if not -_LIMIT < above < _LIMIT or below >= _LIMIT:
        what = shown(text) if text else f"a number of {NAMES[unit]}"
        raise _refused(what, f"it takes more than {MAX_DIGITS} digits", "round it first")
    if below != 1 and unit in WHOLE:
        floor, why = above // below, f"{NAMES[unit]} come in whole numbers"
        given = shown(text or f"{_decimal_text(amount)}{unit}")
        less = f"'{show(Fraction(floor), unit)}' or " if floor else ""  # 0 is no interval
        more = show(Fraction(floor + 1), unit)
        instead = HOW_LONG if floor < 0 else f"write {less}'{more}'"
        raise _refused(given, why, instead)
    return amount


def show(amount: Fraction, unit: TimeUnit) -> str:
    """Return the canonical text of a time; `parse` reads it back to the same value.

    Counts from 10,000 on have a suffix if they are exact and shorter with it.

    >>> show(Fraction(5400), TimeUnit.SECOND), show(Fraction(14_800 * 10**9), TimeUnit.TOKEN)
    ('1h30m', '14.8Ttok')
    >>> [show(Fraction(count), TimeUnit.SAMPLE) for count in (8_000, 16_000, 16_384)]
    ['8000sp', '16Ksp', '16384sp']
    """
    if unit is not TimeUnit.SECOND:
        return f"{_count_text(amount) if unit in WHOLE else _decimal_text(amount)}{unit}"
    if amount == 0:
        return "0s"
    sign, rest, text = ("-" if amount < 0 else ""), abs(amount), ""
    for part, length in _CLOCK.items():
        count = rest if part == "s" else Fraction(rest // length)
        rest -= count * length
        text += f"{_decimal_text(count)}{part}" if count else ""
    return sign + text


def _count_text(count: Fraction) -> str:
    plain = str(count)
    if abs(count) < 10_000:  # people write four digits out
        return plain
    suffix = [one for one, times in _SUFFIXES.items() if times <= abs(count)][-1]
    short = f"{_decimal_text(count / _SUFFIXES[suffix])}{suffix}"
    return short if len(short) < len(plain) else plain


def _decimal_text(amount: Fraction) -> str:
    """Return a decimal of at most 15 places if one is exact, else a fraction such as 1/3."""
    if amount.denominator == 1:
        return str(amount.numerator)
    scaled = amount * 10**15
    if scaled.denominator != 1:
        return f"{amount.numerator}/{amount.denominator}"
    whole, rest = divmod(abs(scaled.numerator), 10**15)
    return f"{'-' if amount < 0 else ''}{whole}.{rest:015d}".rstrip("0")


def _clock_amount(text: str, match: re.Match[str]) -> Fraction:
    seconds: int | Fraction = 0
    above = None
    for part, length in _CLOCK.items():
        if match[part] is None:
            continue
        try:
            count = int(match[part]) if match[part].isdigit() else Fraction(match[part])
        except ZeroDivisionError:
            raise _refused(shown(text), "it divides by zero", HOW) from None
        if above is not None and count * length >= _CLOCK[above]:
            why = f"{match[part]}{part} is not less than 1{above}"
            carried = sum((Fraction(match[one] or 0) * _CLOCK[one] for one in _CLOCK), Fraction())
            raise _refused(shown(text), why, f"write '{show(carried, TimeUnit.SECOND)}'")
        seconds += count * length
        above = part
    return Fraction(-seconds if match["sign"] else seconds)


def _refused(text: str, why: str, instead: str) -> TimeError:
    return TimeError.cannot(f"read {text} as a time", why=why, instead=instead)


def without_unit(number: object) -> str:
    """Return what to write instead of a number that has no unit.

    >>> without_unit(0.03), without_unit(100)
    ("write '3%'", "write '100ba', '100ep' or '100sp'")
    """
    try:
        amount, _ = parse(f"{number}ep")
    except ValueError:  # Python refuses to print an int of more than 4300 digits
        amount = Fraction(0)
    if amount <= 0:
        return HOW
    if amount.denominator == 1:
        if str(number)[-1:] in _SUFFIXES:
            return f"write '{number}tok' or '{number}sp'"
        return f"write '{number}ba', '{number}ep' or '{number}sp'"
    if amount > 1:
        return f"write '{number}ep'"
    return f"write '{_decimal_text(100 * amount)}%'"


def _explain(text: str, unit: str | None) -> tuple[str, str]:
    """Return why `text` is not a time, and what to write instead.

    Args:
        text: the text, without outer spaces.
        unit: what follows its number; None if it has no number or nothing follows.

    >>> _explain("3epoch", "epoch")
    ("unknown unit 'epoch'", "write '3ep'")
    """
    if not re.match("-?[0-9]", text):
        return "it does not begin with a number" if text else "it is empty", HOW
    if unit is None or unit in _SUFFIXES:
        return "it has no unit", without_unit(text)
    if unit[0] in "dhms" and re.search("[0-9]", unit):
        return "it is not whole parts in falling order", "write '2d12h', '1h30m' or '90s'"
    number, name = text[: len(text) - len(unit)], unit.strip()
    why = f"unknown unit {shown(unit)}" if name == unit else "there is a space inside"
    meant = f"{number}{_unit_meant(name)}"
    if meant == number:
        return why, HOW
    try:
        amount, _ = parse(meant)
    except TimeError:
        return why, HOW
    return why, f"write '{meant}'" if amount > 0 else HOW


def _unit_meant(name: str) -> str:
    """Return the unit that a word stands for; nothing if that is not certain.

    >>> _unit_meant("Msamples"), _unit_meant("Batches"), _unit_meant("weeks")
    ('Msp', 'ba', '')
    """
    for suffix in _SUFFIXES:
        if name[: len(suffix)].upper() == suffix:
            word = name[len(suffix) :].lower()
            for one in (word, word.removesuffix("s"), word.removesuffix("es")):
                if one in _WORDS:
                    return suffix + _WORDS[one]
    return ""
