from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import NO_SIGNALS, Fixed, PiecewiseConstant, Signals
from stretto.errors import BatchSizeError, TimeError
from stretto.timing import Horizon, Time, Timestamp


def test_fixed_is_one_size_to_the_end() -> None:
    bound = Fixed(64).bind(Horizon("1ep"))
    assert bound.decide(Timestamp(batch=10**9), bound.start, NO_SIGNALS) == (64, {})
    hold = bound.holds_until(Timestamp(), {})
    assert hold is not None
    assert hold.covers(Timestamp(sample=10**18))
    assert bound.is_static
    assert bound.units == frozenset()
    assert Fixed(64).scaled(2) == Fixed(64)
    assert Fixed(64).times() == ()
    assert eval(repr(Fixed(64))) == Fixed(64)


@pytest.mark.parametrize("size", [0, -1, 1.5, 64.0, True, None, [64], float("nan")], ids=repr)
def test_sizes_are_integers_of_at_least_one(size: object) -> None:
    with pytest.raises(BatchSizeError, match="integer"):
        Fixed(size)


def test_text_and_mappings_are_the_same_steps() -> None:
    text = PiecewiseConstant("0tok:768 250Btok:1_536")
    assert text == PiecewiseConstant({"0tok": 768, "250Btok": 1536})
    assert text == PiecewiseConstant({Time("0tok"): 768, Time("250Btok"): 1536})
    assert str(text) == "0tok:768 250Btok:1536"
    assert eval(repr(text)) == text
    assert text.times() == (Time("0tok"), Time("250Btok"))
    assert text.scaled(0.5) == PiecewiseConstant("0tok:768 125Btok:1536")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6, unique=True), st.integers(0, 60))
def test_the_step_in_force_is_the_last_reached(marks: list[int], now: int) -> None:
    steps = {"0sp": 100} | {f"{mark}sp": mark for mark in sorted(marks)}
    bound = PiecewiseConstant(steps).bind(Horizon("1ep"))
    size = bound.decide(Timestamp(sample=now), {}, NO_SIGNALS)[0]
    assert size == max([mark for mark in marks if mark <= now], default=100)
    hold = bound.holds_until(Timestamp(sample=now), {})
    following = min([mark for mark in marks if mark > now], default=None)
    assert hold is not None
    assert [tick for _, tick in hold.limits] == ([] if following is None else [following])


def test_each_step_is_read_on_its_own_counter() -> None:
    horizon = Horizon("4ep", dataset_num_samples=100)
    bound = PiecewiseConstant("0ep:8 10ba:16 2ep:32 75%:64").bind(horizon)

    def size(batch: int, sample: int) -> int:
        return bound.decide(Timestamp(batch=batch, sample=sample), {}, NO_SIGNALS)[0]

    assert [size(0, 0), size(9, 72), size(10, 80), size(17, 199)] == [8, 8, 16, 16]
    assert [size(18, 200), size(20, 299), size(21, 300)] == [32, 32, 64]
    assert bound.units == {"ba", "sp"}
    hold = bound.holds_until(Timestamp(batch=0, sample=0), {})
    assert hold is not None
    assert not hold.covers(Timestamp(batch=10, sample=80))
    assert hold.covers(Timestamp(batch=9, sample=72))


@pytest.mark.parametrize(
    ("steps", "horizon"),
    [
        # 2 epochs are 200 samples, which come before sample 150.
        ("0ep:8 2ep:16 150sp:32", Horizon("4ep", dataset_num_samples=100)),
        # 20 batches of 8 are 160 samples.
        ("0ep:8 20ba:16 160sp:32", Horizon("4ep", dataset_num_samples=1000)),
        ("0ep:8 160sp:16 20ba:32", Horizon("4ep", dataset_num_samples=1000)),
        ("0ep:8 3ep:16 50%:32", Horizon("4ep")),
        # Of each epoch of 20 samples, batches of 8 leave out 4.
        ("0ep:8 4ba:16 2ep:20", Horizon("9ep", dataset_num_samples=20, last_batch="drop")),
        ("0sp:8 30tok:16 1ep:32", Horizon("9ep", dataset_num_samples=5, dataset_num_tokens=20)),
    ],
)
def test_steps_out_of_order_on_this_run_are_refused(steps: str, horizon: Horizon) -> None:
    with pytest.raises(BatchSizeError, match="come"):
        PiecewiseConstant(steps).bind(horizon)


