"""How a time is written: text to (amount, unit) and back, exactly.

The grammar is small on purpose: one number with one unit (`90ep`, `3e4tok`, `1.5Msp`, `10%`), or a
wall-clock length in falling parts (`1h30m`, `2d12h`, `90s`). Its cost is bounded for any text, so
hostile run files can't make it work hard: see `MAX_TEXT`, `MAX_EXPONENT`.
"""

from __future__ import annotations

import difflib
import re
from fractions import Fraction

from stretto.errors import TimeError, cannot
from stretto.timing.unit import NAMES, WHOLE, TimeUnit

MAX_TEXT = 100
"""Longest text that is looked at, in characters."""
MAX_EXPONENT = 30
"""Largest power of ten in `1e30tok`; the largest runs so far are about 1e14 tokens."""

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_CLOCK = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_NUMBER = re.compile(
    rf"(?P<sign>-?)(?P<whole>{_DIGITS})"
    rf"(?:/(?P<below>{_DIGITS})|(?:\.(?P<point>[0-9]+))?(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}}))?)"
    r"(?P<unit>[^0-9].*)?",
    re.DOTALL,
)
_UNIT = re.compile(r"(?P<suffix>[KMBT]?)(?P<unit>ep|ba|sp|tok|dur|sec)")
_CLOCK_TEXT = re.compile(
    r"(?P<sign>-?)"
    + "".join(rf"(?:(?P<{part}>[0-9]+(?:\.[0-9]+|/[0-9]+)?){part})?" for part in _CLOCK)
)
_MISTAKES = {
    "epoch": "ep", "epochs": "ep", "e": "ep", "batch": "ba", "batches": "ba", "b": "ba",
    "step": "ba", "steps": "ba", "iter": "ba", "it": "ba", "sample": "sp", "samples": "sp",
    "token": "tok", "tokens": "tok", "t": "tok", "duration": "dur", "seconds": "sec",
    "second": "sec", "secs": "sec", "min": "m", "minutes": "m", "hours": "h", "hour": "h",
    "hr": "h", "days": "d", "day": "d",
}  # fmt: skip


def parse(text: str) -> tuple[Fraction, TimeUnit]:
    """Return the exact amount and the unit that `text` says.

    >>> parse("1h30m")
    (Fraction(5400, 1), <TimeUnit.SECOND: 'sec'>)

    Raises:
        TimeError: `text` is not a time; the message says what to write.
    """
    if len(text) > MAX_TEXT:
        raise _refused(text[:20] + "...", f"it has {len(text)} characters", _HOW)
    text = text.strip()
    clock = _CLOCK_TEXT.fullmatch(text)
    if clock and clock.end() > len(clock["sign"]):
        return _clock_amount(text, clock), TimeUnit.SECOND
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise _not_a_number(text)
    amount = _amount(text, match)
    if match["unit"] == "%":
        return amount / 100, TimeUnit.DURATION
    found = _UNIT.fullmatch(match["unit"] or "")
    if found is None:
        raise _wrong_unit(text, match)
    amount *= _SUFFIXES[found["suffix"]]
    return check(amount, TimeUnit(found["unit"]), text), TimeUnit(found["unit"])


def check(amount: Fraction, unit: TimeUnit, given: object) -> Fraction:
    """Return `amount` if `unit` can be that much, else raise `TimeError`."""
    if unit in WHOLE and amount.denominator != 1:
        below, above = amount.__floor__(), amount.__ceil__()
        raise _refused(
            given,
            f"{NAMES[unit]} come in whole numbers",
            f"write '{below}{unit}' or '{above}{unit}'",
        )
    return amount


