"""Where times lie within a run or a part of it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import ConversionError
from stretto.schedules.scope import END, RunScope, Span, integers
from stretto.timing import Horizon, Time, TimeUnit


class Doubling:
    """Batch sizes 2, 2, 2, 2, 4, 4, 4, 4, 8, ...: four batches of each."""

    def sample_at_batch(self, batch: int, /) -> int:
        rounds, within = divmod(batch, 4)
        return 8 * ((1 << rounds) - 1) + within * (2 << rounds)

    def batch_at_sample(self, sample: int, /) -> int:
        batch = 0
        while self.sample_at_batch(batch) < sample:
            batch += 1
        return batch


RAMP = Horizon("10ep", dataset_num_samples=12, batch_sizes=Doubling())


def run_of(horizon: Horizon, *times: str) -> Span:
    """Return a run on the axis of the times."""
    return RunScope(horizon).span([Time(time) for time in times])


def test_times_of_one_unit_keep_their_counter() -> None:
    assert run_of(RAMP, "3ba").axis.unit is TimeUnit.BATCH
    assert run_of(RAMP, "3ep", "5%").axis.unit is TimeUnit.EPOCH
    assert run_of(RAMP, "3ba", "5%").axis.unit is TimeUnit.SAMPLE


def test_a_fraction_is_one_of_the_span() -> None:
    rest = run_of(RAMP, "1dur").part(Fraction(20), Fraction(60))
    assert rest.after(Time("0.25dur")) == 30
    assert rest.length(END) == 40


def test_what_is_not_a_fraction_is_counted_from_its_start() -> None:
    rest = run_of(RAMP, "1dur").part(Fraction(20), Fraction(60))
    assert rest.after(Time("1.5ep")) == 38
    assert rest.after(Time("5sp")) == 25


def test_batches_are_counted_where_they_lie() -> None:
    span = run_of(RAMP, "1ba", "1dur")
    assert [span.after(Time(n, "ba")) for n in (1, 4, 5, 8)] == [2, 8, 12, 24]
    # Position 10 lies within the fifth batch, so the first that begins after it is the sixth.
    assert span.moved(Fraction(10), Time("2ba")) == 20
    assert span.moved(Fraction(24), Time("-4ba")) == 8
    assert span.moved(Fraction(8), Time("-100ba")) == 0


def test_an_interval_is_counted_on_its_own_counter() -> None:
    rest = run_of(RAMP, "1ba", "1dur").part(Fraction(12), Fraction(120))
    own = rest.along(TimeUnit.BATCH)
    assert own.axis.unit is TimeUnit.BATCH
    assert own.start == 5
    assert own.end == Doubling().batch_at_sample(120)
    assert rest.along(TimeUnit.DURATION) is rest


def test_the_start_of_the_run_is_known_in_every_unit() -> None:
    unknown = Horizon("10ep", dataset_num_samples=12)
    own = run_of(unknown, "1dur").along(TimeUnit.BATCH)
    assert own.start == 0
    assert own.end is None


def test_a_later_start_may_not_be() -> None:
    rest = run_of(Horizon("10ep", dataset_num_samples=12), "1dur").part(Fraction(12), None)
    with pytest.raises(ConversionError, match="advance"):
        rest.along(TimeUnit.BATCH)


def test_the_end_is_unknown_where_no_time_refers_to_it() -> None:
    by_the_clock = Horizon("1h", dataset_num_samples=12)
    assert run_of(by_the_clock, "3ep").end is None
    with pytest.raises(ConversionError, match="batch"):
        run_of(by_the_clock, "3ep", "5%")


def test_parts_of_an_epoch_of_unknown_size_are_refused() -> None:
    span = run_of(Horizon("10ep"), "1ep")
    assert span.after(Time("50%")) == 5
    for part in ("0.5ep", "5%"):
        with pytest.raises(ConversionError, match="passed"):
            span.after(Time(part))


def test_positions_are_shown_in_the_unit_of_the_axis() -> None:
    assert run_of(RAMP, "3ep").show(Fraction(18)) == "1.5ep"
    assert run_of(Horizon("1h"), "5m").show(Fraction(90 * 10**9)) == "1m30s"


@given(st.lists(st.fractions(max_denominator=50), min_size=1, max_size=5))
def test_integers_stand_for_the_same_positions(positions: list[Fraction]) -> None:
    scale, *found = integers(*positions)
    assert [Fraction(number, scale) for number in found] == positions
