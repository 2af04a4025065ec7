"""The checkpoint of the best evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.errors import ConfigError, TrainingError
from stretto.training import Callback, Checkpointing, Evaluation
from stretto.training.evaluate import Best

Make = Callable[..., Any]


def metric(values: dict[int, float]) -> tuple[Callback, Any]:
    """An evaluation whose metric is what `values` says for the batch."""

    class Clock(Callback):
        batch = 0

        def on_batch_end(self, run: Any, step: Any) -> None:
            self.batch = run.timer.batch

    clock = Clock()

    def measure(model: Any, batch: Any) -> Any:
        return torch.tensor(values[clock.batch])

    return clock, measure


def samples(folder: Path) -> list[int]:
    return sorted(int(path.name[-12:]) for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(("mode", "best"), [("min", 16), ("max", 32)])
def test_the_best_stays_besides_the_newest(
    problem: Make, tmp_path: Path, mode: Any, best: int
) -> None:
    run = problem()
    clock, measure = metric({2: 1.0, 4: 5.0, 6: 3.0, 8: math.nan})
    trainer = run.trainer(
        callbacks=[clock],
        folder=tmp_path,
        max_duration="8ba",
        batch_size=8,
        evaluate=Evaluation(run.data, "2ba", metrics={"score": measure}),
        checkpoint=Checkpointing("3ba", keep=1, monitor="validation/score", mode=mode),
    )
    trainer.fit()
    assert samples(tmp_path) == [best, 60]


def test_a_look_in_the_last_batch_takes_no_evaluation_away(problem: Make, tmp_path: Path) -> None:
    class Look(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            run.evaluate()

    run = problem()
    clock, measure = metric({1: 0.1, 2: 0.2, 3: 2.0, 4: 1.0})
    trainer = run.trainer(
        callbacks=[clock, Look()],
        folder=tmp_path,
        max_duration="4ba",
        evaluate=Evaluation(run.data, "3ba", metrics={"score": measure}),
        checkpoint=Checkpointing("3ba", monitor="validation/score"),
    )
    trainer.fit()
    assert trainer.best is not None
    assert (trainer.best.value, trainer.best.path.name) == (1.0, "checkpoint-000000000032")


def test_what_was_best_survives_a_resume(problem: Make, tmp_path: Path) -> None:
    values = {2: 1.0, 4: 5.0, 6: 3.0, 8: 2.0}

    def trainer(run: Any, until: str) -> Any:
        clock, measure = metric(values)
        return run.trainer(
            callbacks=[clock],
            folder=tmp_path,
            max_duration=until,
            evaluate=Evaluation(run.data, "2ba", metrics={"score": measure}),
            checkpoint=Checkpointing("3ba", keep=1, monitor="validation/score"),
        )

    trainer(problem(), "4ba").fit()
    second = trainer(problem(), "8ba")
    second.resume()
    second.fit()
    assert samples(tmp_path) == [16, 60]


def test_a_metric_that_nobody_measures_is_refused(problem: Make, tmp_path: Path) -> None:
    run = problem()
    with pytest.raises(TrainingError, match="monitor"):
        run.trainer(
            folder=tmp_path,
            evaluate=Evaluation(run.data, name="test"),
            checkpoint=Checkpointing(monitor="loss"),
        )
    with pytest.raises(TrainingError, match="evaluate"):
        problem().trainer(folder=tmp_path, checkpoint=Checkpointing(monitor="loss"))
    with pytest.raises(ConfigError, match="min"):
        Checkpointing(mode="least")  # type: ignore[arg-type]


def test_a_best_that_could_not_be_written_does_not_cost_the_one_before() -> None:
    best = Best(Checkpointing(monitor="validation/loss"), [Evaluation([1.0])])
    assert best.is_beaten({"validation/loss": 2.0}, 10)
    best.confirm(10)
    assert best.is_beaten({"validation/loss": 1.0}, 20)
    assert [path.name[-2:] for path in best.paths(Path())] == ["10", "20"]
    assert not best.is_beaten({"validation/loss": 1.0}, 30)
    best.confirm(20)
    assert [path.name[-2:] for path in best.paths(Path())] == ["20"]


def test_a_best_that_was_never_written_is_not_taken_for_one_after_a_resume() -> None:
    settings, evaluations = Checkpointing(monitor="validation/loss"), [Evaluation([1.0])]
    best = Best(settings, evaluations)
    assert best.is_beaten({"validation/loss": 2.0}, 10)
    best.confirm(10)
    assert best.is_beaten({"validation/loss": 1.0}, 20)
    resumed = Best(settings, evaluations)
    resumed.load_state_dict(best.state_dict())
    assert [path.name[-2:] for path in resumed.paths(Path())] == ["10", "20"]


def test_a_resume_from_before_the_first_best_forgets_it(problem: Make, tmp_path: Path) -> None:
    run = problem()
    trainer = run.trainer(
        folder=tmp_path,
        max_duration="4ba",
        evaluate=Evaluation(run.data, "2ba"),
        checkpoint=Checkpointing("1ba", keep=9, monitor="validation/loss"),
    )
    trainer.fit()
    assert trainer._loop.evaluations.best.sample is not None
    trainer.resume(tmp_path / "checkpoints" / "checkpoint-000000000008")
    assert trainer._loop.evaluations.best.sample is None
    assert trainer._loop.evaluations.best.value == math.inf


@pytest.mark.parametrize("key", ["value", "sample", "kept"])
def test_a_best_value_of_another_type_is_not_taken(key: str) -> None:
    evaluation = Evaluation([torch.zeros(1)], metrics={"score": lambda model, batch: batch})
    best = Best(Checkpointing(monitor="validation/score"), [evaluation])
    assert best.is_beaten({"validation/score": 1.0}, 8)
    state = best.state_dict()
    others: list[Any] = ["x", [], {}, True]
    for value in others:
        with pytest.raises((TypeError, ValueError)):
            best.load_state_dict({**state, key: value})
