from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import DoublingRamp, LinearRamp, LinearRule
from stretto.planning import Plan, plan
from stretto.planning.plan import moment_record
from stretto.report import plan_table
from stretto.report.tables import moments_table
from stretto.schedules import Cosine, Custom, Linear, Periods, Schedule
from stretto.timing import Horizon

FOLDER = Path(__file__).parent / "tables"
LR = Periods([("5%", Linear(0, 1)), ("rest", Cosine())])

PLANS = {
    "constant": lambda: plan(Horizon("2ep", dataset_num_samples=50_000), 128),
    "ramp": lambda: plan(
        Horizon("2ep", dataset_num_samples=50_000, tokens_per_sample=128),
        DoublingRamp(8, 64, "40%"),
        world_size=2,
        micro_batch_size=8,
        schedules={"lr": LR},
        base={"lr": 3e-3},
        rule=LinearRule(64),
        triggers={"evaluate": "10%", "checkpoint": "5m", "log": "512sp"},
    ),
    "many": lambda: plan(
        Horizon("20Mtok", dataset_num_samples=1_000_000, tokens_per_sample=128),
        LinearRamp(24, 2048, "40%"),
        world_size=8,
        micro_batch_size=16,
        schedules={"lr": LR, "weight_decay": 1.0, "momentum": Linear(0.85, 0.95)},
    ),
    "tokens": lambda: plan(
        Horizon("20Mtok", dataset_num_samples=1_000, tokens_per_sample=4096),
        "0tok:16Ktok 2Mtok:64Ktok",
        rule={"sqrt": "64Ktok"},
        schedules={"lr": LR},
    ),
    "open": lambda: plan(
        Horizon("2h", dataset_num_samples=1000),
        "0ep:8 2ep:32",
        schedules={"lr": 1.0},
        triggers={"evaluate": "1ep", "once": "30ep"},
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_tables_are_the_golden_ones(name: str) -> None:
    path = FOLDER / f"{name}.txt"
    text = plan_table(PLANS[name](), max_rows=12) + "\n"
    if os.environ.get("STRETTO_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def widest(planned: Plan, rows: int) -> int:
    return max(map(len, plan_table(planned, max_rows=rows).splitlines()))


@given(
    st.integers(1, 10**12),
    st.integers(1, 4000),
    st.integers(0, 3),
    st.integers(1, 30),
    st.sampled_from([1, 8]),
)
def test_no_line_is_wider_than_100(n: int, size: int, values: int, rows: int, world: int) -> None:
    planned = plan(
        Horizon("3ep", dataset_num_samples=n, tokens_per_sample=4096),
        LinearRamp(world, world + size % 200, "50%"),
        world_size=world,
        micro_batch_size=2,
        schedules=dict.fromkeys(["lr", "weight_decay", "momentum"][:values], Cosine()),
        triggers={"evaluate": "10%"},
    )
    assert widest(planned, rows) <= 100


def unknown_inside(shape: Schedule, horizon: Horizon) -> Custom:
    """Return a schedule as a function, of which a plan knows no border."""
    factor = shape.bind(horizon)
    return Custom(lambda timer: factor(timer.timestamp), reads="ba")


@given(
    num_batches=st.integers(1, 3000),
    warmup=st.integers(0, 3000),
    low=st.floats(0, 1),
    end=st.floats(0, 1),
)
def test_a_row_shows_the_peak_of_a_warm_up(
    num_batches: int, warmup: int, low: float, end: float
) -> None:
    horizon = Horizon(f"{num_batches}ba")
    shape = (
        Linear(2, end)
        if warmup >= num_batches
        else Periods([(f"{warmup}ba", Linear(low, 2)), ("rest", Linear(2, end))])
    )
    planned = plan(horizon, 4, schedules={"lr": unknown_inside(shape, horizon)})
    values = [batch.values["lr"] for batch in planned.batches()]
    row = plan_table(planned).splitlines()[4]
    shown = row[row.rindex("%") + 1 :].split(" to ")
    assert f"{max(values):.4g}" in [one.strip() for one in shown]
    assert f"{values[0]:.4g}" == shown[0].strip()
    assert f"{values[-1]:.4g}" == shown[-1].strip()


def test_a_row_shows_what_goes_beyond_both_ends_in_its_order() -> None:
    shape = Periods([("300ba", Linear(1, 0)), ("300ba", Linear(0, 3)), ("rest", Linear(3, 2))])
    horizon = Horizon("1000ba")
    planned = plan(horizon, 4, schedules={"lr": unknown_inside(shape, horizon)})
    assert "1 to 0 to 3 to 2.002" in plan_table(planned)


def test_a_run_of_more_batches_than_can_be_counted_has_a_table() -> None:
    planned = plan(Horizon("1e19ba"), 8, schedules={"lr": Linear(1, 0)})
    assert "  10,000,000,000,000,000,000  " in plan_table(planned)
    assert "  1 to " in plan_table(planned)


def test_the_tokens_of_a_batch_are_its_own_without_those_that_are_dropped_after_it() -> None:
    horizon = Horizon("2ep", dataset_num_samples=10, tokens_per_sample=8, last_batch="drop")
    planned = plan(horizon, 4)
    assert moment_record(planned, "4sp")["tokens"] == 32
    assert moments_table(planned, ["4sp"]).splitlines()[1].split()[3] == "32"
