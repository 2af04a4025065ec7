"""A run in a loop that is not stretto's, as such a loop would use it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler

from stretto.batching import NO_SIGNALS, NoiseScale, SquareRootRule
from stretto.data import DataSpec
from stretto.errors import CheckpointError, ConfigError, PlanError, ScheduleError, TrainingError
from stretto.integrations import ClockScheduler, StepMeter
from stretto.integrations.counts import steps_left
from stretto.noise import NoiseSums
from stretto.ordering import SampleOrder
from stretto.planning import plan
from stretto.report import plan_table
from stretto.schedules import Cosine, Linear
from stretto.settings import Loading
from stretto.timing import Horizon, Timestamp
from stretto.training import Run, prepare

N, SEED, SIZES = 60, 3, "0sp:5 23sp:9 80sp:14"  # grows inside both epochs
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=GENERATOR, dtype=torch.float64)
Y = X.sum(1, keepdim=True)
DATA = torch.utils.data.TensorDataset(X, Y, torch.arange(N))
SCHEDULES = {"lr": Cosine(end=0.1, warmup="30sp", warmup_start=0)}
ORDER = SampleOrder(N, SEED)


def make(data: Any = DATA, **changes: Any) -> Run:
    settings: dict[str, Any] = {
        "batch_size": SIZES,
        "max_duration": "2ep",
        "micro_batch_size": 4,
        "schedules": SCHEDULES,
        "rule": SquareRootRule(5),
        "loading": Loading(seed=SEED),
        "every": {"evaluate": "25sp"},
    } | changes
    return prepare(data, settings.pop("batch_size"), **settings)


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


PLAN = plan(
    Horizon("2ep", dataset_num_samples=N),
    SIZES,
    schedules=SCHEDULES,
    base={"lr": 0.05},
    rule=SquareRootRule(5),
)


def ids_of(batch: Any) -> list[tuple[int, int]]:
    """The place in the plan and the id of each batch."""
    start, size = batch.timestamp.sample, batch.size
    return [ORDER[position] for position in range(start, start + size)]  # type: ignore[misc]


def train(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, *, stop: int | None = None
) -> list[dict[str, Any]]:
    """Take all steps, or those before step `stop`; return what each saw."""
    seen: list[dict[str, Any]] = []
    while not run.is_done:
        for step in run.steps():
            if step.timestamp.batch == stop:
                return seen
            ids: list[int] = []
            for micro in step:
                x, y, i = micro.batch
                (micro.weight * functional.mse_loss(model(x), y)).backward()
                ids += i[: micro.num_samples].tolist()
            optimizer.step()
            optimizer.zero_grad()
            record = {"ids": ids, "lr": optimizer.param_groups[0]["lr"]}
            seen.append(record | {"due": sorted(run.finish())})
    return seen


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.fixture(scope="module")
def whole() -> tuple[list[dict[str, Any]], torch.Tensor]:
    """What a run sees that nothing interrupts."""
    model, optimizer = make_model()
    return train(make().bind(optimizer), model, optimizer), flat(model)


def test_a_loop_takes_the_batches_and_rates_of_the_plan(
    whole: tuple[list[dict[str, Any]], torch.Tensor],
) -> None:
    seen, weights = whole
    model, optimizer = make_model()
    for batch in PLAN.batches():
        optimizer.param_groups[0]["lr"] = batch.values["lr"]
        ids = ids_of(batch)
        functional.mse_loss(model(X[ids]), Y[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [sorted(one["ids"]) for one in seen] == [sorted(ids_of(b)) for b in PLAN.batches()]
    assert [one["lr"] for one in seen] == [batch.values["lr"] for batch in PLAN.batches()]
    torch.testing.assert_close(weights, flat(model), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("stop", [1, 4, 7, 8, 11])
@pytest.mark.parametrize("micro_batch_size", [4, 3])
def test_a_resumed_run_trains_each_sample_once(
    stop: int, micro_batch_size: int, whole: tuple[list[dict[str, Any]], torch.Tensor]
) -> None:
    """The step that is open when the state is saved is trained anew."""
    seen, weights = whole
    model, optimizer = make_model()
    run = make().bind(optimizer)
    before = train(run, model, optimizer, stop=stop)
    state = json.loads(json.dumps(run.state_dict()))
    assert state["open"]
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    model, optimizer = make_model()
    run = make().bind(optimizer, micro_batch_size=micro_batch_size)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    run.load_state_dict(state)
    after = train(run, model, optimizer)
    assert before + after == seen
    torch.testing.assert_close(flat(model), weights, rtol=1e-12, atol=1e-14)


def test_a_state_that_comes_before_the_ranks_are_known_waits_for_them() -> None:
    model, optimizer = make_model()
    run = make().bind(optimizer)
    train(run, model, optimizer, stop=5)
    late = make()
    late.load_state_dict(run.state_dict())
    assert late.bind(make_model()[1]).timer.batch == 5


def test_reading_the_state_changes_nothing(
    whole: tuple[list[dict[str, Any]], torch.Tensor],
) -> None:
    run = make().bind(make_model()[1])
    seen, opens = [], []
    while not run.is_done:
        for step in run.steps():
            opens.append(run.state_dict()["open"])
            seen.append(sorted(i for micro in step for i in micro.batch[2].tolist()))
            run.finish()
            opens.append(run.state_dict()["open"])
    assert seen == [sorted(one["ids"]) for one in whole[0]]
    assert opens == [True, False] * len(seen)


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(CheckpointError, match="version"):
        make().load_state_dict({"version": 9})


def test_a_copy_of_a_step_finishes_it_once() -> None:
    run = make(every={"evaluate": "5sp"}).bind(make_model()[1])
    step = run.begin()
    assert run.finish(step=copy.deepcopy(step)) == {"evaluate"}
    assert run.finish(step=step) == run.finish() == {"evaluate"}
    assert run.timer.batch == 1
    run.begin()
    with pytest.raises(TrainingError, match="another"):
        run.finish(step=step)


@pytest.mark.parametrize("view", ["steps", "micro_batches"])
def test_a_framework_that_fetches_ahead_is_noticed(view: str) -> None:
    elements: Iterator[Any] = getattr(make().bind(make_model()[1]), view)()
    with pytest.raises(TrainingError, match="prefetching"):
        list(elements)


def test_a_step_that_failed_comes_anew_in_the_next_iterator() -> None:
    run = make().bind(make_model()[1])
    first = next(run.steps())
    assert next(run.steps()) is first


def test_micro_batches_say_where_a_step_begins_and_ends() -> None:
    run = make(batch_size=9, max_duration="9sp", schedules={}).bind(make_model()[1])
    views = []
    for view in run.micro_batches():
        views.append((len(view.batch[0]), round(view.weight, 9), view.is_first, view.is_last))
        if view.is_last:
            run.finish()
    third = round(1 / 3, 9)
    assert views == [(3, third, True, False), (3, third, False, False), (3, third, False, True)]


def test_the_clock_is_read_as_fractions_and_for_a_log_line() -> None:
    model, optimizer = make_model()
    run = make().bind(optimizer)
    train(run, model, optimizer, stop=7)
    now = run.timer.timestamp
    line = run.log_values()
    assert (line["dur"], line["ep"]) == (now.sample / (2 * N), now.sample / N)
    assert steps_left(run).exact == (PLAN.num_batches or 0) - 7
    assert line["batch_size"] == run.step.batch_size  # type: ignore[union-attr]
    assert (line["sp"], line["ba"], line["lr"]) == (
        now.sample,
        7,
        optimizer.param_groups[0]["lr"],
    )


# --- base values


def rates(run: Run) -> list[float]:
    step = run.begin()
    assert step is not None
    return [group["lr"] for group in run.hyperparameters.optimizer.param_groups]


def test_binding_again_after_a_warm_up_from_zero_keeps_the_base() -> None:
    optimizer = make_model()[1]
    run = make(rule=None).bind(optimizer)
    assert rates(run) == [0.0]
    run.finish()
    second = rates(run.bind(optimizer)), rates_of_second_step(run)
    fresh = make(rule=None).bind(make_model()[1])
    assert second == (rates(fresh), rates_of_second_step(fresh))


def rates_of_second_step(run: Run) -> list[float]:
    run.finish()
    return rates(run)


def test_a_copy_of_a_scheduled_optimizer_starts_from_the_base_of_the_run() -> None:
    model, optimizer = make_model()
    run = make(rule=None).bind(optimizer)
    train(run, model, optimizer, stop=3)
    other = make_model()[1]
    other.load_state_dict(optimizer.state_dict())
    run.bind(other)
    assert run.hyperparameters.base == {"lr": 0.05}


def test_an_optimizer_whose_state_was_loaded_too_early_brings_its_initial_rate() -> None:
    model, optimizer = make_model()
    train(make(rule=None).bind(optimizer), model, optimizer, stop=3)
    other = make_model()[1]
    other.load_state_dict(optimizer.state_dict())
    assert make().bind(other).hyperparameters.base == {"lr": 0.05}


def test_base_values_can_be_given() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "name": name} for name in ("a", "b")]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    run = make(schedules={}, rule=None).bind(optimizer, base={"lr": 0.5, "lr@b": 0.25})
    assert rates(run) == [0.5, 0.25]
    with pytest.raises(ScheduleError, match="parameter"):
        run.bind(make_model()[1])


def test_several_optimizers_are_set_together() -> None:
    first, second = make_model()[1], torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    run = make(schedules={"lr": Linear(1, 0)}, rule=None).bind([first, second])
    run.begin()
    rates_of_second_step(run)
    factor = 1 - 5 / (2 * N)
    assert [one.param_groups[0]["lr"] for one in (first, second)] == [0.05 * factor, 2 * factor]


def test_the_scheduler_reports_what_the_run_sets() -> None:
    optimizer = make_model()[1]
    run = make(schedules={"lr": Linear(1, 0)}, rule=None).bind(optimizer)
    scheduler = ClockScheduler(optimizer, run.timer)
    assert isinstance(scheduler, LRScheduler)
    for number, expected in enumerate([0.05, 0.05 * (1 - 5 / 120)]):
        run.begin()
        scheduler.step()
        assert scheduler.get_last_lr() == [expected]
        assert scheduler.last_epoch == number
        run.finish()
    scheduler.load_state_dict(scheduler.state_dict())
    assert (scheduler.base_lrs, scheduler.get_last_lr()) == ([0.05], [0.05 * (1 - 5 / 120)])


def test_a_run_that_is_not_bound_says_so() -> None:
    with pytest.raises(TrainingError, match="optimizers"):
        make().begin()
    assert steps_left(make(), Timestamp()).exact == PLAN.num_batches


# --- weights and noise


@pytest.mark.parametrize("size", [4, 12], ids=["one micro-batch", "several"])
def test_a_meter_measures_the_noise_of_a_step(size: int) -> None:
    model, optimizer = make_model()
    run = make(batch_size=NoiseScale(size, 64)).bind(optimizer)
    meter, step = StepMeter(run, model), run.begin()
    assert step is not None
    passes = meter.passes(step)
    squares = []
    for micro in passes:
        with micro.watch:
            loss = functional.mse_loss(model(micro.batch[0]), micro.batch[1])
            (micro.weight * loss).backward()
        alone = copy.deepcopy(model)
        alone.zero_grad()
        functional.mse_loss(alone(micro.batch[0]), micro.batch[1]).backward()
        squares.append(square(alone))
    sizes = [micro.num_samples for micro in passes]
    expected = NoiseSums.of(squares, sizes, square(model)).signals()
    signals = meter.signals()
    assert signals.noise_numerator == pytest.approx(expected.noise_numerator, rel=1e-9)
    assert signals.noise_denominator == pytest.approx(expected.noise_denominator, rel=1e-9)
    assert signals.num_samples == size
    assert meter.signals() == NO_SIGNALS  # nothing new was measured


def square(model: nn.Module) -> float:
    return sum(float(one.grad.square().sum()) for one in model.parameters() if one.grad is not None)


# --- data


def test_rows_need_not_be_samples() -> None:
    """Packed rows and pairs: the samples are those that were collated."""
    spec = DataSpec(list(range(40)), get_num_samples_in_batch=lambda _: None)
    loading = Loading(collate_fn=lambda rows: torch.tensor([*rows, *rows]), shuffle=False)
    run = prepare(spec, "0sp:4 20sp:10", max_duration="1ep", micro_batch_size=3, loading=loading)
    rows = []
    for step in run.bind(make_model()[1]).steps():
        rows.append([len(micro.batch) for micro in step])
        run.finish()
    assert rows == [[4, 4]] * 5 + [[6, 6, 4, 4]] * 2
    assert run.timer.sample == 40


class Stream:
    """Batches of 6 samples, 20 in an epoch, whose number nobody knows."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(20).split(6))


