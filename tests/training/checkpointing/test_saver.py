from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.errors import CheckpointError, TrainingError
from stretto.training import Callback, Checkpointing, Evaluation, Loading, Logging
from stretto.training.checkpointing import saver

Make = Callable[..., Any]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


class Watch(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_log(self, run: Any, record: Any) -> None:
        self.seen.append(("log", run.timer.batch))

    def on_evaluation_end(self, run: Any, name: str, metrics: Any) -> None:
        self.seen.append(("evaluation", run.timer.batch))

    def on_checkpoint(self, run: Any, path: Path) -> None:
        # Told when it is whole, which may be batches later.
        self.seen.append(("checkpoint", -(-int(path.name[-12:]) // 8)))

    @property
    def in_order(self) -> list[tuple[str, int]]:
        return sorted(self.seen, key=lambda one: one[1])


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
    assert watch.in_order == [
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
    once = watch.in_order
    trainer.resume(tmp_path / "checkpoints" / "checkpoint-000000000016")
    trainer.fit()
    again = [("log", 3), ("log", 4), ("checkpoint", 4)]
    assert watch.in_order == sorted([*once, *again], key=lambda one: one[1])
    # What was saved the first time is set aside, not overwritten and not taken for the newest.
    assert names(tmp_path) == [
        "checkpoint-000000000016",
        "checkpoint-000000000032",
        "checkpoint-000000000032.old1",
    ]


def test_a_checkpoint_that_cannot_be_written_is_tried_again(problem: Make, tmp_path: Path) -> None:
    class Unsaveable(Callback):
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}

        def on_checkpoint(self, run: Any, path: Path) -> None:
            raise AssertionError

        def on_batch_end(self, run: Any, step: Any) -> None:
            self.state = {"seen": {1, 2}}

        def on_fit_end(self, run: Any) -> None:
            self.state = {}

        def state_dict(self) -> Any:
            return self.state

    trainer = problem().trainer(
        folder=tmp_path, checkpoint=Checkpointing("20ba"), callbacks=[Unsaveable()]
    )
    with pytest.warns(RuntimeWarning, match="training"):
        trainer.fit()
    assert not (tmp_path / "checkpoints").exists()
    assert "cannot save the state of" in str(trainer.unsaved)
    with pytest.raises(AssertionError):  # written now, so it is told
        trainer.fit()
    assert names(tmp_path) == ["checkpoint-000000000120"]
    assert trainer.unsaved is None


def test_the_latest_of_no_folder_is_refused(problem: Make) -> None:
    with pytest.raises(TrainingError, match="folder"):
        problem().trainer().resume()


def test_state_finds_its_callback_wherever_that_stands(problem: Make, tmp_path: Path) -> None:
    class Memory(Callback):
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: Any) -> None:
            self.value = state["value"]

        def __repr__(self) -> str:
            return "Memory()"

    settings = {"folder": tmp_path, "checkpoint": Checkpointing()}
    problem().trainer(callbacks=[Memory(1), Memory(2)], **settings).fit()
    first, second = Memory(0), Memory(0)
    trainer = problem().trainer(callbacks=[Callback(), first, second], **settings)
    trainer.resume()
    assert (first.value, second.value) == (1, 2)
    assert trainer.changes == ("callbacks: Memory(), Memory() -> Callback, Memory(), Memory()",)


def test_a_callback_that_is_gone_is_told(problem: Make, tmp_path: Path) -> None:
    class Memory(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"value": 1}

        def __repr__(self) -> str:
            return "Memory()"

    settings = {"folder": tmp_path, "checkpoint": Checkpointing()}
    problem().trainer(callbacks=[Callback(), Memory(), Memory()], **settings).fit()
    trainer = problem().trainer(callbacks=[Memory()], **settings)
    trainer.resume()
    all_of_them, line = trainer.changes  # the plain callback had nothing to remember
    assert all_of_them == "callbacks: Callback, Memory(), Memory() -> Memory()"
    assert line.endswith("Memory_2: its state is dropped")


@pytest.mark.filterwarnings("ignore::stretto.errors.PlanWarning")
@pytest.mark.parametrize("last_batch", ["keep", "drop", "carry"])
def test_every_epoch_ends_once(problem: Make, last_batch: Any) -> None:
    """Also where one batch ends several, and where the end of the run does."""

    class Epochs(Callback):
        count = 0

        def on_epoch_end(self, run: Any) -> None:
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


class Gate:
    """Holds the writing of checkpoints until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.threads: set[str] = set()
        write: Any = vars(saver)["write_part"]

        def held(*arguments: Any, **options: Any) -> None:
            self.threads.add(threading.current_thread().name)
            assert self.is_open.wait(60)
            write(*arguments, **options)

        monkeypatch.setattr(saver, "write_part", held)


def test_training_goes_on_while_a_checkpoint_is_written(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, then = Gate(monkeypatch), []

    class Open(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            if run.timer.batch == 6:
                assert not (tmp_path / "checkpoints" / "checkpoint-000000000032").exists()
                gate.is_open.set()

        def on_checkpoint(self, run: Any, path: Path) -> None:
            then.append((path.name[-3:], run.timer.batch >= 6))

    run = problem()
    run.trainer(
        folder=tmp_path, checkpoint=Checkpointing("4ba"), max_duration="8ba", callbacks=[Open()]
    ).fit()
    assert gate.threads == {"stretto-checkpoint"}
    assert then == [("032", True), ("060", True)]


def test_what_is_written_later_is_what_was_when_it_was_due(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    class Open(Callback):
        def on_fit_end(self, run: Any) -> None:
            gate.is_open.set()

    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("20sp")}
    short = problem()
    short.trainer(max_duration="3ba").fit()
    with pytest.raises(ZeroDivisionError):
        problem().trainer(callbacks=[Fail(5), Open()], **settings).fit()
    resumed = problem()
    assert resumed.trainer(**settings).resume().name == "checkpoint-000000000024"
    assert torch.equal(resumed.weights(), short.weights())


class Fail(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_batch_end(self, run: Any, step: Any) -> None:
        if run.timer.batch == self.batch:
            raise ZeroDivisionError


def test_a_full_disk_is_reported_and_training_goes_on(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    fsync = os.fsync
    failures: list[int] = []

    def full(descriptor: int) -> None:
        if len(failures) < 2 and threading.current_thread().name == "stretto-checkpoint":
            failures.append(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    trainer = problem().trainer(
        folder=tmp_path, checkpoint=Checkpointing("2ba"), max_duration="8ba"
    )
    with pytest.warns(RuntimeWarning, match="training"):
        trainer.fit()
    assert names(tmp_path) == ["checkpoint-000000000048", "checkpoint-000000000060"]
    assert trainer.unsaved is None


def test_the_checkpoint_before_a_damaged_one_is_used(problem: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("2ba")}
    problem().trainer(max_duration="4ba", **settings).fit()
    weights = tmp_path / "checkpoints" / "checkpoint-000000000032" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    trainer = problem().trainer(max_duration="4ba", **settings)
    with pytest.warns(RuntimeWarning, match="written"):
        assert trainer.resume("auto").name == "checkpoint-000000000016"
    trainer.fit()
    assert names(tmp_path)[-2:] == ["checkpoint-000000000032", "checkpoint-000000000032.old1"]


def test_auto_begins_anew_and_latest_does_not(problem: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"folder": tmp_path / "run", "checkpoint": Checkpointing()}
    assert problem().trainer(**settings).resume("auto") is None
    assert not (tmp_path / "run").exists()
    with pytest.raises(CheckpointError, match="none"):
        problem().trainer(**settings).resume("latest")
    trainer = problem().trainer(**settings)
    trainer.resume("auto")
    trainer.fit()
    # The newest of another run, into a folder of its own.
    other = problem().trainer(folder=tmp_path / "other", max_duration="3ep")
    assert other.resume(tmp_path / "run").name == "checkpoint-000000000120"
    other.fit()
    assert other.timer.sample == 180
