"""`Horizon`: where a run stands and ends, against fractions and a run counted by hand."""

from __future__ import annotations

import copy
import pickle
import re
from fractions import Fraction
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.timing.by_hand import count_by_hand
from tests.timing.strategies import horizons, lengths, timestamps

from stretto.errors import BatchSizeError, ConversionError, TimeError
from stretto.timing import Horizon, Time, Timestamp, TimeUnit


def passed(horizon: Horizon, now: Timestamp, unit: str) -> Fraction:
    """How much of `unit` has passed, by the definition."""
    num_samples = horizon.dataset_num_samples
    within = Fraction(now.sample_in_epoch, num_samples) if num_samples else 0
    return Fraction(
        {
            "ep": now.epoch + within,
            "ba": now.batch,
            "sp": now.sample,
            "tok": now.token,
            "sec": Fraction(now.run_nanoseconds, 10**9),
        }[unit]
    )


@given(horizons(), st.data())
def test_positions_are_those_of_the_definition(horizon: Horizon, data: st.DataObject) -> None:
    now = data.draw(timestamps(horizon))
    for unit in ("ep", "ba", "sp", "tok", "sec"):
        assert horizon.position(now, unit) == Time(passed(horizon, now, unit), unit)
    run = horizon.max_duration
    fraction = passed(horizon, now, run.unit) / run.amount
    assert horizon.position(now, "dur") == Time(fraction, "dur")
    assert horizon.elapsed(now) == float(min(Fraction(1), fraction))
    assert horizon.is_done(now) == (fraction >= 1)


@given(horizons(has_batch_size=True))
def test_a_run_is_done_exactly_at_its_end(horizon: Horizon) -> None:
    assert isinstance(horizon.batch_sizes, int)
    counted = count_by_hand(horizon, horizon.batch_sizes, batches=60)
    assert [horizon.is_done(now) for now in counted[:-1]] == [False] * (len(counted) - 1)
    assert [horizon.elapsed(now) for now in counted] == sorted(map(horizon.elapsed, counted))
    if len(counted) <= 60:
        assert horizon.is_done(counted[-1])
        assert horizon.elapsed(counted[-1]) == 1.0


@given(
    st.sampled_from(["ep", "sp", "ba"]).flatmap(
        lambda unit: horizons(has_batch_size=True, is_sized=True, run_unit=unit)
    )
)
def test_the_whole_run_in_batches_and_samples(horizon: Horizon) -> None:
    assert isinstance(horizon.batch_sizes, int)
    end = count_by_hand(horizon, horizon.batch_sizes)[-1]
    assert horizon.convert("1dur", "ba") == Time(end.batch, "ba")
    assert horizon.convert(Time(end.batch, "ba"), "sp") == Time(end.sample, "sp")
    assert horizon.convert(Time(end.batch, "ba"), "dur") >= Time("1dur")
    if horizon.last_batch != "drop":
        assert horizon.end_sample in {None, end.sample}
        assert horizon.convert("1dur", "sp") == Time(end.sample, "sp")


def test_an_endless_run_has_no_epochs() -> None:
    horizon = Horizon.endless("100ba", tokens_per_sample=8)
    assert horizon == Horizon("100ba", tokens_per_sample=8, last_batch="carry")
    assert horizon.with_batch_sizes(32).convert("1dur", "tok") == Time("25_600tok")


@given(horizons(has_batch_size=True, is_sized=True), st.data())
def test_a_position_converts_to_itself(horizon: Horizon, data: st.DataObject) -> None:
    """What `convert` says of the present is what the clock shows in the other unit."""
    now = data.draw(timestamps(horizon))
    unit, target = data.draw(st.permutations(["ep", "ba", "sp"]))[:2]
    assert horizon.convert(horizon.position(now, unit), target) == horizon.position(now, target)


@pytest.mark.parametrize(
    ("horizon", "end"),
    [
        (Horizon("1.5ep", dataset_num_samples=25), 38),
        (Horizon("2ep", dataset_num_samples=25), 50),
        (Horizon("2ep"), None),
        (Horizon("70sp"), 70),
        (Horizon("70ba", batch_sizes=8, dataset_num_samples=100), None),
        (Horizon("100tok", tokens_per_sample=8), 13),
        (Horizon("100tok", dataset_num_tokens=1_000, dataset_num_samples=10), None),
        (Horizon("1h"), None),
    ],
)
def test_end_sample(horizon: Horizon, end: int | None) -> None:
    assert horizon.end_sample == end


