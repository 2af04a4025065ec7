"""How a time is written: what is read, what is refused, and what the refusal says."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.timing.strategies import times

from stretto.errors import TimeError
from stretto.timing import Time, TimeUnit
from stretto.timing.grammar import MAX_DIGITS, MAX_TEXT, parse, show

ACCEPTED = [
    ("90ep", 90, "ep", "90ep"),
    ("0.5ep", Fraction(1, 2), "ep", "0.5ep"),
    ("1/3ep", Fraction(1, 3), "ep", "1/3ep"),
    ("6/4ep", Fraction(3, 2), "ep", "1.5ep"),
    ("-2ep", -2, "ep", "-2ep"),
    ("0ep", 0, "ep", "0ep"),
    ("-0ep", 0, "ep", "0ep"),
    ("007ba", 7, "ba", "7ba"),
    ("500ba", 500, "ba", "500ba"),
    ("1_000sp", 1_000, "sp", "1000sp"),
    ("1_000_000.0sp", 1_000_000, "sp", "1Msp"),
    ("3e4tok", 30_000, "tok", "30Ktok"),
    ("3E+4tok", 30_000, "tok", "30Ktok"),
    ("15e-1ep", Fraction(3, 2), "ep", "1.5ep"),
    ("1Kba", 1_000, "ba", "1000ba"),
    ("1.5Msp", 1_500_000, "sp", "1.5Msp"),
    ("2Btok", 2 * 10**9, "tok", "2Btok"),
    ("15Ttok", 15 * 10**12, "tok", "15Ttok"),
    ("14.8Ttok", 14_800 * 10**9, "tok", "14.8Ttok"),
    ("469_000Mtok", 469 * 10**9, "tok", "469Btok"),
    ("-16Ktok", -16_000, "tok", "-16Ktok"),
    ("9999tok", 9_999, "tok", "9999tok"),
    ("9_000tok", 9_000, "tok", "9000tok"),
    ("10_000ba", 10_000, "ba", "10Kba"),
    ("12_345sp", 12_345, "sp", "12345sp"),
    ("16_384tok", 16_384, "tok", "16384tok"),
    ("1.234Mtok", 1_234_000, "tok", "1.234Mtok"),
    ("999_999_000_000tok", 999_999_000_000, "tok", "999.999Btok"),
    ("15_000Ttok", 15 * 10**15, "tok", "15000Ttok"),
    ("1_000_000ep", 10**6, "ep", "1000000ep"),
    ("1/3Ksec", Fraction(1000, 3), "sec", "5m100/3s"),
    ("0.1dur", Fraction(1, 10), "dur", "0.1dur"),
    ("10%", Fraction(1, 10), "dur", "0.1dur"),
    ("0.1%", Fraction(1, 1000), "dur", "0.001dur"),
    ("1/3%", Fraction(1, 300), "dur", "1/300dur"),
    ("1e-16dur", Fraction(1, 10**16), "dur", "1/10000000000000000dur"),
    ("45sec", 45, "sec", "45s"),
    ("90s", 90, "sec", "1m30s"),
    ("30m", 1_800, "sec", "30m"),
    ("36h", 129_600, "sec", "1d12h"),
    ("1h30m", 5_400, "sec", "1h30m"),
    ("1.5h", 5_400, "sec", "1h30m"),
    ("1d", 86_400, "sec", "1d"),
    ("2d12h", 216_000, "sec", "2d12h"),
    ("1d0h5s", 86_405, "sec", "1d5s"),
    ("90m30s", 5_430, "sec", "1h30m30s"),
    ("1m0.5s", Fraction(121, 2), "sec", "1m0.5s"),
    ("1m1/3s", Fraction(181, 3), "sec", "1m1/3s"),
    ("-1h30m", -5_400, "sec", "-1h30m"),
    ("0s", 0, "sec", "0s"),
    ("1e2h", 360_000, "sec", "4d4h"),
    ("  90ep\n", 90, "ep", "90ep"),
]

REFUSED = [
    ("", "it is empty; write a number with a unit such as '90ep'"),
    ("   ", "it is empty"),
    ("90", "it has no unit; write '90ba', '90ep' or '90sp'"),
    ("2B", "it has no unit; write '2Btok' or '2Bsp'"),
    ("ep", "it does not begin with a number"),
    ("nan", "it does not begin"),
    ("nandur", "it does not begin"),
    ("infdur", "it does not begin"),
    ("-Infinity%", "it does not begin"),
    ("3epoch", "unknown unit 'epoch'; write '3ep'"),
    ("3epochs", "unknown unit 'epochs'; write '3ep'"),
    ("3EP", "unknown unit 'EP'; write '3ep'"),
    ("3steps", "unknown unit 'steps'; write '3ba'"),
    ("3e", "unknown unit 'e'; write a number"),
    ("3iters", "unknown unit 'iters'; write '3ba'"),
    ("3Msamples", "unknown unit 'Msamples'; write '3Msp'"),
    ("3its", "unknown unit 'its'; write a number"),
    ("3rounds", "unknown unit 'rounds'; write a number"),
    ("3instances", "unknown unit 'instances'; write a number"),
    ("3months", "unknown unit 'months'; write a number"),
    ("3fraction", "unknown unit 'fraction'; write a number"),
    ("3mtok", "unknown unit 'mtok'; write '3Mtok'"),
    ("3min", "unknown unit 'min'; write '3m'"),
    ("3hrs", "unknown unit 'hrs'; write '3h'"),
    ("3tokn", "unknown unit 'tokn'; write a number"),
    ("3weeks", "unknown unit 'weeks'; write a number with a unit"),
    ("3" + "x" * 400, "unknown unit 'xxx"),
    ("1 000sp", "there is a space inside"),
    ("90 ep", "there is a space inside; write '90ep'"),
    ("1h 30m", "it is not whole parts"),
    ("1,000sp", "unknown unit ',000sp'; write a number"),
    ("1,5ep", "unknown unit ',5ep'; write a number"),
    ("+5ep", "it does not begin"),
    (".5ep", "it does not begin"),
    ("1.ep", "unknown unit '.ep'"),
    ("1__0ep", "unknown unit '__0ep'"),
    ("1/0ep", "it divides by zero"),
    ("1/3/4ep", "unknown unit '/4ep'"),
    ("1h1/0s", "it divides by zero"),
    ("0.5ba", "batches come in whole numbers; write '1ba'"),
    ("-2.5sp", "samples come in whole numbers; write a length such as '90ep'"),
    ("1/3Ktok", "tokens come in whole numbers; write '333tok' or '334tok'"),
    ("1h60m", "60m is not less than 1h; write '2h'"),
    ("1d24h", "24h is not less than 1d"),
    ("1m60.5s", "60.5s is not less than 1m"),
    ("30m1h", "it is not whole parts in falling order; write '2d12h'"),
    ("1.5h30m", "it is not whole parts in falling order"),
    ("1h1h", "it is not whole parts in falling order"),
    ("1e999999999tok", "the exponent is beyond 200"),
    ("1e-999999999ep", "the exponent is beyond 200"),
    ("9" * 201 + "ep", "it takes more than 200 digits; round it first"),
    ("1h0." + "9" * 201 + "s", "it takes more than 200 digits"),
    ("9" * MAX_TEXT + "ep", f"it has {MAX_TEXT + 2} characters"),
    ("٣ep", "it does not begin with a number"),
    ("1٣ep", "unknown unit '٣ep'"),
    ("½ep", "it does not begin with a number"),
    ("\u22121ep", "it does not begin with a number"),
    ("1ep\0", r"unknown unit 'ep\x00'"),
    ("\0" + "1ep", "it does not begin with a number"),
    ("1\nep", "there is a space inside; write '1ep'"),
    ("1ep\n1ep", "unknown unit"),
    ("--1ep", "it does not begin with a number"),
    ("0x10ep", "unknown unit 'x10ep'"),
    ("1ep1", "unknown unit 'ep1'"),
    ("1e5e5ep", "unknown unit 'e5ep'"),
    ("%", "it does not begin with a number"),
    ("5%%", "unknown unit '%%'"),
    ("5percent", "unknown unit 'percent'; write '5%'"),
]


def name_of(text: str) -> str:
    return repr(text[:20])


@pytest.mark.parametrize(("text", "amount", "unit", "canonical"), ACCEPTED)
def test_accepted(text: str, amount: Fraction, unit: str, canonical: str) -> None:
    assert parse(text) == (amount, unit)
    assert show(*parse(text)) == canonical
    assert parse(canonical) == (amount, unit)


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[name_of(text) for text, _ in REFUSED])
def test_refused(text: str, message: str) -> None:
    with pytest.raises(TimeError, match=re.escape(message)) as caught:
        parse(text)
    assert str(caught.value).startswith("cannot read '")
    assert len(str(caught.value)) < 1_500


@pytest.mark.parametrize("text", [text for text, message in REFUSED if "; write '" in message])
def test_what_a_refusal_says_to_write_is_read(text: str) -> None:
    with pytest.raises(TimeError, match="write") as caught:
        parse(text)
    said = str(caught.value).partition("; write ")[2]
    assert [parse(found) for found in re.findall(r"'([^']*[0-9][^']*)'", said)]


@given(st.text(max_size=MAX_TEXT + 20))
@example("1" + "_1" * 240)
@example("1" * 400 + "/" + "1" * 90)
@example("1_" * 249)
@example("1e" + "9" * 490)
@example("0." + "0" * 490 + "ep")
@example(("1d1h1m" * 90)[:MAX_TEXT])
@example("-" * MAX_TEXT)
@example("1" + "1d" * 249)
@example("1/" + "0" * 400 + "ep")
def test_any_text_fails_only_with_our_error(text: str) -> None:
    try:
        time = Time(text)
    except TimeError:
        return
    assert Time(str(time)) == time


ALPHABET = st.sampled_from("0123456789._-+/eE%KMBT epbasptokdurchms\n\0,")


@given(st.text(ALPHABET, max_size=30))
def test_texts_that_look_like_times_fail_only_with_our_error(text: str) -> None:
    try:
        time = Time(text)
    except TimeError:
        return
    assert Time(str(time)) == time


@given(st.text(max_size=10), times())
def test_something_around_a_time(extra: str, time: Time) -> None:
    for text in (extra + str(time), str(time) + extra):
        try:
            again = Time(text)
        except TimeError:
            continue
        assert isinstance(again, Time)


NUMBERS = st.from_regex(r"-?[0-9]{1,30}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)


@given(NUMBERS, st.sampled_from(["ep", "dur", "sec"]))
def test_a_number_means_what_python_says_it_does(number: str, unit: str) -> None:
    assert Time(number + unit).amount == Fraction(number)


@given(NUMBERS, st.sampled_from([("K", 3), ("M", 6), ("B", 9), ("T", 12)]))
def test_suffixes_are_powers_of_ten(number: str, suffix: tuple[str, int]) -> None:
    letter, power = suffix
    assert Time(f"{number}{letter}ep").amount == Fraction(number) * 10**power
    assert Time(f"{number}%") == Time(f"{number}dur") / 100


@given(
    st.integers(0, 10**6),
    st.integers(0, 23),
    st.integers(0, 59),
    st.fractions(0, 60, max_denominator=10**6).filter(lambda seconds: seconds < 60),
)
def test_wall_clock_parts_add_up(days: int, hours: int, minutes: int, seconds: Fraction) -> None:
    time = Time(f"{days}d{hours}h{minutes}m{seconds}s")
    assert time == Time(days * 86_400 + hours * 3_600 + minutes * 60 + seconds, "sec")
    assert Time(str(time)) == time


@given(
    st.fractions(),
    st.integers(-MAX_DIGITS // 2, MAX_DIGITS // 2),
    st.sampled_from([unit for unit in TimeUnit if unit not in {"ba", "sp", "tok"}]),
)
def test_whatever_is_shown_is_read(amount: Fraction, power: int, unit: TimeUnit) -> None:
    amount *= Fraction(10) ** power
    text = show(amount, unit)
    assert len(text) <= MAX_TEXT
    assert parse(text) == (amount, unit)


def test_the_longest_text_that_is_shown_is_read() -> None:
    amount = -Fraction(10**200 - 1, 10**100 - 3)
    for unit in ("ep", "sec"):
        assert len(show(amount, TimeUnit(unit))) <= 420 < MAX_TEXT
        assert parse(show(amount, TimeUnit(unit))) == (amount, unit)


COUNTS = st.integers(0, 10**18) | st.builds(
    lambda digits, power: digits * 10**power, st.integers(0, 10**6), st.integers(0, 15)
)


@given(COUNTS, st.sampled_from([TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN]))
def test_counts_are_short_and_read_in_their_order(count: int, unit: TimeUnit) -> None:
    text = show(Fraction(count), unit)
    assert parse(text) == (Fraction(count), unit)
    assert show(Fraction(-count), unit) == (f"-{text}" if count else text)
    number = text.removesuffix(unit)
    assert len(number) <= len(str(count))
    if number == str(count):
        return
    assert count >= 10_000
    assert len(number) < len(str(count))
    # The number before a suffix is at least 1, and below 1,000 if there is a larger suffix.
    mantissa, suffix = Fraction(number[:-1]), number[-1]
    assert mantissa >= 1
    assert suffix == "T" or mantissa < 1_000


@pytest.mark.parametrize(("prefix", "power"), [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40)])
def test_binary_prefixes_are_powers_of_1024(prefix: str, power: int) -> None:
    assert parse(f"4{prefix}tok") == (Fraction(4 * 2**power), TimeUnit.TOKEN)
    assert parse(f"0.5{prefix}sp") == (Fraction(2**power, 2), TimeUnit.SAMPLE)
