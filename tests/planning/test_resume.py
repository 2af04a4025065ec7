"""A run that is resumed with other batch sizes is bound at the clock of the resume."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, reject
from hypothesis import strategies as st
from tests.planning.test_own_units import NUM_SAMPLES, TOKENS, Model, policies, schedules

import stretto
from stretto import Timestamp
from stretto.batching import PolicyLike
from stretto.data import DataSpec
from stretto.errors import BatchSizeError, ScheduleError
from stretto.schedules import (
    Constant,
    Cosine,
    Periods,
    Schedule,
    StepDecay,
)
from stretto.timing import LastBatch

Data = list(range(NUM_SAMPLES))


def run_of(
    policy: PolicyLike,
    length: str,
    schedule: Schedule | None = None,
    *,
    last_batch: LastBatch = "keep",
    every: dict[str, str] | None = None,
) -> stretto.Run:
    """Return a run with a learning rate of 1."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    return stretto.prepare(
        DataSpec(Data, tokens_per_sample=TOKENS),
        policy,
        max_duration=length,
        optimizer=torch.optim.SGD([parameter], lr=1.0),
        schedules={} if schedule is None else {"lr": schedule},
        loading={"last_batch": last_batch},
        every=every,
    )


def steps_of(run: stretto.Run, count: int | None = None) -> list[tuple[Timestamp, int, float]]:
    """Run up to `count` steps; return the clock, the decided size and the rate of each."""
    found: list[tuple[Timestamp, int, float]] = []
    while count is None or len(found) < count:
        step = run.begin()
        if step is None:
            break
        rate = run.optimizers[0].param_groups[0]["lr"]
        found.append((step.timestamp, step.batch_size, rate))
        run.finish(seconds=0.0)
    return found


lengths_of_runs = st.sampled_from(["3ep", "2.5ep", "40ba", "170sp", "500tok"])
modes: st.SearchStrategy[LastBatch] = st.sampled_from(["keep", "drop", "carry"])


@given(schedules(), st.tuples(lengths_of_runs, modes), policies(), policies(), st.integers(1, 20))
@example(StepDecay("4ba", 0.5), ("3ep", "keep"), 2, 10, 12)
@example(StepDecay("40sp", 0.5), ("40ba", "keep"), 10, 2, 12)
@example(Constant(warmup="10ba"), ("3ep", "keep"), 2, 20, 12)
@example(Periods([("10ba", 1.0), ("rest", Cosine())]), ("170sp", "carry"), 2, 30, 12)
def test_after_a_resume_schedules_follow_the_clock(
    schedule: Schedule,
    run_length: tuple[str, LastBatch],
    first: PolicyLike,
    then: PolicyLike,
    count: int,
) -> None:
    length, last_batch = run_length
    try:
        run = run_of(first, length, schedule, last_batch=last_batch)
        before = steps_of(run, count)
        again = run_of(then, length, schedule, last_batch=last_batch)
    except (BatchSizeError, ScheduleError):  # longer than the run, or out of order
        reject()
    try:
        again.load_state_dict(run.state_dict())
        after = steps_of(again)
    except (BatchSizeError, ScheduleError):  # longer than the run that it has become
        reject()
    batches = before + after
    clock, now = [now for now, *_ in batches], again.timer.timestamp
    expected = Model(clock, now, again.horizon.max_duration).values(schedule)
    assert [rate for *_, rate in after] == pytest.approx(
        expected[len(before) :], rel=1e-9, abs=1e-9
    )
    planned = again.plan
    assert planned is not None
    assert [(one.timestamp[:7], one.decided) for one in planned.batches()] == [
        (now[:7], size) for now, size, _ in batches
    ]
    rates = [one.values["lr"] for one in planned.batches()]
    assert rates == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert planned.end is not None
    assert planned.end[:7] == again.timer.timestamp[:7]
    assert again.num_steps.exact == len(batches)
