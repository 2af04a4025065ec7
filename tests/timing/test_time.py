"""`Time`: exact amounts, their arithmetic, order, hash and text."""

from __future__ import annotations

import copy
import pickle
import warnings
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.timing.strategies import lengths, times, units

from stretto.errors import TimeError, UnitError
from stretto.timing import Time, TimeUnit

BEYOND_FLOATS = 2**53 + 1


@given(times())
def test_text_reads_back(time: Time) -> None:
    assert Time(str(time)) == time


@given(times())
def test_repr_evaluates_back(time: Time) -> None:
    assert eval(repr(time), {"Time": Time}) == time


@given(times())
def test_pickle_and_copies_are_equal(time: Time) -> None:
    for again in (pickle.loads(pickle.dumps(time)), copy.copy(time), copy.deepcopy(time)):
        assert again == time
        assert type(again) is Time


@given(times())
def test_text_is_canonical(time: Time) -> None:
    assert str(Time(str(time))) == str(time)
    assert str(Time(time.amount, time.unit)) == str(time)
    assert Time(time) == time


@given(times(), times())
def test_equal_times_have_equal_hashes_and_texts(first: Time, second: Time) -> None:
    is_equal = first == second
    assert is_equal == (second == first)
    assert is_equal == (str(first) == str(second))
    if is_equal:
        assert hash(first) == hash(second)


@given(units(), st.data())
def test_order_is_that_of_the_amounts(unit: TimeUnit, data: st.DataObject) -> None:
    first, second = data.draw(times(unit)), data.draw(times(unit))
    assert (first < second) == (first.amount < second.amount)
    assert (first <= second) == (first.amount <= second.amount)
    assert (first > second) == (second < first)
    assert (first >= second) == (second <= first)
    assert sorted([first, second])[0] == min(first, second)


@given(units(), st.data())
def test_addition_laws(unit: TimeUnit, data: st.DataObject) -> None:
    first, second, third = (data.draw(times(unit)) for _ in range(3))
    zero = Time(0, unit)
    assert first + second == second + first
    assert (first + second) + third == first + (second + third)
    assert first + zero == first
    assert first - second == first + -second
    assert first - first == zero
    assert zero - (zero - first) == first
    assert abs(first) == (first if first >= zero else -first)
    assert bool(first) == (first != zero)


@given(st.sampled_from(["ep", "dur", "sec"]), st.data())
def test_multiplication_laws(unit: str, data: st.DataObject) -> None:
    first, second = data.draw(times(unit)), data.draw(times(unit))
    factor = data.draw(st.fractions(max_denominator=1000))
    assert (first + second) * factor == first * factor + second * factor
    assert first * factor == factor * first
    if factor:
        assert first * factor / factor == first


@given(units(), st.data())
def test_division_laws(unit: TimeUnit, data: st.DataObject) -> None:
    time, divisor = data.draw(times(unit)), data.draw(lengths(unit))
    assert divisor * (time // divisor) + time % divisor == time
    assert Time(0, unit) <= time % divisor < divisor
    assert time / divisor == Time(time.amount / divisor.amount, "dur")
    assert divisor * (time / divisor) == time


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (Time("100ep") * 0.29, "29ep"),
        (Time("100ep") * np.float64(0.29), "29ep"),
        (np.float64(0.29) * Time("100ep"), "29ep"),
        (np.float32(0.29) * Time("100ep"), "29ep"),  # type: ignore[operator]
        (Time("100ep") * Decimal("0.29"), "29ep"),
        (Time("100ep") * Fraction(29, 100), "29ep"),
        (0.1 * Time("30ba"), "3ba"),
        (Time("1ep") / 10 * 3, "0.3ep"),
        (Time("3ep") / 0.1, "30ep"),
        (Time("90ep") * Time("0.1dur"), "9ep"),
        (Time("10%") * Time("90ep"), "9ep"),
        (Time("50%") * Time("50%"), "0.25dur"),
        (Time("9ep") / Time("90ep"), "0.1dur"),
        (Time("1h30m") + Time("45sec"), "1h30m45s"),
        (Time("1h") % Time("25m"), "10m"),
        (abs(-Time("1ep")), "1ep"),
        (Time(BEYOND_FLOATS, "tok") + Time("1tok"), "9007199254740994tok"),
    ],
)
def test_exact_results(result: Time, expected: str) -> None:
    assert result == Time(expected)
    assert str(result) == expected


