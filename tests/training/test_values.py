"""Values of your own: read on the clock, in every loop, file and plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.schedules.strategies import schedules

from stretto import Horizon, plan
from stretto.config.plans import build_plan
from stretto.config.run import RunConfig, dump_run_file, parse_run_file
from stretto.errors import ConfigError, PlanError, ScheduleError, StrettoError, TrainingError
from stretto.report import compare, plan_table
from stretto.run_folder import CLOCK, LEDGER_COLUMNS
from stretto.schedules import Custom, Linear, Periods, Schedule
from stretto.schedules.names import check_value_names
from stretto.training import Callback, Checkpointing, Run, prepare

Make = Callable[..., Any]
FADE = Periods([("until 50%", 0.3), ("rest", Linear(0.1, 0))])


def steps_of(run: Run) -> list[Any]:
    found = []
    while (step := run.begin()) is not None:
        assert run.values == step.values
        found.append((step.timestamp[:7], dict(step.values)))
        run.finish()
    return found


def bound(values: dict[str, Any], sizes: str, rank: int = 0) -> Run:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    run = prepare(range(30), sizes, max_duration="12ep", values=values)
    return run.bind(optimizer, rank=rank, world_size=2)


@given(schedules(), schedules(), st.data())
def test_a_value_is_its_schedule_at_each_step_on_every_rank_after_any_resume(
    one: Schedule, other: Schedule, data: st.DataObject
) -> None:
    values, sizes = {"one": one, "two": [other, 0.5]}, "0ep:8 5ep:11 9ep:5"
    run = bound(values, sizes)
    read, scaled = one.bind(run.horizon), other.bind(run.horizon)
    assert run.values == {"one": read(run.timer.timestamp), "two": scaled(run.timer.timestamp) / 2}
    at = data.draw(st.integers(0, 30))
    found, saved = [], dict[str, Any]()
    while (step := run.begin()) is not None:
        now = step.timestamp
        assert step.values == {"one": read(now), "two": scaled(now) / 2}
        found.append((now[:7], dict(step.values)))
        run.finish()
        if len(found) == at:
            saved = json.loads(json.dumps(run.state_dict()))
    assert steps_of(bound(values, sizes, rank=1)) == found
    again = bound(values, sizes)
    if saved:
        again.load_state_dict(saved)
    assert steps_of(again) == found[at:]


def test_a_run_without_values_has_none(problem: Make) -> None:
    run = prepare(problem().data, 8, max_duration="1ep", optimizer=problem().optimizer)
    step = run.begin()
    assert step is not None
    assert step.values == run.values == {}


def test_a_trainer_writes_them_beside_the_learning_rate(problem: Make, tmp_path: Path) -> None:
    seen = []

    class Look(Callback):
        def on_batch_end(self, run: Run, step: Any) -> None:
            seen.append((run.values["fade"], step.values["fade"]))

    def trainer() -> Any:
        return problem().trainer(
            batch_size="0ep:8 1ep:12",
            values={"fade": FADE, "mixture.code": 0.25},
            callbacks=[Look()],
            checkpoint=Checkpointing("5ba"),
            folder=tmp_path,
            log="1ba",
        )

    first = trainer()
    first.fit()
    expected = [one.values["fade"] for one in first.plan.batches()]
    assert seen == [(value, value) for value in expected]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["fade"] for line in lines] == expected
    assert {line["mixture.code"] for line in lines} == {0.25}
    # No name of a line may be one of a value.
    for name in {*lines[0], *LEDGER_COLUMNS, *CLOCK} - {"fade", "mixture.code"}:
        with pytest.raises(ScheduleError, match="column"):
            check_value_names([name], taken=())
    comparison = compare(first.plan, tmp_path)
    assert comparison.agrees
    assert {"fade", "mixture.code"} <= set(comparison.compared)
    assert not compare(trainer_plan(0.2), tmp_path).agrees

    ledger = (tmp_path / "ledger.csv").read_text()
    again = trainer()
    again.resume(sorted((tmp_path / "checkpoints").iterdir())[0])
    assert not [line for line in again.changes if "values" in line]
    again.fit()

    def untimed(text: str) -> list[list[str]]:
        rows = [line.split(",") for line in text.splitlines()]
        return [[*row[:7], *row[8:]] for row in rows]

    assert untimed((tmp_path / "ledger.csv").read_text()) == untimed(ledger)


def trainer_plan(fade: float) -> Any:
    return plan(
        Horizon("2ep", dataset_num_samples=60), "0ep:8 1ep:12", schedules={"lr": 1.0},
        base={"lr": 0.1}, values={"fade": fade},
    )  # fmt: skip


def test_a_longer_run_scales_them(problem: Make) -> None:
    trainer = problem().trainer(values={"fade": Linear(1, 0, over="1ep")}, scale_schedule=2)
    assert trainer.run.prepared.values == {"fade": Linear(1, 0, over="2ep")}


def test_a_plan_shows_them() -> None:
    planned = plan(Horizon("2ep", dataset_num_samples=50), "0ep:5 1ep:10", values={"fade": FADE})
    assert planned.values_at(0) == {"fade": 0.3}
    assert planned.values_at(14) == {"fade": pytest.approx(0.02)}
    assert "fade" in plan_table(planned)


RUN: dict[str, Any] = {
    "max_duration": "2ep",
    "data": {"target": "my.data:make", "num_samples": 50},
    "batch_size": 10,
}


def test_a_run_file_has_them() -> None:
    values = {"fade": {"Periods": [["until 1ep", 0.3], ["rest", 0.1]]}, "mixture.code": [2, 0.5]}
    config = RunConfig.parse(RUN | {"values": values})
    assert [one.values for one in build_plan(config).batches()] == [
        *[{"fade": 0.3, "mixture.code": 1.0}] * 5, *[{"fade": 0.1, "mixture.code": 1.0}] * 5,
    ]  # fmt: skip
    text = dump_run_file(config)
    assert parse_run_file(text) == config
    changed = parse_run_file(text, overrides=["values.fade=0.7"])
    assert build_plan(changed).values_at(9)["fade"] == 0.7


@pytest.mark.parametrize(
    "values",
    [{"lr": 1}, {"loss": 1}, {"size": 1}, {"a/b": 1}, {"a,b": 1}, {"": 1}, {"1": 1}, {2: 1}],
    ids=repr,
)
def test_a_name_that_is_taken_or_no_word_is_refused(values: Any) -> None:
    with pytest.raises(ScheduleError, match="name a value"):
        plan(Horizon("8ba"), 4, values=values)
    with pytest.raises(StrettoError):
        build_plan(RunConfig.parse(RUN | {"values": values}))


@pytest.mark.parametrize("name", ["momentum", "weight_decay", "weight_decay.0"])
def test_a_name_of_a_hyper_parameter_is_refused(problem: Make, name: str) -> None:
    with pytest.raises(ScheduleError, match="hyper-parameter"):
        problem().trainer(values={name: 1.0})
    with pytest.raises(ScheduleError, match="hyper-parameter"):
        plan(Horizon("8ba"), 4, schedules={"weight_decay": 1, "momentum": 1}, values={name: 1.0})


def test_values_need_names_and_schedules(problem: Make) -> None:
    with pytest.raises(ConfigError, match="a mapping"):
        problem().trainer(values=[1.0])
    with pytest.raises(ScheduleError, match="at least 0"):
        problem().trainer(values={"fade": -1.0})


def test_a_unit_that_the_run_cannot_count_is_refused(problem: Make) -> None:
    with pytest.raises(PlanError, match="token"):
        problem().trainer(values={"fade": Custom(lambda timer: 1.0, reads="tok")}).fit()
    with pytest.raises(StrettoError, match="token"):
        problem().trainer(values={"fade": Linear(over="8tok")}).fit()


def test_a_callback_cannot_log_by_the_name_of_a_value(problem: Make) -> None:
    class Log(Callback):
        def on_batch_end(self, run: Run, step: Any) -> None:
            run.log("fade", 1.0)

    with pytest.raises(TrainingError, match="fade"):
        problem().trainer(values={"fade": FADE}, callbacks=[Log()], log="1ba").fit()