class TestUnsizedData:
    """Fine as long as no unit needs the size; where one does, it is said at once."""

    def test_whole_epochs_are_counted(self) -> None:
        horizon = Horizon("10ep")
        now = Timestamp(epoch=5, sample=700, sample_in_epoch=20)
        assert horizon.position(now, "ep") == Time("5ep")
        assert horizon.elapsed(now) == 0.5
        assert horizon.ticks(Time("0.3dur"), horizon.axis("ep")) == 3

    def test_part_of_an_epoch_is_refused_at_construction(self) -> None:
        with pytest.raises(ConversionError, match="passed"):
            Horizon("1.5ep")

    @pytest.mark.parametrize("time", ["0.5ep", "0.25dur"])
    def test_part_of_an_epoch_is_refused_as_ticks(self, time: str) -> None:
        horizon = Horizon("2ep")
        with pytest.raises(ConversionError, match=time):
            horizon.ticks(Time(time), horizon.axis("ep"))

    def test_one_sample_in_an_epoch_is_a_known_size(self) -> None:
        horizon = Horizon("1.5ep", dataset_num_samples=1)
        assert horizon.end_sample == 2

    @pytest.mark.parametrize("run", ["10ba", "10sp", "10tok", "1h"])
    def test_other_runs_need_no_size(self, run: str) -> None:
        assert Horizon(run).position(Timestamp(), "dur") == Time("0dur")


class TestAxes:
    @given(horizons(), st.data())
    def test_ticks_are_what_the_axis_reads(self, horizon: Horizon, data: st.DataObject) -> None:
        now = data.draw(timestamps(horizon))
        unit = data.draw(st.sampled_from(["ep", "ba", "sp", "tok", "sec", "dur"]))
        axis = horizon.axis(unit)
        assert axis.unit == (horizon.max_duration.unit if unit == "dur" else unit)
        assert type(axis.read(now)) is int
        assert horizon.ticks(horizon.position(now, unit), axis) == axis.read(now)

    @given(horizons(), st.data())
    def test_ticks_keep_times_exact(self, horizon: Horizon, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(["ba", "sp", "tok", "sec"]))
        time, axis = data.draw(lengths(unit)), horizon.axis(unit)
        assert horizon.ticks(time, axis) / axis.scale == time.amount

    def test_equal_facts_have_equal_axes(self) -> None:
        first = Horizon("2ep", dataset_num_samples=100)
        second = Horizon("3ep", dataset_num_samples=100)
        assert [first.axis(unit) for unit in TimeUnit] == [second.axis(unit) for unit in TimeUnit]

    def test_unknown_units(self) -> None:
        with pytest.raises(TimeError, match="epoch"):
            Horizon("2ep").axis("epoch")


class TestFacts:
    def test_what_was_given_can_be_read(self) -> None:
        horizon = Horizon(
            "2ep",
            dataset_num_samples=100,
            tokens_per_sample=8,
            batch_sizes=32,
            last_batch="carry",
        )
        assert horizon.max_duration == Time("2ep")
        assert horizon.dataset_num_samples == 100
        assert horizon.dataset_num_tokens == 800
        assert horizon.tokens_per_sample == 8
        assert horizon.batch_sizes == 32
        assert horizon.end_sample == 200
        assert horizon.last_batch == "carry"

    @pytest.mark.parametrize(
        ("run", "facts", "error", "message"),
        [
            ("0.5dur", {}, ConversionError, "it is a fraction of itself"),
            ("0ep", {}, ConversionError, "it is not positive"),
            ("-1h", {}, ConversionError, "it is not positive"),
            ("5", {}, TimeError, "it has no unit"),
            ("1ep", {"dataset_num_samples": 0}, ConversionError, "cannot use dataset_num_samples"),
            ("1ep", {"dataset_num_tokens": -1}, ConversionError, "cannot use dataset_num_tokens"),
            ("1ep", {"tokens_per_sample": 1.0}, ConversionError, "cannot use tokens_per_sample"),
            ("1ep", {"batch_sizes": 0}, BatchSizeError, "cannot use 0 as a batch size"),
            ("1ep", {"batch_sizes": 8.0}, BatchSizeError, "cannot use 8.0 as a batch size"),
            ("1ep", {"batch_sizes": "8"}, BatchSizeError, "cannot use '8' as a batch size"),
            ("1ep", {"batch_sizes": True}, BatchSizeError, "cannot use True as a batch size"),
            ("1ep", {"last_batch": "skip"}, ConversionError, "write 'keep', 'drop' or 'carry'"),
            ("1ep", {"last_batch": None}, ConversionError, "cannot use last_batch=None"),
            ("1ep", {"dataset_num_samples": 8, "tokens_per_sample": 2, "dataset_num_tokens": 15},
             ConversionError, "8 samples of 2 tokens are 16"),
            ("1ep", {"dataset_num_samples": 8, "batch_sizes": 9, "last_batch": "drop"},
             BatchSizeError, "each would be dropped"),
        ],
    )  # fmt: skip
    def test_facts_that_cannot_be(
        self, run: str, facts: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=re.escape(message)):
            Horizon(run, **facts)

    def test_any_integer_type_becomes_an_int(self) -> None:
        horizon = Horizon(
            "1ep",
            dataset_num_samples=np.int32(2**31 - 1),  # type: ignore[arg-type]
            tokens_per_sample=np.int64(2**40),  # type: ignore[arg-type]
            batch_sizes=np.int8(100),  # type: ignore[arg-type]
        )
        assert horizon.dataset_num_tokens == (2**31 - 1) * 2**40
        assert horizon.convert("1000ba", "sp") == Time("100_000sp")