@pytest.mark.parametrize(
    ("steps", "horizon"),
    [
        ("0ep:8 19ba:16 160sp:32", Horizon("4ep", dataset_num_samples=1000)),
        ("0ep:8 152sp:16 20ba:32", Horizon("4ep", dataset_num_samples=1000)),
        ("0ep:8 3ba:16 2ep:20", Horizon("9ep", dataset_num_samples=20, last_batch="drop")),
        ("0sp:8 1ba:16 20sp:8 2ba:4", Horizon("9ep", dataset_num_samples=20, last_batch="drop")),
        # Only the run can tell which comes first.
        ("0ep:8 5ba:16 100tok:32", Horizon("4ep", dataset_num_samples=1000)),
        ("0ep:8 5m:16 100sp:32", Horizon("4ep", dataset_num_samples=1000)),
        # Refused by the plan, which says what to do about it.
        ("0ep:30 5ba:16 100sp:32", Horizon("4ep", dataset_num_samples=20, last_batch="drop")),
    ],
)
def test_steps_in_order_or_not_known_to_be_out_of_it_are_taken(
    steps: str, horizon: Horizon
) -> None:
    assert PiecewiseConstant(steps).bind(horizon).decide(Timestamp(), {}, NO_SIGNALS)[0] in (8, 30)


@pytest.mark.parametrize(
    ("steps", "match"),
    [
        ("", "none"),
        ({}, "there are none"),
        ("768", "'768' is not '<time>:<size>'"),
        ("0tok:x", "'x': it is not a number of samples"),
        ("0tok:1e3", "'1e3': it is not a number of samples"),
        ("0tok:-8", "'-8': it is not a number of samples"),
        ("0tok:0", "'0': it is less than 1"),
        ("0tok:0tok", "'0tok': it is less than 1"),
        ("0tok:64Kba", "'64Kba': it is a time in batches"),
        ("0tok:16Ktok 2Mtok:64", "in tokens and 64 in samples"),
        ("5ep:8", "start"),
        ("0ep:8 5ba:16 2ep:16 1ep:32", "'1ep' does not come after '2ep'"),
        ("0ep:8 2ep:16 2ep:32", "'2ep' does not come after '2ep'"),
        ("0ep:8 50%:16 30%:32", "'0.3dur' does not come after '0.5dur'"),
        ("0ep:8 0sp:16", "'0sp' does not come after '0ep'"),
        ({"0ep": 8.5}, "use 8.5 as a batch size"),
        (["0ep:8"], "neither text nor a mapping"),
        (None, "neither text nor a mapping"),
    ],
    ids=repr,
)
def test_wrong_steps_are_refused(steps: object, match: str) -> None:
    with pytest.raises(BatchSizeError, match=match):
        PiecewiseConstant(steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "steps",
    [
        "0tok:768,250Btok:1536",
        "250Btok:1536, 0tok:768",
        "  250Btok:1536 ,\n0tok:768, ",
        "0sp:768 250Btok:1536",
        {"250Btok": 1536, "0tok": 768},
    ],
    ids=repr,
)
def test_commas_and_any_order_are_steps_as_megatron_takes_them(steps: Any) -> None:
    found = PiecewiseConstant(steps)
    assert [size for _, size in found.steps] == [768, 1536]
    assert found.times()[1] == Time("250Btok")


def test_a_wrong_time_is_refused_as_such() -> None:
    with pytest.raises(TimeError, match="3epoch"):
        PiecewiseConstant("0ep:8 3epoch:16")


@given(st.text(max_size=30))
def test_any_text_is_steps_or_our_error(text: str) -> None:
    try:
        PiecewiseConstant(text)
    except (BatchSizeError, TimeError) as error:
        message = str(error)
    else:
        message = "cannot "
    assert message.startswith("cannot ")


@pytest.mark.parametrize(
    ("steps", "horizon"),
    [
        ("0ep:8 2ep:16 50%:32", Horizon("4ep", dataset_num_samples=10)),
        ("0ep:8 20sp:16 2ep:32", Horizon("4ep", dataset_num_samples=10)),
    ],
)
def test_a_step_of_no_length_is_left_out(steps: str, horizon: Horizon) -> None:
    """As a ramp leaves out sizes for which there is no room."""
    bound = PiecewiseConstant(steps).bind(horizon)
    sizes = [bound.decide(Timestamp(sample=at), bound.start, Signals())[0] for at in (19, 20)]
    assert sizes == [8, 32]
