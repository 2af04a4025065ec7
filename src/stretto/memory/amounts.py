"""Parse and print amounts of memory (80GiB, 512 MiB) and margins in bytes or percent."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from phantomgpu.gpus import UNITS, parse_memory
from stretto.errors import ConfigError, shown

_PERCENT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?%", re.ASCII)


def parse_bytes(amount: str | int) -> int:
    """Return a number of bytes.

    >>> parse_bytes("80GiB"), parse_bytes("1.5 MB"), parse_bytes(512)
    (85899345920, 1500000, 512)

    Raises:
        ConfigError: the text is not an amount of memory.
    """
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0:
        return amount
    try:
        if isinstance(amount, str):
            return parse_memory(amount)
    except ValueError:
        pass
    why, instead = "it is not a number and a unit of bytes", "write for example 80GiB or 80GB"
    raise ConfigError.cannot(f"read {shown(amount)} as memory", why=why, instead=instead)


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
        value, unit = abs(amount) / UNITS[larger.lower()], larger
    digits = 0 if unit == "B" else max(0, 3 - len(str(int(value))))
    return f"{'-' * (amount < 0)}{value:.{digits}f} {unit}"


def margin_of(text: str | int, limit: int) -> int:
    """Return the bytes that stay free of `limit` bytes: a percentage or an amount.

    >>> margin_of("5%", 1000), margin_of("100B", 1000), margin_of("0", 1000)
    (50, 100, 0)

    Raises:
        ConfigError: the text is not a margin, or leaves nothing.
    """
    if text == "0":
        return 0  # in any unit
    match = _PERCENT.fullmatch(text.strip()) if isinstance(text, str) else None
    part = parse_bytes(text) if match is None else math.ceil(Fraction(match[1]) / 100 * limit)
    if part >= limit:
        why, instead = "nothing would be left", "write for example 5%"
        raise ConfigError.cannot(f"leave {shown(text)} of memory free", why=why, instead=instead)
    return part
