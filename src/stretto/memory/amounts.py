"""Parse and print amounts of memory (80GiB, 512 MiB) and margins in bytes or percent."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from stretto.errors import ConfigError, shown

UNITS: dict[str, int] = {
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
}
"""Bytes in each unit: GiB is 1024^3, GB is 1000^3, as on a disk."""
# The digits are bounded, so that parsing any text is fast.
_NUMBER = re.compile(r"(\d{1,18}(?:_\d{3}){0,5}(?:\.\d{1,9})?) ?([A-Za-z]{1,3}|%)?")
_SPELLINGS = {unit.lower(): unit for unit in UNITS}


def parse_bytes(amount: str | int) -> int:
    """Return a number of bytes.

    >>> parse_bytes("80GiB"), parse_bytes("1.5 MB"), parse_bytes(512)
    (85899345920, 1500000, 512)

    Raises:
        ConfigError: the text is not an amount of memory.
    """
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0:
        return amount
    match = _NUMBER.fullmatch(amount.strip()) if isinstance(amount, str) else None
    if match is not None and match[2] is None and not float(match[1]):
        return 0  # in any unit
    unit = _SPELLINGS.get((match[2] or "").lower()) if match else None
    if match is None or unit is None:
        why, instead = _advice(match)
        raise ConfigError.cannot(f"read {shown(amount)} as memory", why=why, instead=instead)
    return math.floor(Fraction(match[1].replace("_", "")) * UNITS[unit])


def show_bytes(amount: int) -> str:
    """Return a number of bytes as text with at least three digits.

    >>> show_bytes(85899345920), show_bytes(1536), show_bytes(999), show_bytes(-2**20)
    ('80.0 GiB', '1.50 KiB', '999 B', '-1.00 MiB')
    """
    value, unit = abs(amount) / 1, "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        # A value that would round to 1024 is printed in the next unit.
        if value < 1023.5:
            break
        value, unit = abs(amount) / UNITS[larger], larger
    sign = "-" if amount < 0 else ""
    if unit == "B":
        return f"{sign}{abs(amount)} B"
    digits = max(0, 3 - len(str(int(value))))
    return f"{sign}{value:.{digits}f} {unit}"


def margin_of(text: str | int, limit: int) -> int:
    """Return the bytes that stay free of `limit` bytes: a percentage or an amount.

    >>> margin_of("5%", 1000), margin_of("100B", 1000)
    (50, 100)

    Raises:
        ConfigError: the text is not a margin, or is 100 percent or more.
    """
    match = _NUMBER.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[2] != "%":
        return parse_bytes(text)
    part = Fraction(match[1].replace("_", "")) / 100
    if part >= 1:
        raise ConfigError.cannot(
            f"leave {shown(text)} of memory free",
            why="nothing would be left",
            instead="write for example 5%",
        )
    return math.ceil(part * limit)


def _advice(match: re.Match[str] | None) -> tuple[str, str]:
    example = "write for example 80GiB, 512MiB or 1.5GB"
    if match is None:
        return "it is not a number and a unit", example
    number, unit = match[1], match[2]
    if unit is None:
        return "it has no unit", f"write {number}GiB, or {number}B for bytes"
    if (letter := unit.upper()) in {"K", "M", "G", "T"}:
        meant = f"{number}{letter}iB or {number}{'k' if letter == 'K' else letter}B"
        return f"{unit!r} may be 1000 or 1024", f"write {meant}"
    return f"there is no unit {unit!r}", example
