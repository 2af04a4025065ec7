from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.errors import TrainingError
from stretto.training import Callback, Checkpointing, Evaluation, Loading, Logging

Make = Callable[..., Any]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


class Watch(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_log(self, trainer: Any, record: Any) -> None:
        self.seen.append(("log", trainer.timer.batch))

    def on_evaluation_end(self, trainer: Any, name: str, metrics: Any) -> None:
        self.seen.append(("evaluation", trainer.timer.batch))

    def on_checkpoint(self, trainer: Any, path: Path) -> None:
        self.seen.append(("checkpoint", trainer.timer.batch))


def test_the_last_checkpoint_comes_after_the_last_line(problem: Make, tmp_path: Path) -> None:
    """So that a run that is over stays so: what is cut back to it is whole."""
    run, watch = problem(), Watch()
    settings = {
        "folder": tmp_path,
        "max_duration": "12ba",
        "log": Logging("5ba"),
        "checkpoint": Checkpointing("6ba"),
        "evaluate": Evaluation(run.data, "9ba"),
    }
    run.trainer(callbacks=[watch], **settings).fit()
    assert watch.seen == [
        ("log", 5),
        ("checkpoint", 6),
        ("evaluation", 9),
        ("log", 10),
        ("log", 12),
        ("evaluation", 12),
        ("checkpoint", 12),
    ]
    files = {name: (tmp_path / name).read_text() for name in ("metrics.jsonl", "ledger.csv")}
    watch.seen.clear()
    again = problem().trainer(callbacks=[watch], **settings)
    assert again.resume().name == "checkpoint-000000000092"
    again.fit()
    assert watch.seen == []
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_a_longer_run_goes_on_from_one_that_is_over(problem: Make, tmp_path: Path) -> None:
    settings = {"folder": tmp_path, "checkpoint": Checkpointing()}
    whole = problem()
    whole.trainer(max_duration="2ep").fit()
    problem().trainer(max_duration="1ep", **settings).fit()
    longer = problem()
    trainer = longer.trainer(max_duration="2ep", **settings)
    trainer.resume()
    trainer.fit()
    assert torch.equal(longer.weights(), whole.weights())


def test_going_back_and_on_again_logs_and_saves_again(problem: Make, tmp_path: Path) -> None:
    run, watch = problem(), Watch()
    trainer = run.trainer(
        folder=tmp_path,
        max_duration="4ba",
        log=Logging("3ba"),
        checkpoint=Checkpointing("2ba"),
        callbacks=[watch],
    )
    trainer.fit()
    once = list(watch.seen)
    trainer.resume(tmp_path / "checkpoints" / "checkpoint-000000000016")
    trainer.fit()
    assert watch.seen == [*once, ("log", 3), ("log", 4), ("checkpoint", 4)]


def test_a_checkpoint_that_cannot_be_written_is_tried_again(problem: Make, tmp_path: Path) -> None:
    class Unsaveable(Callback):
        state: Any = None

        def on_checkpoint(self, trainer: Any, path: Path) -> None:
            raise AssertionError

        def on_fit_end(self, trainer: Any) -> None:
            self.state = {}

        def state_dict(self) -> Any:
            return {1, 2} if self.state is None else self.state

    trainer = problem().trainer(
        folder=tmp_path, checkpoint=Checkpointing("20ba"), callbacks=[Unsaveable()]
    )
    with pytest.warns(RuntimeWarning, match=r"its records are not JSON .*; training goes on"):
        trainer.fit()
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(AssertionError):  # written now, so it is told
        trainer.fit()
    assert names(tmp_path) == ["checkpoint-000000000120"]


def test_the_latest_of_no_folder_is_refused(problem: Make) -> None:
    with pytest.raises(TrainingError, match="the run has no folder"):
        problem().trainer().resume()


def test_state_finds_its_callback_wherever_that_stands(problem: Make, tmp_path: Path) -> None:
    class Memory(Callback):
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: Any) -> None:
            self.value = state["value"]

    settings = {"folder": tmp_path, "checkpoint": Checkpointing()}
    problem().trainer(callbacks=[Memory(1), Memory(2)], **settings).fit()
    first, second = Memory(0), Memory(0)
    problem().trainer(callbacks=[Callback(), first, second], **settings).resume()
    assert (first.value, second.value) == (1, 2)


@pytest.mark.parametrize("last_batch", ["keep", "drop", "carry"])
def test_every_epoch_ends_once(problem: Make, last_batch: Any) -> None:
    """Also where one batch ends several, and where the end of the run does."""

    class Epochs(Callback):
        count = 0

        def on_epoch_end(self, trainer: Any) -> None:
            self.count += 1

    epochs = Epochs()
    size = {"keep": 50, "drop": 13, "carry": 50}[last_batch]
    trainer = problem(num_samples=20).trainer(
        max_duration="5ep",
        batch_size=size,
        loading=Loading(last_batch=last_batch),
        callbacks=[epochs],
    )
    trainer.fit()
    assert epochs.count == trainer.timer.epoch == 5