def test_floor_division_counts() -> None:
    assert Time("10ep") // Time("3ep") == 3
    assert -Time("10ep") // Time("3ep") == -4
    assert type(Time("10ep") // Time("0.5ep")) is int


@given(st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) > 1e-150))
def test_a_float_counts_as_the_decimal_that_it_prints_as(value: float) -> None:
    assume(abs(value) < 1e150)
    assert Time(value, "ep").amount == Fraction(repr(value))
    assert float(Time(value, "ep")) == value


class TestRawIntegers:
    """Compared, added and subtracted in the unit of the time, with a warning."""

    @pytest.mark.parametrize(
        ("compute", "expected"),
        [
            (lambda: Time("5ba") == 5, True),
            (lambda: Time("5ba") != 5, False),
            (lambda: Time("5ba") == 6, False),
            (lambda: 5 == Time("5ba"), True),  # noqa: SIM300
            (lambda: Time("5ba") < 6, True),
            (lambda: Time("5ba") <= 4, False),
            (lambda: Time("5ba") > 4, True),
            (lambda: Time("5ba") >= 6, False),
            (lambda: 6 > Time("5ba"), True),  # noqa: SIM300
            (lambda: Time("5ba") + 1, Time("6ba")),
            (lambda: 1 + Time("5ba"), Time("6ba")),
            (lambda: Time("5ba") - 1, Time("4ba")),
            (lambda: 6 - Time("5ba"), Time("1ba")),
            (lambda: Time("5ba") + np.int64(1), Time("6ba")),  # type: ignore[operator]
            (lambda: Time("5ba") == np.int64(5), True),
        ],
    )
    def test_they_work_with_a_warning(self, compute: object, expected: object) -> None:
        assert callable(compute)
        with pytest.warns(UserWarning, match="taken"):
            result = compute()
        assert type(result) is type(expected)
        assert result == expected

    def test_the_warning_points_at_the_caller(self) -> None:
        for number, operation in enumerate((Time.__eq__, Time.__add__, Time.__lt__)):
            with pytest.warns(UserWarning, match="unit") as caught:
                operation(Time("5ba"), number)
            assert caught[0].filename == __file__

    def test_they_hash_like_the_time_that_they_equal(self) -> None:
        assert hash(Time("5ba")) == hash(5)

    @given(times(), times(), st.integers(1, 9))
    def test_nothing_else_warns(self, first: Time, second: Time, factor: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert first * factor / factor == first
            assert (first == second) in {True, False}
            if first.unit is second.unit:
                assert (first + second) - second == first
            assert first != "1ep"
            assert first is not None

    @pytest.mark.parametrize("number", [1, 2.0, Fraction(1), True])
    def test_they_do_not_divide(self, number: object) -> None:
        with pytest.raises(UnitError, match="unit"):
            Time("5ba") // number  # type: ignore[operator]
        with pytest.raises(UnitError, match="unit"):
            Time("5ba") % number  # type: ignore[operator]


class TestDifferentUnits:
    """Never equal, and nothing else between them without a conversion."""

    @given(times(), times())
    def test_they_differ(self, first: Time, second: Time) -> None:
        assume(first.unit is not second.unit)
        assert first != second
        assert not first == second  # noqa: SIM201

    @pytest.mark.parametrize(
        "operation", ["__lt__", "__le__", "__gt__", "__ge__", "__add__", "__sub__",
                      "__truediv__", "__floordiv__", "__mod__"],
    )  # fmt: skip
    def test_they_do_not_mix(self, operation: str) -> None:
        with pytest.raises(UnitError, match="counts"):
            getattr(Time("1ep"), operation)(Time("1ba"))

    def test_they_do_not_multiply(self) -> None:
        with pytest.raises(UnitError, match="multiply"):
            Time("1ep") * Time("1ba")

    def test_the_error_is_a_type_error_too(self) -> None:
        with pytest.raises(TypeError):
            Time("1ep") < Time("1ba")  # noqa: B015

    @pytest.mark.parametrize("other", [None, "1ep", True, False, 1.0, b"1ep", [1], object()])
    def test_other_types_are_never_equal(self, other: object) -> None:
        assert Time("1ep") != other
        assert Time("0ep") != other

    @pytest.mark.parametrize("other", ["1ep", 1.0, None, True, timedelta(1), [1]])
    def test_other_types_do_not_add_or_compare(self, other: object) -> None:
        with pytest.raises(UnitError, match="unit"):
            Time("1ep") + other  # type: ignore[operator]
        with pytest.raises(UnitError, match="unit"):
            Time("1ep") < other  # type: ignore[operator]  # noqa: B015


class TestConstruction:
    """What a time is made from, and what it is not."""

    @pytest.mark.parametrize(
        ("value", "unit", "text"),
        [
            (90, "ep", "90ep"),
            (90, TimeUnit.EPOCH, "90ep"),
            (0.5, "ep", "0.5ep"),
            (1e3, "ba", "1000ba"),
            (Fraction(1, 3), "dur", "1/3dur"),
            (Decimal("1.50"), "ep", "1.5ep"),
            (np.int64(5), "ba", "5ba"),
            (np.uint8(5), "ba", "5ba"),
            (np.float64(0.29), "ep", "0.29ep"),
            (np.float32(0.1), "ep", "0.1ep"),
            (np.float16(0.5), "ep", "0.5ep"),
            (np.str_("5ba"), None, "5ba"),
            (timedelta(hours=36), None, "1d12h"),
            (timedelta(microseconds=1), None, "0.000001s"),
            (timedelta(seconds=-90), None, "-1m30s"),
            (timedelta.max, None, "999999999d23h59m59.999999s"),
            (Time("5ba"), None, "5ba"),
            (-0.0, "ep", "0ep"),
        ],
    )
    def test_accepted(self, value: Time, unit: str | None, text: str) -> None:
        time = Time(value, unit)
        assert str(time) == text
        assert type(time.amount) is Fraction
        assert type(time.amount.numerator) is int

    @pytest.mark.parametrize(
        "value",
        [True, False, np.True_, float("nan"), float("inf"), -float("inf"), np.float32("nan"),
         Decimal("nan"), Decimal("sNaN"), Decimal("inf"), Decimal("1e999999999"),
         Decimal("1e-999999999"), 1j, np.complex64(1), None, [1], "5", b"5", object()],
    )  # fmt: skip
    def test_what_is_not_an_amount(self, value: Time) -> None:
        with pytest.raises(TimeError):
            Time(value, "ep")

    @pytest.mark.parametrize("value", [5, 0.5, Fraction(1), Decimal(1), np.int64(5), np.float32(1)])
    def test_a_bare_number_has_no_unit(self, value: Time) -> None:
        with pytest.raises(TimeError, match="unit"):
            Time(value)

    @pytest.mark.parametrize("value", [None, True, [1], b"90ep", object(), 1j])
    def test_other_types_are_no_times(self, value: Time) -> None:
        with pytest.raises(TimeError, match="number"):
            Time(value)

    @pytest.mark.parametrize("value", ["90ep", Time("90ep"), timedelta(1)])
    def test_a_second_unit_is_refused(self, value: Time) -> None:
        with pytest.raises(TimeError, match="unit"):
            Time(value, "ep")

    @pytest.mark.parametrize("unit", ["epoch", "", "EP", 5, [], "tokens"])
    def test_unknown_units(self, unit: str) -> None:
        with pytest.raises(TimeError, match="unit"):
            Time(1, unit)

    @pytest.mark.parametrize("unit", ["ba", "sp", "tok"])
    def test_some_units_come_whole(self, unit: str) -> None:
        with pytest.raises(TimeError, match=f"'3{unit}'"):
            Time(2.5, unit)
        with pytest.raises(TimeError, match="numbers"):
            Time(5, unit) / 2

    def test_exact_beyond_floats(self) -> None:
        assert Time(BEYOND_FLOATS, "tok").amount == BEYOND_FLOATS
        assert Time(f"{BEYOND_FLOATS}tok") > Time(f"{BEYOND_FLOATS - 1}tok")


class TestBounds:
    """Every time that there is prints, reads back and turns into a float."""

    @pytest.mark.parametrize(
        "amount",
        [10**200 - 1, -(10**200) + 1, Fraction(10**200 - 1, 10**200 - 2),
         Fraction(1, 10**200 - 1), Fraction(10**199, 3**400), Fraction(10**100 + 1, 10**99 + 1)],
    )  # fmt: skip
    @pytest.mark.parametrize("unit", ["ep", "dur", "sec"])
    def test_the_largest_and_the_finest(self, amount: Fraction, unit: str) -> None:
        time = Time(amount, unit)
        assert Time(str(time)) == time
        assert pickle.loads(pickle.dumps(time)) == time
        assert float(time) == float(amount)

    @pytest.mark.parametrize(
        "amount",
        [10**200, -(10**200), 10**100_000, Fraction(1, 10**200), Fraction(1, 10**9000)],
        ids=["large", "negative", "huge", "fine", "finer"],
    )
    def test_beyond_them(self, amount: Fraction) -> None:
        with pytest.raises(TimeError, match="digits"):
            Time(amount, "ep")
        with pytest.raises(TimeError, match="digits"):
            Time("1ep") * amount

    def test_a_bare_huge_integer(self) -> None:
        with pytest.raises(TimeError, match="large"):
            Time(10**5000)  # type: ignore[call-arg, unused-ignore]

    def test_a_dozen_float_factors_fit(self) -> None:
        time = Time("1ep")
        for _ in range(12):
            time *= 0.1234567890123456
        assert Time(str(time)) == time


class TestFrozen:
    def test_attributes_cannot_change(self) -> None:
        time = Time("1ep")
        with pytest.raises(AttributeError, match="changed"):
            time.amount = Fraction(2)  # type: ignore[misc]
        with pytest.raises(AttributeError, match="changed"):
            time.other = 1
        with pytest.raises(AttributeError, match="changed"):
            del time._amount

    def test_calling_init_again_changes_nothing(self) -> None:
        time = Time("1ep")
        time.__init__("2ep")  # type: ignore[misc]
        assert time == Time("1ep")

    def test_no_instance_dictionary(self) -> None:
        assert not hasattr(Time("1ep"), "__dict__")


class TestNumbers:
    def test_int_of_a_whole_amount(self) -> None:
        assert int(Time(BEYOND_FLOATS, "sp")) == BEYOND_FLOATS

    def test_int_of_a_fraction_is_refused(self) -> None:
        with pytest.raises(TimeError, match="whole"):
            int(Time("0.5ep"))

    @pytest.mark.parametrize("zero", [0, 0.0, Time("0ep")])
    def test_division_by_zero(self, zero: float) -> None:
        with pytest.raises(ZeroDivisionError, match="divide"):
            Time("1ep") / zero

    def test_a_boolean_is_not_a_factor(self) -> None:
        with pytest.raises(TimeError, match="amount"):
            Time("1ep") * True