def test_a_stream_of_unknown_length_is_read_epoch_by_epoch() -> None:
    run = prepare(Stream(), "0sp:3 26sp:8", max_duration="60sp", micro_batch_size=4)
    run.bind(make_model()[1])
    epochs = []
    while not run.is_done:
        seen: list[list[int]] = []
        for step in run.steps():
            seen.append([int(i) for micro in step for i in micro.batch])
            run.finish()
        epochs.append(seen)
    assert [[i for one in seen for i in one] for seen in epochs] == [list(range(20))] * 3
    assert [[len(one) for one in seen] for seen in epochs] == [
        [3] * 6 + [2],
        [3] * 2 + [8, 6],
        [8, 8, 4],
    ]
    assert run.plan is not None
    assert not run.plan.is_exact
    assert steps_left(run, Timestamp()) == (None, False)
    assert run.timer.batch == 14


def test_data_can_be_read_without_optimizers() -> None:
    run = make(schedules=None, rule=None).bind([])
    assert (
        sum(step.num_samples for step in iter(run.begin, None) if run.finish() is not None) == 2 * N
    )
    assert run.log_values()["sp"] == 2 * N
    assert run.plan is not None
    with pytest.raises(ScheduleError, match="no optimizers"):
        make().bind([])


@pytest.mark.parametrize("wrong", ["adam", 3, None, [nn.Linear(1, 1)], torch.ones(2)])
def test_what_is_no_optimizer_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="an optimizer"):
        make().bind(wrong)