def show(amount: Fraction, unit: TimeUnit) -> str:
    """Return the canonical text of a time; `parse` reads it back to the same value.

    >>> show(Fraction(5400), TimeUnit.SECOND)
    '1h30m'
    """
    if unit is not TimeUnit.SECOND:
        return f"{_decimal(amount)}{unit}"
    if amount == 0:
        return "0s"
    sign, rest, text = ("-" if amount < 0 else ""), abs(amount), ""
    for part, length in _CLOCK.items():
        count = rest if part == "s" else Fraction(rest // length)
        rest -= count * length
        text += f"{_decimal(count)}{part}" if count else ""
    return sign + text


def _decimal(amount: Fraction) -> str:
    """A finite decimal where there is one of at most 15 places, else a fraction such as 1/3."""
    if amount.denominator == 1:
        return str(amount.numerator)
    scaled = amount * 10**15
    if scaled.denominator != 1:
        return f"{amount.numerator}/{amount.denominator}"
    whole, rest = divmod(abs(scaled.numerator), 10**15)
    return f"{'-' if amount < 0 else ''}{whole}.{rest:015d}".rstrip("0")


def _amount(text: str, match: re.Match[str]) -> Fraction:
    whole, point = match["whole"].replace("_", ""), match["point"] or ""
    exponent = int(match["exponent"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        raise _refused(text, f"the exponent {exponent} is beyond {MAX_EXPONENT}", _HOW)
    amount = Fraction(int(whole + point)) * Fraction(10) ** (exponent - len(point))
    if match["below"]:
        below = int(match["below"].replace("_", ""))
        if below == 0:
            raise _refused(text, "it divides by zero", _HOW)
        amount /= below
    return -amount if match["sign"] else amount


def _clock_amount(text: str, match: re.Match[str]) -> Fraction:
    amount, above = Fraction(0), None
    for part, length in _CLOCK.items():
        if match[part] is None:
            continue
        try:
            count = Fraction(match[part])
        except ZeroDivisionError:
            raise _refused(text, "it divides by zero", _HOW) from None
        if above is not None and count * length >= _CLOCK[above]:
            raise _refused(
                text, f"{match[part]}{part} is not less than 1{above}",
                f"write '{match[part]}{part}' alone or carry it over into '{above}'",
            )  # fmt: skip
        amount += count * length
        above = part
    return -amount if match["sign"] else amount


_HOW = "write a number with a unit such as '90ep', '500ba', '1_000sp', '2Btok', '10%' or '1h30m'"


def _refused(given: object, why: str, instead: str) -> TimeError:
    return TimeError(cannot(f"read {given!r} as a time", why=why, instead=instead))


def _not_a_number(text: str) -> TimeError:
    if not text:
        return _refused(text, "it is empty", _HOW)
    if re.fullmatch(r"[+-]?(nan|inf|infinity)[a-z%]*", text.lower()):
        return _refused(text, "it is not a finite number", _HOW)
    if text.startswith("+"):
        return _refused(text, "a plus sign is not part of a time", f"write '{text[1:]}'")
    if text.startswith("."):
        return _refused(text, "it begins with a point", f"write '0{text}'")
    return _refused(text, "it does not begin with a number", _HOW)


def _wrong_unit(text: str, match: re.Match[str]) -> TimeError:
    unit = match["unit"]
    if not unit:
        return _refused(
            text,
            "it has no unit",
            f"write '{text}ep', '{text}ba', '{text}sp', '{text}tok' or '{text}s'",
        )
    number = text[: len(text) - len(unit)]
    if unit != unit.strip():
        return _refused(text, "there is a space inside", f"write '{number}{unit.strip()}'")
    lower = unit.lower()
    nearest = _MISTAKES.get(lower) or (lower if _UNIT.fullmatch(lower) or lower in _CLOCK else None)
    if nearest is None:
        close = difflib.get_close_matches(lower, [*TimeUnit, *_CLOCK, *_MISTAKES], 1, 0.6)
        nearest = _MISTAKES.get(close[0], close[0]) if close else None
    instead = f"write '{number}{nearest}'" if nearest else _HOW
    return _refused(text, f"unknown unit {unit!r}", instead)
