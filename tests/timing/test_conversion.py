"""`convert`: every pair of units, every set of facts, and laws against a run counted by hand."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.timing.by_hand import count_by_hand
from tests.timing.strategies import horizons, times, units

from stretto.errors import ConversionError, TimeError
from stretto.timing import Horizon, Time, TimeUnit, convert

# Epochs of 1,000 samples and 8,000 tokens, batches of 100 samples, a run of 20 epochs.
FACTS: dict[str, Any] = {
    "samples": {"dataset_num_samples": 1_000},
    "tokens": {"dataset_num_tokens": 8_000},
    "batch": {"batch_size": 100},
    "run": {"max_training_duration": "20ep"},
}
WHY = {
    "samples": "the number of samples in the data set is not known; "
    "set dataset_num_samples (num_samples of the data), or ",
    "tokens": "the number of tokens in the data set is not known; "
    "set dataset_num_tokens (num_tokens of the data), or ",
    "batch": "the batch size is not known in advance; set batch_size, or ",
    "run": "the length of the run is not known; set max_training_duration, or ",
    "clock": "how long a batch will take is not known before the run; ",
}
SAME = {"ep": "2ep", "ba": "20ba", "sp": "2000sp", "tok": "16Ktok", "dur": "0.1dur"}
NEEDED = {
    ("ep", "ba"): "samples batch",
    ("ep", "sp"): "samples",
    ("ep", "tok"): "tokens",
    ("ep", "dur"): "run",
    ("ba", "sp"): "batch",
    ("ba", "tok"): "batch samples tokens",
    ("ba", "dur"): "batch samples run",
    ("sp", "tok"): "samples tokens",
    ("sp", "dur"): "samples run",
    ("tok", "dur"): "tokens run",
}


def needed(unit: str, target: str) -> set[str]:
    if unit == target:
        return set()
    if "sec" in {unit, target}:
        return {"clock", *(["run"] if "dur" in {unit, target} else [])}
    return set((NEEDED.get((unit, target)) or NEEDED[target, unit]).split())


@pytest.mark.parametrize("unit", TimeUnit)
@pytest.mark.parametrize("target", TimeUnit)
def test_every_pair_with_every_set_of_facts(unit: str, target: str) -> None:
    times_of = {**SAME, "sec": "30m"}
    for known in (set(some) for count in range(5) for some in combinations(FACTS, count)):
        facts = {name: value for fact in known for name, value in FACTS[fact].items()}
        missing = needed(unit, target) - known
        if not missing:
            assert convert(times_of[unit], target, **facts) == Time(times_of[target])
            continue
        with pytest.raises(ConversionError) as caught:
            convert(times_of[unit], target, **facts)
        said = str(caught.value)
        assert said.startswith(f"cannot convert {times_of[unit]} to {target}: ")
        assert said.endswith(f"write it in '{target}'")
        assert any(WHY[fact] in said for fact in missing), said


@pytest.mark.parametrize("chain", list(permutations(SAME)), ids="-".join)
def test_every_chain_comes_back(chain: tuple[str, ...]) -> None:
    facts = {name: value for fact in FACTS.values() for name, value in fact.items()}
    time = Time(SAME[chain[0]])
    for unit in (*chain[1:], chain[0]):
        time = convert(time, unit, **facts)
        assert time == Time(SAME[unit])


@pytest.mark.parametrize(
    ("time", "unit", "facts", "expected"),
    [
        ("0.1dur", "ep", {"max_training_duration": "90ep"}, "9ep"),
        ("9ep", "dur", {"max_training_duration": "90ep"}, "0.1dur"),
        ("10%", "sec", {"max_training_duration": "10h"}, "1h"),
        ("1h", "dur", {"max_training_duration": "10h"}, "0.1dur"),
        ("10%", "ba", {"max_training_duration": "25ba"}, "3ba"),
        ("1ep", "ba", {"dataset_num_samples": 100, "batch_size": 32}, "4ba"),
        ("1ep", "ba", {"dataset_num_samples": 100, "batch_size": 32, "drop_last": True}, "3ba"),
        ("0.97ep", "ba", {"dataset_num_samples": 100, "batch_size": 32, "drop_last": True}, "3ba"),
        ("4ba", "ep", {"dataset_num_samples": 100, "batch_size": 32}, "1ep"),
        ("3ba", "ep", {"dataset_num_samples": 100, "batch_size": 32, "drop_last": True}, "1ep"),
        ("5ba", "sp", {"dataset_num_samples": 100, "batch_size": 32}, "132sp"),
        ("5ba", "sp", {"batch_size": 32}, "160sp"),
        ("1/3ep", "sp", {"dataset_num_samples": 100}, "34sp"),
        ("1sp", "ep", {"dataset_num_samples": 3}, "1/3ep"),
        ("1sp", "ba", {"batch_size": 32}, "1ba"),
        ("0sp", "ba", {"batch_size": 32}, "0ba"),
        ("100ep", "tok", {"dataset_num_tokens": 2**53 + 1}, "900719925474099300tok"),
        ("2ba", "sp", {"batch_size": 32, "max_training_duration": "50sp"}, "50sp"),
        ("1dur", "ba", {"batch_size": 32, "max_training_duration": "50sp"}, "2ba"),
        ("0.29dur", "ep", {"max_training_duration": "100ep"}, "29ep"),
        ("7sp", "tok", {"dataset_num_samples": 10, "dataset_num_tokens": 25}, "18tok"),
    ],
)
def test_results(time: str, unit: str, facts: dict[str, Any], expected: str) -> None:
    assert str(convert(time, unit, **facts)) == expected


def test_the_fraction_of_a_run_says_what_the_run_is_in() -> None:
    said = "cannot convert 0.1dur to ba: max_duration is in epochs and the number of samples"
    with pytest.raises(ConversionError, match=said):
        convert("0.1dur", "ba", max_training_duration="90ep", batch_size=8)


@given(times(), units())
def test_without_facts_only_the_same_unit_works(time: Time, unit: TimeUnit) -> None:
    if time.unit is unit:
        assert convert(time, unit) == time
    else:
        with pytest.raises(ConversionError, match=re.escape(str(time))):
            convert(time, unit)


KNOWN = st.tuples(st.integers(1, 60), st.integers(1, 60), st.booleans())


@given(KNOWN, st.integers(0, 500))
def test_batches_come_back(known: tuple[int, int, bool], count: int) -> None:
    num_samples, size, is_dropped = known
    assume(not is_dropped or size <= num_samples)
    facts: dict[str, Any] = {
        "dataset_num_samples": num_samples, "batch_size": size, "drop_last": is_dropped,
    }  # fmt: skip
    batches = Time(count, "ba")
    for unit in ("sp", "ep"):
        assert convert(convert(batches, unit, **facts), "ba", **facts) == batches


@given(KNOWN, st.fractions(0, 5, max_denominator=99), st.integers(1, 5))
def test_an_epoch_is_the_first_batch_that_reaches_it(
    known: tuple[int, int, bool], amount: Fraction, epochs: int
) -> None:
    num_samples, size, is_dropped = known
    assume(not is_dropped or size <= num_samples)
    horizon = Horizon(
        Time(epochs, "ep"),
        dataset_num_samples=num_samples,
        last_batch="drop" if is_dropped else "keep",
    )
    assume(amount <= epochs)
    counted = count_by_hand(horizon, size)
    first = next(now for now in counted if now.sample >= amount * num_samples)
    found = convert(
        Time(amount, "ep"),
        "ba",
        dataset_num_samples=num_samples,
        batch_size=size,
        drop_last=is_dropped,
    )
    assert found == Time(first.batch, "ba")


@given(horizons(has_batch_size=True), st.data())
def test_it_agrees_with_the_horizon(known: Horizon, data: st.DataObject) -> None:
    assert isinstance(known.batch_sizes, int)
    horizon = Horizon(
        known.max_duration,
        dataset_num_samples=known.dataset_num_samples,
        dataset_num_tokens=known.dataset_num_tokens,
        batch_sizes=known.batch_sizes,
        last_batch="drop" if known.last_batch == "drop" else "keep",
    )
    assert isinstance(horizon.batch_sizes, int)
    time, unit = data.draw(times()), data.draw(units())
    facts: dict[str, Any] = {
        "dataset_num_samples": horizon.dataset_num_samples,
        "dataset_num_tokens": horizon.dataset_num_tokens,
        "max_training_duration": horizon.max_duration,
        "batch_size": horizon.batch_sizes,
        "drop_last": horizon.last_batch == "drop",
    }
    try:
        expected = horizon.convert(time, unit)
    except ConversionError as error:
        with pytest.raises(ConversionError, match=re.escape(str(error))):
            convert(time, unit, **facts)
    else:
        assert convert(time, unit, **facts) == expected


@given(horizons(is_sized=True, has_batch_size=True), st.data())
def test_conversions_keep_the_order(horizon: Horizon, data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from(["ep", "ba", "sp", "tok", "dur"]))
    target = data.draw(st.sampled_from(["ep", "ba", "sp"]))
    first, second = sorted(data.draw(st.tuples(times(unit), times(unit))))
    try:
        assert horizon.convert(first, target) <= horizon.convert(second, target)
    except ConversionError:
        assert unit in {"tok", "dur"}


@pytest.mark.parametrize("name", ["dataset_num_samples", "dataset_num_tokens", "batch_size"])
@pytest.mark.parametrize("count", [0, -1, 1.0, "5", True, np.float64(1), 1.5])
def test_counts_that_cannot_be(name: str, count: object) -> None:
    given_facts: dict[str, Any] = {name: count}
    with pytest.raises(ConversionError, match=name):
        convert("1ep", "ep", **given_facts)


def test_bad_texts_and_units() -> None:
    with pytest.raises(TimeError, match="epoch"):
        convert("3epoch", "ba")
    with pytest.raises(TimeError, match="epoch"):
        convert("3ep", "epoch")