def test_a_run_is_planned_before_it_has_optimizers() -> None:
    run = make()
    early = run.plan
    assert early is not None
    assert run.why_not_planned is None
    late = run.bind(make_model()[1]).plan
    assert late is not None
    assert late.base == {"lr": 0.05}
    assert [one.size for one in early.batches()] == [one.size for one in late.batches()]
    values = [(early.values_at(at)["lr"], late.values_at(at)["lr"]) for at in range(10)]
    assert [0.05 * factor for factor, _ in values] == pytest.approx([value for _, value in values])


def test_a_run_without_a_plan_says_why() -> None:
    run = prepare(DATA, NoiseScale(4, 16), max_duration="2ep")
    assert run.plan is None
    assert run.why_not_planned == "they follow what the run measures"
    with pytest.raises(PlanError, match="why_not_planned"):
        plan_table(run.plan)  # type: ignore[arg-type]


def test_parameter_groups_that_are_added_during_the_run_are_scheduled() -> None:
    """As a gradual unfreezing adds them."""
    _, optimizer = make_model()
    late = nn.Parameter(torch.ones(1))
    run = make().bind(optimizer)
    bound = run.hyperparameters.bound["lr"][1]
    for step in run:
        if step.timestamp.batch > 2:
            expected = bound(step.timestamp) * SquareRootRule(5)(step.batch_size)
            first, second = (group["lr"] for group in optimizer.param_groups)
            assert first == pytest.approx(0.05 * expected)
            assert second == pytest.approx(0.01 * expected)
        if step.timestamp.batch == 2:
            optimizer.add_param_group({"params": [late], "lr": 0.01})
        run.finish()