class TestValue:
    @given(horizons())
    def test_repr_evaluates_back(self, horizon: Horizon) -> None:
        again = eval(repr(horizon), {"Horizon": Horizon})
        assert again == horizon
        assert hash(again) == hash(horizon)
        assert repr(again) == repr(horizon)

    @given(horizons())
    def test_pickle_and_copies_are_equal(self, horizon: Horizon) -> None:
        for again in (
            pickle.loads(pickle.dumps(horizon)), copy.copy(horizon), copy.deepcopy(horizon),
        ):  # fmt: skip
            assert again == horizon
            assert again.elapsed(Timestamp()) == 0.0

    def test_it_cannot_change(self) -> None:
        with pytest.raises(AttributeError, match="max_duration"):
            Horizon("1ep").max_duration = Time("2ep")  # type: ignore[misc]

    def test_horizons_differ_by_any_fact(self) -> None:
        several = {
            Horizon("1ep"), Horizon("2ep"), Horizon("1ep", dataset_num_samples=2),
            Horizon("1ep", last_batch="drop"), Horizon("1ep", batch_sizes=2),
            Horizon("1ep", tokens_per_sample=2), Horizon("1ep", dataset_num_tokens=2),
        }  # fmt: skip
        assert len(several) == 7
        assert Horizon("1ep") != "1ep"  # type: ignore[comparison-overlap]

    def test_other_batch_sizes(self) -> None:
        horizon = Horizon("50sp", batch_sizes=32)
        assert horizon.with_batch_sizes(20).convert("1dur", "ba") == Time("3ba")
        assert horizon.with_batch_sizes(None).batch_sizes is None
        assert horizon.with_batch_sizes(32) == horizon


class Plan:
    """Batches of 1, 2, 3, ... samples."""

    def sample_at_batch(self, batch: int, /) -> int:
        return batch * (batch + 1) // 2

    def batch_at_sample(self, sample: int, /) -> int:
        return next(batch for batch in count() if self.sample_at_batch(batch) >= sample)


class TestPlans:
    def test_a_plan_converts(self) -> None:
        horizon = Horizon("100ba", batch_sizes=Plan())
        for batch in range(50):
            samples = horizon.convert(Time(batch, "ba"), "sp")
            assert horizon.convert(samples, "ba") == Time(batch, "ba")
        assert horizon.convert("4sp", "ba") == Time("3ba")
        assert horizon.convert("0.1dur", "sp") == Time("55sp")

    def test_a_stretched_run_forgets_its_plan(self) -> None:
        assert Horizon("100ba", batch_sizes=Plan()).scaled(2).batch_sizes is None

    def test_a_stretched_run_keeps_a_constant_size_and_moves_its_end(self) -> None:
        horizon = Horizon("50sp", batch_sizes=32).scaled(1.5)
        assert horizon == Horizon("75sp", batch_sizes=32)
        assert horizon.convert("3ba", "sp") == Time("75sp")


class TestScaled:
    @pytest.mark.parametrize(
        ("run", "ratio", "expected"),
        [
            ("90ep", 0.5, "45ep"),
            ("100ep", 0.29, "29ep"),
            ("5ba", 0.5, "3ba"),
            ("10sp", Fraction(1, 3), "4sp"),
            ("1h", 2, "2h"),
            ("3ep", np.float64(0.5), "1.5ep"),
        ],
    )
    def test_lengths(self, run: str, ratio: float, expected: str) -> None:
        horizon = Horizon(run, dataset_num_samples=4)
        assert horizon.scaled(ratio) == Horizon(expected, dataset_num_samples=4)

    @pytest.mark.parametrize("ratio", [0, -1])
    def test_ratios_that_cannot_be(self, ratio: int) -> None:
        with pytest.raises(ConversionError, match="positive"):
            Horizon("2ep").scaled(ratio)

    def test_a_ratio_that_is_no_number(self) -> None:
        with pytest.raises(TimeError, match="amount"):
            Horizon("2ep").scaled(float("nan"))
