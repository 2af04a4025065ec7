"""A run that decides its sizes as it goes lies between the plans of its ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import (
    AtMost,
    MultipleOf,
    NoiseScale,
    PeriodSizes,
    Plateau,
    SizeFunction,
    SquareRootRule,
    Steps,
)
from stretto.errors import BatchSizeError, ConversionError, PlanError
from stretto.planning import decided_between, plan, plan_range
from stretto.schedules import Linear
from stretto.timing import Horizon

TWO_EPOCHS = Horizon("2ep", dataset_num_samples=1003)
BY_NOISE = NoiseScale(8, 64)


def test_the_table_of_a_range() -> None:
    planned = plan_range(
        TWO_EPOCHS,
        BY_NOISE,
        world_size=8,
        micro_batch_size=4,
        schedules={"lr": Linear(1, 0), "weight_decay": 0.1},
        base={"lr": 4e-3},
        rule=SquareRootRule(64),
        triggers={"evaluate": "10%", "log": "10ba", "checkpoint": "5m", "never": "3ep"},
    )
    path = Path(__file__).parent / "tables" / "range.txt"
    text = f"{planned}\n"
    if os.environ.get("STRETTO_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert planned.table() == str(planned)


@given(
    st.lists(st.integers(3, 20), min_size=1, max_size=6),
    st.integers(20, 70),
    st.sampled_from(["keep", "drop", "carry"]),
)
def test_every_run_within_the_bounds_has_a_number_of_batches_within(
    sizes: list[int], num_samples: int, last_batch: Any
) -> None:
    horizon = Horizon("3ep", dataset_num_samples=num_samples, last_batch=last_batch)
    steps = Steps({f"{2 * number}ba": size for number, size in enumerate(sizes)})
    done = plan(horizon, steps).num_batches
    ends = plan_range(horizon, NoiseScale(3, 20))
    assert ends.num_batches is not None
    assert done is not None
    assert ends.num_batches[0] <= done <= ends.num_batches[1]


def test_bounds_come_through_wrappers() -> None:
    planned = plan_range(TWO_EPOCHS, AtMost(MultipleOf(NoiseScale(8, 100), 24, "up"), 96))
    assert planned.sizes == (24, 96)
    assert repr(planned) == "<PlanRange of 2ep: batches of 24 to 96>"
    assert planned.num_batches == (22, 84)


def test_bounds_come_through_periods() -> None:
    periods = PeriodSizes([("10%", 4), ("rest", BY_NOISE)])
    assert plan_range(TWO_EPOCHS, periods).sizes == (4, 64)
    assert plan_range(TWO_EPOCHS, AtMost(periods, 32)).sizes == (4, 32)
    without = PeriodSizes([("10%", SizeFunction(lambda now, size: 8)), ("rest", BY_NOISE)])
    with pytest.raises(PlanError, match="not say between which they are; run it without a plan"):
        plan_range(TWO_EPOCHS, without)


def test_a_ramp_by_the_wall_clock_lies_between_its_ends() -> None:
    assert plan_range(TWO_EPOCHS, "0s:8 1h:32").sizes == (8, 32)


def test_a_run_by_the_wall_clock_has_no_number_of_batches() -> None:
    planned = plan_range(Horizon("2h", dataset_num_samples=1000), BY_NOISE)
    assert planned.num_batches is None
    assert "as many batches as that takes, on 1 rank" in str(planned)
    assert "the run ends by wall time" in planned.warnings[0]


def test_a_run_of_batches_has_other_samples_at_each_end() -> None:
    planned = plan_range(Horizon("500ba"), BY_NOISE)
    assert planned.num_batches == (500, 500)
    assert str(planned).startswith("run of 500ba: 500 batches on 1 rank\n")


def test_the_json_has_both_ends() -> None:
    record: Any = plan_range(TWO_EPOCHS, BY_NOISE).to_json()
    assert record == json.loads(json.dumps(record))
    assert (record["least"]["num_batches"], record["largest"]["num_batches"]) == (252, 32)


@pytest.mark.parametrize("policy", [8, "0ep:8 1ep:16", SizeFunction(lambda now, size: 8)])
def test_sizes_that_are_known_or_have_no_bounds(policy: Any) -> None:
    assert decided_between(TWO_EPOCHS, policy) is None
    with pytest.raises(PlanError, match="plan a range of sizes"):
        plan_range(TWO_EPOCHS, policy)


def test_what_a_plan_refuses_is_refused() -> None:
    with pytest.raises(PlanError, match=r"batches of 8 on 16 ranks.*start 8 ranks$"):
        plan_range(TWO_EPOCHS, BY_NOISE, world_size=16)
    with pytest.raises(ConversionError, match="the batch sizes are not known"):
        plan_range(TWO_EPOCHS, BY_NOISE, schedules={"lr": Linear(warmup="200ba")})
    with pytest.raises(BatchSizeError, match="patience"):
        plan_range(TWO_EPOCHS, Plateau("validation/loss", start=8, maximum=64, patience=0))
