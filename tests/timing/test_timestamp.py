"""`Timestamp`: an immutable record of counts."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.timing.strategies import horizons, timestamps

from stretto.errors import TimeError, UnitError
from stretto.timing import Horizon, Time, Timestamp
from stretto.timing.timestamp import nanoseconds

COUNTS = st.builds(Timestamp, *[st.integers(0, 2**70) for _ in Timestamp._fields])


@given(COUNTS)
def test_state_survives_json(timestamp: Timestamp) -> None:
    state = timestamp.to_state()
    assert Timestamp.from_state(json.loads(json.dumps(state))) == timestamp
    assert {type(value) for value in state.values()} == {int}


@given(COUNTS)
def test_repr_evaluates_back_and_pickles(timestamp: Timestamp) -> None:
    assert eval(repr(timestamp), {"Timestamp": Timestamp}) == timestamp
    again = pickle.loads(pickle.dumps(timestamp))
    assert again == timestamp
    assert type(again) is Timestamp


@given(COUNTS)
def test_each_unit_is_a_counter(timestamp: Timestamp) -> None:
    assert timestamp.get("ep") == Time(timestamp.epoch, "ep")
    assert timestamp.get("ba") == Time(timestamp.batch, "ba")
    assert timestamp.get("sp") == Time(timestamp.sample, "sp")
    assert timestamp.get("tok") == Time(timestamp.token, "tok")
    assert timestamp.get("sec") * 10**9 == Time(timestamp.run_nanoseconds, "sec")


@given(horizons(), st.data())
def test_the_strategy_gives_counts_that_agree(horizon: Horizon, data: st.DataObject) -> None:
    now, num_samples = data.draw(timestamps(horizon)), horizon.dataset_num_samples
    assert Timestamp.from_state(now.to_state()) == now
    assert now.batch_in_epoch <= now.batch
    assert now.sample_in_epoch <= now.sample
    assert now.token_in_epoch <= now.token
    if num_samples is not None:
        assert now.sample == now.epoch * num_samples + now.sample_in_epoch


def test_everything_starts_at_zero() -> None:
    assert set(Timestamp()) == {0}


def test_the_fraction_of_the_run_needs_a_horizon() -> None:
    with pytest.raises(UnitError, match="timestamp"):
        Timestamp().get("dur")


def test_unknown_units() -> None:
    with pytest.raises(TimeError, match="epoch"):
        Timestamp().get("epoch")


def test_it_cannot_change() -> None:
    with pytest.raises(AttributeError):
        Timestamp().epoch = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": -1}, "sample=-1"),
        ({"sample": 1.0}, "sample=1.0"),
        ({"sample": True}, "sample=True"),
        ({"sample": None}, "sample=None"),
        ({"sample": "5"}, "sample='5'"),
        ({"samples": 5}, "samples=5"),
        ({5: 5}, "5=5"),
    ],
)
def test_records_that_are_not_timestamps(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TimeError, match=message):
        Timestamp.from_state({**Timestamp().to_state(), **change})


def test_a_missing_count() -> None:
    state = Timestamp().to_state()
    del state["token"]
    with pytest.raises(TimeError, match="timestamp"):
        Timestamp.from_state(state)


@pytest.mark.parametrize("seconds", [-1, -1e-12, float("nan"), float("inf"), 1e12])
def test_seconds_that_cannot_pass(seconds: float) -> None:
    with pytest.raises(TimeError, match="seconds"):
        nanoseconds(seconds)


@given(st.integers(0, 10**17))
def test_seconds_are_kept_to_the_nanosecond(count: int) -> None:
    assert abs(nanoseconds(count / 10**9) - count) <= max(1, count * 2**-52)
