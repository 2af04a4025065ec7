"""A run that is resumed with other batch sizes is bound at the clock of the resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given, reject
from hypothesis import strategies as st
from tests.planning.test_own_units import NUM_SAMPLES, TOKENS, Model, policies, schedules

import stretto
from stretto import Horizon, NoiseScale, Timestamp
from stretto.batching import BatchSizePolicy, PiecewiseConstant, PolicyLike, SizeFunction
from stretto.data import DataSpec
from stretto.errors import BatchSizeError, ConversionError, ScheduleError, StrettoError
from stretto.integrations.counts import steps_left
from stretto.planning import bind_run, resumed
from stretto.planning.sizes import Had
from stretto.schedules import Constant, Cosine, MultiStep, Periods, Schedule, StepDecay
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
        run.optimizers[0].step()
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
    assert steps_left(again, Timestamp()).exact == len(batches)


@pytest.mark.parametrize(
    "schedule",
    [Periods([("50ba", 1.0), ("rest", 0.1)]), Constant(warmup="30ba"), Cosine(warmup="30ba")],
)
def test_a_schedule_too_long_for_the_new_sizes_alone_fits_the_resumed_run(schedule: Any) -> None:
    """From batch 0 on there would be 20 batches; the run that is resumed has 68."""
    run = run_of(5, "500sp", schedule)
    before = steps_of(run, 60)
    again = run_of(25, "500sp", schedule)
    again.load_state_dict(run.state_dict())
    whole = run_of(PiecewiseConstant("0ba:5 60ba:25"), "500sp", schedule)
    assert before + steps_of(again) == steps_of(whole)


@pytest.mark.parametrize("then", [NoiseScale(4, 64), SizeFunction(lambda *_: 5, planned=False)])
def test_places_of_the_past_are_known_though_later_sizes_are_not(then: BatchSizePolicy) -> None:
    run = run_of(2, "3ep", Cosine(warmup="4ba"))
    before = steps_of(run, 12)
    again = run_of(then, "3ep", Cosine(warmup="4ba"))
    with pytest.raises(ConversionError, match="batches and samples"):
        run_of(then, "3ep", Cosine(warmup="4ba")).begin()
    again.load_state_dict(run.state_dict())
    after = steps_of(again)
    clock = [now for now, *_ in before + after]
    model = Model(clock, again.timer.timestamp, again.horizon.max_duration)
    expected = model.values(Cosine(warmup="4ba"))[len(before) :]
    assert [rate for *_, rate in after] == pytest.approx(expected)
    assert again.plan is None


def test_any_policy_may_come_before() -> None:
    adaptive = NoiseScale(2, 64)
    run = run_of(adaptive, "3ep", StepDecay("4ba", 0.5))
    before = steps_of(run, 9)
    again = run_of(10, "3ep", MultiStep(["5ba", "1ep"], 0.5))
    again.load_state_dict(run.state_dict())
    after = steps_of(again)
    clock = [now for now, *_ in before + after]
    model = Model(clock, again.timer.timestamp, again.horizon.max_duration)
    expected = model.values(MultiStep(["5ba", "1ep"], 0.5))
    assert [rate for *_, rate in after] == expected[len(before) :]


def test_a_schedule_that_does_not_fit_is_refused_before_the_first_step() -> None:
    run = run_of(50, "180sp", Constant(warmup="30ba"))
    with pytest.raises(ScheduleError, match="warmup"):
        run.begin()
    with pytest.raises(ScheduleError, match="warmup"):
        run_of(50, "180sp", Constant(warmup="30ba")).plan  # noqa: B018
    with pytest.raises(ScheduleError, match="warmup"):  # it does not fit whatever the sizes are
        run_of(50, "180sp", Constant(warmup="200sp"))


def test_a_state_without_past_sizes_is_enough_if_the_plan_leads_there() -> None:
    run = run_of("0ba:2 5ba:6", "3ep", Cosine(warmup="7ba"))
    steps_of(run, 9)
    state: dict[str, Any] = copy.deepcopy(run.state_dict())
    del state["loader"]["past"]
    again = run_of("0ba:2 5ba:6", "3ep", Cosine(warmup="7ba"))
    again.load_state_dict(state)
    assert steps_of(again) == steps_of(run)
    other = run_of(10, "3ep", Constant(warmup="7ba"))
    other.load_state_dict(state)
    assert other.plan is None
    assert steps_of(other)
    with pytest.raises(ConversionError, match="checkpoint"):
        run_of(10, "3ep", Cosine(warmup="7ba")).load_state_dict(state)


@pytest.mark.parametrize("past", [[], [[1, 2]], [[0, 2], [0, 3]], [[0, 0]], [[0]], 7, [["0", 2]]])
def test_damaged_past_sizes_are_refused(past: object) -> None:
    run = run_of(2, "3ep")
    steps_of(run, 3)
    state: dict[str, Any] = copy.deepcopy(run.state_dict())
    state["loader"]["past"] = past
    with pytest.raises(StrettoError, match="damaged"):
        run_of(2, "3ep").load_state_dict(state)


def test_a_second_resume_and_a_new_start_are_right() -> None:
    run = run_of(2, "3ep", StepDecay("4ba", 0.5))
    steps_of(run, 9)
    second = run_of(7, "3ep", StepDecay("4ba", 0.5))
    second.load_state_dict(run.state_dict())
    steps_of(second, 5)
    third = run_of(3, "3ep", StepDecay("4ba", 0.5))
    third.load_state_dict(second.state_dict())
    planned = third.plan
    assert planned is not None
    assert [(one.size, one.batches) for one in planned.sizes.stages][:2] == [(2, 9), (7, 5)]
    assert [rate for *_, rate in steps_of(third, 3)] == [0.125, 0.125, 0.0625]
    third.bind(third.optimizers[0])
    assert third.plan is not None
    assert [one.size for one in third.plan.sizes.stages] == [3]


def test_triggers_in_another_unit_count_on() -> None:
    run = run_of(2, "3ep", every={"evaluate": "5ba", "save": "25sp"})
    due: list[tuple[int, str]] = []
    for _ in range(12):
        run.begin()
        run.optimizers[0].step()
        due += [(run.timer.batch, name) for name in run.finish()]
    again = run_of(10, "3ep", every={"evaluate": "5ba", "save": "25sp"})
    again.load_state_dict(run.state_dict())
    while again.begin() is not None:
        again.optimizers[0].step()
        due += [(again.timer.batch, name) for name in again.finish()]
    assert [batch for batch, name in due if name == "evaluate"] == [5, 10, 15, 20, 25]
    planned = again.plan
    assert planned is not None
    for event in planned.events:
        batches = [batch for batch, name in due if name == event.name]
        assert (event.count, [one.batch for one in event.first]) == (len(batches), batches[:5])


def test_a_resumed_plan_takes_no_more_than_the_past_and_the_policy() -> None:
    run = bind_run(Horizon("100sp"), PiecewiseConstant("0ba:20 3ba:5"))
    now = Timestamp(batch=6, sample=60, sample_in_epoch=60)
    again = resumed(run, now, [Had(0, 10)], {})
    assert again.sizes is not None
    assert [(one.size, one.batches) for one in again.sizes.stages] == [(10, 6), (5, 8)]
    assert again.policy == run.policy


@pytest.mark.parametrize("lengths", [None, [8] * NUM_SAMPLES])
def test_a_run_of_one_size_is_one_stage_however_often_it_is_resumed(lengths: Any) -> None:
    def made() -> stretto.StepLoader:
        data = DataSpec(Data, lengths=lengths)
        return stretto.StepLoader(data, 4, max_duration="3ep", loading={"last_batch": "drop"})

    loader = made()
    for stop in (3, 1, 15, 2):
        for _ in range(stop):
            loader.finish(next(loader), seconds=0.0)
        state, loader = loader.state_dict(), made()
        loader.load_state_dict(state)
    assert loader.prepared.planned_sizes().stages == made().prepared.planned_sizes().stages


def test_a_record_without_places_is_read() -> None:
    """Checkpoints of earlier versions say only which size began at which batch."""
    sizes, length = "0ba:20 4ba:15 9ba:24", "4ep"
    run = run_of(sizes, length, Cosine(warmup="7ba"), last_batch="drop")
    before = steps_of(run, 10)
    state: dict[str, Any] = copy.deepcopy(run.state_dict())
    state["loader"]["past"] = [one[:2] for one in state["loader"]["past"]]
    again = run_of(18, length, Cosine(warmup="7ba"), last_batch="drop")
    again.load_state_dict(state)
    after = steps_of(again)
    assert again.plan is not None
    planned = [(one.timestamp[:7], one.decided) for one in again.plan.batches()]
    assert planned == [(now[:7], size) for now, size, _ in before + after]
