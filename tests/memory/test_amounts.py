"""Amounts of memory as text."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phantomgpu.gpus import UNITS
from stretto.errors import ConfigError
from stretto.memory.amounts import margin_of, parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("80GiB", 80 * 2**30),
        ("80gib", 80 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("1_000kB", 1_000_000),
        (" 512 MiB ", 2**29),
        ("0B", 0),
        ("2TiB", 2**41),
        (123, 123),
        (0, 0),
    ],
)
def test_amounts(text: str | int, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize(
    "text",
    [
        *("80G", "80k", "80", "", "lots", "-1GiB", "1e3GiB", "nanGiB", "9" * 10_000 + "GiB"),
        *("8 parsecs", "8XB", "5%", "4\u0664GiB", -1, True, 1.5, None),
    ],
)
def test_what_is_no_amount(text: object) -> None:
    with pytest.raises(ConfigError, match="80GiB or 80GB"):
        parse_bytes(text)  # type: ignore[arg-type]


@given(st.text() | st.from_regex(r"[0-9._ ]{1,8}[a-zA-Z%]{0,4}", fullmatch=True))
def test_any_text_fails_only_with_our_error(text: str) -> None:
    for parse in (parse_bytes, lambda text: margin_of(text, 1_000)):
        with contextlib.suppress(ConfigError):
            assert parse(text) is not None


@given(st.integers(0, 10**9), st.sampled_from(sorted(UNITS)))
def test_whole_amounts_are_exact(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * UNITS[unit]


@given(st.integers(0, 2**50))
def test_what_is_shown_is_near(amount: int) -> None:
    text = show_bytes(amount)
    assert len(text) <= len("1023 KiB")
    assert abs(parse_bytes(text) - amount) <= 0.006 * amount


def test_margins() -> None:
    assert margin_of("10%", 1_000) == 100
    assert margin_of("2.5%", 1_001) == 26  # rounded up
    assert margin_of("1KiB", 1_000_000) == 1024
    assert margin_of(0, 1_000) == margin_of("0", 1_000) == 0
    for text in ("100%", "250%"):
        with pytest.raises(ConfigError, match="nothing"):
            margin_of(text, 1_000)
