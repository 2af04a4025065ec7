"""Suggestions for texts that are not times."""

from __future__ import annotations

import re
from collections.abc import Collection

from stretto.errors import nearest, shown

HOW = "write a number with a unit such as '90ep', '500ba', '1_000sp', '2Btok', '10%' or '1h30m'"
"""The default suggestion."""
_MEANT = {
    "epoch": "ep", "epochs": "ep", "e": "ep", "batch": "ba", "batches": "ba", "b": "ba",
    "step": "ba", "steps": "ba", "iter": "ba", "it": "ba", "sample": "sp", "samples": "sp",
    "token": "tok", "tokens": "tok", "t": "tok", "duration": "dur", "seconds": "sec",
    "second": "sec", "secs": "sec", "min": "m", "minutes": "m", "hours": "h", "hour": "h",
    "hr": "h", "days": "d", "day": "d", "percent": "%",
}  # fmt: skip
_LONGEST_GUESS = 20
"""No unit is longer than this, and guessing at longer ones is slow."""


def explain(text: str, unit: str | None, known: Collection[str]) -> tuple[str, str]:
    """Return why `text` is not a time, and what to write instead.

    Args:
        text: the text, without outer spaces.
        unit: what follows its number; None if it has no number or nothing follows.
        known: all that may follow a number.

    >>> explain("3epoch", "epoch", {"ep"})
    ("unknown unit 'epoch'", "write '3ep'")
    """
    if not re.match("-?[0-9]", text):
        return _without_number(text)
    if unit is None or unit in {"K", "M", "B", "T"}:
        shown_units = ", ".join(f"'{text}{name}'" for name in ("ep", "ba", "sp", "tok"))
        return "it has no unit", f"write {shown_units} or '{text}sec'"
    number = text[: len(text) - len(unit)]
    if re.search(r"\s", text):
        closed = "".join(unit.split())
        return "there is a space inside", f"write '{number}{closed}'" if closed in known else HOW
    if unit[0] == ",":
        return "it has a comma", "write '1_000sp' for a thousand, '1.5ep' for one and a half"
    if unit[0] in "dhms" and re.search("[0-9]", unit):
        return "it is not whole parts in falling order", "write '2d12h', '1h30m' or '90s'"
    nearest = _nearest(unit, known)
    return f"unknown unit {shown(unit)}", f"write '{number}{nearest}'" if nearest else HOW


def _without_number(text: str) -> tuple[str, str]:
    if not text:
        return "it is empty", HOW
    if re.fullmatch(r"[+-]?(?:nan|inf|infinity)[a-z%]*", text.lower()):
        return "it is not a finite number", HOW
    if text.startswith("+"):
        return "a plus sign is not part of a time", f"write {shown(text[1:])}"
    if text.startswith("."):
        return "it begins with a point", f"write {shown('0' + text)}"
    return "it does not begin with a number", HOW


def _nearest(unit: str, known: Collection[str]) -> str | None:
    """The unit that was probably meant, if any."""
    lower = unit.lower()
    if lower in _MEANT:
        return _MEANT[lower]
    if len(unit) > _LONGEST_GUESS:
        return None
    close = nearest(lower, [*known, *_MEANT])
    return None if close is None else _MEANT.get(close, close)
