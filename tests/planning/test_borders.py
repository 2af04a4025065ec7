"""Rows of a plan begin where a schedule changes, and words say what begins there."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.batching import LinearRamp, SquareRootRule
from stretto.errors import ConversionError, PlanError, StrettoError
from stretto.planning import Plan, plan
from stretto.report import plan_table
from stretto.report.tables import groups
from stretto.schedules import (
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Curve,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    Periods,
    Schedule,
    ScheduleLike,
    StepDecay,
)
from stretto.schedules.fields import name_of
from stretto.schedules.scope import MOST_BORDERS
from stretto.timing import Horizon, LastBatch


def begun(schedule: ScheduleLike, run: str = "100ba") -> list[int]:
    """Return the batches at which a plan begins a row for a schedule."""
    planned = plan(Horizon(run, last_batch="carry"), 8, schedules={"lr": schedule})
    return [stage.first.batch for stage in planned.stages if stage.begins]


@pytest.mark.parametrize(
    ("schedule", "batches"),
    [
        (Constant(), []),
        (Constant(warmup="5ba"), [5]),
        (Cosine(), []),
        (Cosine(warmup="5ba", over="40ba"), [5, 45]),
        (Linear(1, 0, over="400ba"), []),
        (Curve(lambda x: x, over="30ba", warmup="80sp"), [10, 40]),
        (WSD("20%", warmup="5%"), [5, 80]),
        (WSD("20%"), [80]),
        (MultiStep(["30ba", "480sp", "80%"], warmup="5ba"), [5, 35, 65, 81]),
        (StepDecay("30ba"), [30, 60, 90]),
        (StepDecay("25ba", warmup="1ba"), [1, 26, 51, 76]),
        (CosineRestarts("10ba", 2), [10, 30, 70]),
        (CosineRestarts("30ba"), [30, 60, 90]),
        (Exponential("10ba", 0.5, warmup="3ba"), [3]),
        (InverseSqrt(warmup="7ba"), [7]),
        (lambda timer: 0.5**timer.epoch, []),
        (Cosine(warmup="5ba") * MultiStep(["30ba"]) * 0.5, [5, 30]),
        (Periods([("10ba", Linear(0, 1)), ("rest", 1), ("20ba", Linear(1, 0))]), [10, 80]),
        (Periods([("10ba", Linear(0, 1, over="4ba")), ("60ba", 0.5)]), [4, 10, 70]),
        (Periods([("10ba", Linear(0, 1, over="40ba")), ("rest", Cosine())]), [10]),
        (Periods([("until 20ba", Constant(warmup="5ba")), ("rest", StepDecay("30ba"))]),
         [5, 20, 50, 80]),
        (Periods([("50%", Periods([("10ba", 1), ("rest", 2)])), ("rest", 3)]), [10, 50]),
    ],
    ids=name_of,
)  # fmt: skip
def test_a_row_begins_where_the_formula_changes(schedule: ScheduleLike, batches: list[int]) -> None:
    assert begun(schedule) == batches


def test_too_many_borders_have_no_rows() -> None:
    horizon = f"{10 * MOST_BORDERS}ba"
    assert begun(StepDecay("1ba", 0.999), horizon) == []
    assert begun(StepDecay("10ba", 0.999), horizon) == [*range(10, 10 * MOST_BORDERS, 10)]
    many = MultiStep([f"{number}ba" for number in range(1, MOST_BORDERS + 2)], 0.999)
    assert begun(many, horizon) == []


def shapes() -> st.SearchStrategy[Schedule]:
    times = st.sampled_from(["3ba", "40sp", "7%", "900tok", "0.3ep"])
    return st.one_of(
        times.map(lambda time: Cosine(warmup=time)),
        times.map(lambda time: MultiStep([time, "60%"])),
        times.map(lambda time: StepDecay(time, 0.9)),
        times.map(lambda time: Periods([(time, Linear(0, 1)), ("rest", WSD("20%"))])),
    )


@given(
    shapes(),
    st.sampled_from([4, "0sp:4 30sp:7", LinearRamp(2, 12, "50%")]),
    st.sampled_from(get_args(LastBatch)),
    st.integers(13, 60),
    st.integers(150, 300),
)
def test_rows_split_the_stages_and_change_no_batch(
    shape: Schedule, sizes: str, ends: LastBatch, num_samples: int, length: int
) -> None:
    horizon = Horizon(
        f"{length}sp", dataset_num_samples=num_samples, tokens_per_sample=16, last_batch=ends
    )
    plain, split = plan(horizon, sizes), plan(horizon, sizes, schedules={"lr": shape})
    assert [b[:6] for b in split.batches()] == [b[:6] for b in plain.batches()]
    assert split.num_samples == plain.num_samples
    assert [one.number for one in split.stages] == [*range(1, len(split.stages) + 1)]
    batches = [*split.batches()]
    for stage in split.stages:
        assert stage.batches is not None
        own = batches[stage.first.batch : stage.first.batch + stage.batches]
        assert own[0].timestamp == stage.first
        assert {one.decided for one in own} == {stage.size}
        assert sum(one.size for one in own) == stage.samples
        assert {one.size for one in own} - {stage.size} <= set(stage.cut_sizes)
        assert {split_of(one.size) for one in own} == set(stage.accumulations)
        assert stage.values["lr"] == (own[0].values["lr"], own[-1].values["lr"])
    for before, after in pairwise(split.stages):
        assert before.end is not None
        assert before.end.batch == after.first.batch
    assert {stage.first.batch for stage in plain.stages} <= {s.first.batch for s in split.stages}


def split_of(size: int) -> int:
    del size
    return 1  # without a micro-batch size


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 60), st.integers(1, 4))
def test_accumulation_is_that_of_the_real_sizes(
    size: int, num_samples: int, length: int, micro: int
) -> None:
    horizon = Horizon(f"{length}sp", dataset_num_samples=num_samples)
    planned = plan(horizon, size, micro_batch_size=micro)
    stage = planned.stages[0]
    real = {one.accumulation for one in planned.batches()}
    assert set(stage.accumulations) == real
    assert stage.accumulation == max(one or 0 for one in real)


def said(schedule: ScheduleLike, **given: object) -> list[str]:
    horizon = Horizon("100ba", last_batch="carry")
    planned = plan(horizon, 8, schedules={"lr": schedule}, base={"lr": 0.2}, **given)  # type: ignore[arg-type]
    return [f"{one.at.batch} {one.what}" for one in planned.changes]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Constant(), []),
        (Constant(warmup="5ba"), ["5 warm-up ends"]),
        (Cosine(warmup="5ba"), ["5 warm-up ends and begins to fall"]),
        (WSD("20%", warmup="5%", shape="1-sqrt"), ["5 warm-up ends", "80 begins to fall"]),
        (Cosine(1, 0.1, over="60ba"), ["60 reaches 0.02"]),
        (Linear(1, 0.5, over="60ba"), ["60 reaches 0.1"]),
        (MultiStep(["30ba", "60ba"], 0.5), ["30 changes to 0.1", "60 changes to 0.05"]),
        (CosineRestarts("50ba"), ["50 changes to 0.2"]),
        (Periods([("30ba", 1), ("rest", Linear(0.5, 1))]),
         ["30 changes to 0.1 and begins to rise"]),
        (Periods([("30ba", 1), ("20ba", Linear(1, 0.5)), ("rest", Linear(0.5, 1))]),
         ["30 begins to fall", "50 reaches 0.1 and begins to rise"]),
        (Periods([("30ba", 1), ("rest", 1)]), []),
        (Periods([("1ba", 0.5), ("rest", 1)]), ["1 changes to 0.2"]),
    ],
    ids=name_of,
)  # fmt: skip
def test_words_say_what_begins(schedule: ScheduleLike, words: list[str]) -> None:
    assert said(schedule) == words


def test_words_have_the_values_that_a_rule_gives() -> None:
    schedule = Constant(warmup="10ba") * MultiStep(["50ba"], 0.5)
    assert said(schedule, rule=SquareRootRule(32)) == ["10 warm-up ends", "50 changes to 0.05"]


def test_many_changes_are_cut_in_the_table() -> None:
    planned = plan(Horizon("100ba", last_batch="carry"), 8, schedules={"lr": StepDecay("10ba")})
    line = next(line for line in plan_table(planned).splitlines() if line.startswith("lr: "))
    assert line.startswith("lr: changes to 0.1 at batch 10; changes to 0.01 at batch 20; ")
    assert plan_table(planned).count(" at batch ") == 5


def test_shared_rows_are_cut_where_a_schedule_changes() -> None:
    schedule = Cosine(warmup="10%")
    planned = plan(Horizon("9000sp"), LinearRamp(4, 900, "50%"), schedules={"lr": schedule})
    rows = groups(planned.stages, 24)
    assert len(rows) <= 24
    assert [stage for row in rows for stage in row] == list(planned.stages)
    assert [row[0].begins for row in rows if row[0].begins] == [("lr",)]


@given(
    st.sampled_from(["ba", "sp", "tok", "ep", "dur"]),
    st.fractions(0, 1, max_denominator=40),
    st.sampled_from(get_args(LastBatch)),
)
def test_at_is_the_first_batch_that_begins_then(unit: str, part: Any, ends: LastBatch) -> None:
    horizon = Horizon("210sp", dataset_num_samples=70, tokens_per_sample=16, last_batch=ends)
    schedules = {"lr": Cosine(warmup="10%"), "weight_decay": MultiStep(["50%"])}
    planned = plan(horizon, "0sp:8 90sp:12", schedules=schedules, micro_batch_size=5)
    time = planned.horizon.convert("1dur", unit) * part if unit == "dur" else None
    time = time or planned.horizon.convert(f"{part}dur", unit)
    axis = planned.horizon.axis(unit)
    tick = planned.horizon.ticks(time, axis)
    later = [one for one in planned.batches() if axis.read(one.timestamp) >= tick]
    if not later:
        with pytest.raises(PlanError, match="last batch"):
            planned.at(time)
        return
    found = planned.at(time)
    assert (found.timestamp, found.size, found.decided) == later[0][:3]
    assert (found.accumulation, found.values) == (later[0].accumulation, later[0].values)


def test_at_refuses_what_only_the_run_can_tell() -> None:
    planned: Plan = plan(Horizon("100sp"), 8)
    for time in ("1ep", "5m"):
        with pytest.raises(PlanError, match="only the run"):
            planned.at(time)
    with pytest.raises((PlanError, ConversionError)):
        planned.at("3tok")


TIMES = st.sampled_from(["3ba", "40sp", "7%", "900tok", "0.3ep", "25ba"])
STEPS: st.SearchStrategy[Schedule] = st.recursive(
    st.one_of(
        st.builds(Constant, st.sampled_from([0.25, 0.5, 1.0])),
        st.builds(lambda every: StepDecay(every, 0.5), TIMES),
        st.builds(lambda first, after: MultiStep([first, after], 0.5), TIMES, st.just("70%")),
    ),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda time, a, b: Periods([(time, a), ("rest", b)]), TIMES, inner, inner),
        st.builds(lambda a, b: Periods([("until 60%", a), ("rest", b)]), inner, inner),
    ),
    max_leaves=4,
)


@given(STEPS, st.sampled_from([4, "0sp:4 30sp:7"]), st.sampled_from(get_args(LastBatch)))
def test_a_value_in_steps_changes_only_where_a_row_begins(
    shape: Schedule, sizes: str, ends: LastBatch
) -> None:
    horizon = Horizon("300sp", dataset_num_samples=70, tokens_per_sample=16, last_batch=ends)
    try:
        planned = plan(horizon, sizes, schedules={"lr": shape})
    except StrettoError:  # milestones out of order
        return
    rates = [one.values["lr"] for one in planned.batches()]
    moved = {batch for batch in range(1, len(rates)) if rates[batch] != rates[batch - 1]}
    assert moved <= {stage.first.batch for stage in planned.stages if stage.begins}
