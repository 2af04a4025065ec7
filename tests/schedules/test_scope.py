"""Where times lie within a run or a part of it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import ConversionError
from stretto.schedules.scope import END, Mark, Scope, over_common_denominator
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


def run_of(horizon: Horizon) -> Scope:
    return Scope.of(horizon)


def part_of(first: int, last: int, unit: str = "sp") -> Scope:
    """Return a part of the ramp, between two positions."""
    axis = RAMP.axis(unit)
    return run_of(RAMP).part(Mark(axis, Fraction(first)), Mark(axis, Fraction(last)))


def test_a_run_is_read_on_the_counter_of_its_length() -> None:
    assert run_of(RAMP).axis.unit is TimeUnit.EPOCH
    assert run_of(RAMP.scaled(1)).end == 120


def test_a_fraction_is_one_of_the_span() -> None:
    rest = part_of(20, 60)
    assert rest.after(Time("0.25dur")).tick == 30
    assert rest.length(END) == 40


def test_what_is_not_a_fraction_is_counted_from_its_start_on_its_own_counter() -> None:
    rest = part_of(20, 60)
    assert rest.after(Time("1.5ep")).tick == 38
    assert rest.after(Time("5sp")) == Mark(RAMP.axis("sp"), Fraction(25))
    # Position 20 lies within the seventh batch, so batches are counted from the eighth on.
    assert rest.after(Time("2ba")) == Mark(RAMP.axis("ba"), Fraction(9))
    assert rest.length(Time("2ba")) == 2


def test_batches_are_counted_where_they_lie() -> None:
    span, batches = run_of(RAMP), RAMP.axis("ba")
    assert [span.place(span.after(Time(n, "ba"))) for n in (1, 4, 5, 8)] == [2, 8, 12, 24]
    samples = [Mark(RAMP.axis("sp"), Fraction(sample)) for sample in (10, 24, 8)]
    moved = [span.moved(mark, Time(n, "ba")) for mark, n in zip(samples, (2, -4, -9), strict=True)]
    assert [(mark.axis, mark.tick) for mark in moved] == [
        (batches, Fraction(tick)) for tick in (7, 4, -5)
    ]
    assert span.place(moved[-1]) == 0


def test_an_interval_is_counted_on_its_own_counter() -> None:
    rest = part_of(12, 120)
    own = rest.along(TimeUnit.BATCH)
    assert own.axis.unit is TimeUnit.BATCH
    assert own.start == 5
    assert own.end == Doubling().batch_at_sample(120)
    assert rest.along(TimeUnit.DURATION) is rest


def test_a_part_of_a_sample_is_kept_where_another_unit_has_it() -> None:
    horizon = Horizon("30sp", dataset_num_samples=10, tokens_per_sample=4, batch_sizes=3)
    run = Scope.of(horizon)
    cut = run.after(Time("5%"))
    assert [run.along(TimeUnit(unit)).place(cut) for unit in ("sp", "ep", "tok", "ba")] == [
        Fraction(3, 2),
        Fraction(3, 2),
        6,
        1,
    ]


def test_the_start_of_the_run_is_known_in_every_unit_and_its_end_may_not_be() -> None:
    own = run_of(Horizon("10ep", dataset_num_samples=12)).along(TimeUnit.BATCH)
    assert own.start == 0
    assert own.end is None


def test_the_start_and_the_end_of_a_period_are_needed() -> None:
    run = run_of(Horizon("10ep", dataset_num_samples=12))
    for part in (run.part(run.after(Time("1ep")), run.last), run.part(run.first, run.after(END))):
        own = part.along(TimeUnit.BATCH)
        if part.first == run.first:
            assert own.end is None
            own = run.part(run.first, run.after(Time("9ep"))).along(TimeUnit.BATCH)
        with pytest.raises(ConversionError, match="advance"):
            assert own.start == own.end


def test_parts_of_an_epoch_of_unknown_size_are_refused() -> None:
    span = run_of(Horizon("10ep"))
    assert span.after(Time("50%")).tick == 5
    for part in ("0.5ep", "5%"):
        with pytest.raises(ConversionError, match="passed"):
            span.after(Time(part))


def test_positions_are_shown_in_the_unit_of_the_axis() -> None:
    assert run_of(RAMP).show(Fraction(18)) == "1.5ep"
    assert run_of(Horizon("1h")).show(Fraction(90 * 10**9)) == "1m30s"


@given(st.lists(st.fractions(max_denominator=50), min_size=1, max_size=5))
def test_integers_stand_for_the_same_positions(positions: list[Fraction]) -> None:
    scale, *found = over_common_denominator(*positions)
    assert [Fraction(number, scale) for number in found] == positions
