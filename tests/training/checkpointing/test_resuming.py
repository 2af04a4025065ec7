"""Runs that go on: after errors, from places other than the newest, again in one process."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import CheckpointError, TrainingError
from stretto.run_folder import locked
from stretto.training import Callback, Checkpointing, Evaluation, Logging
from stretto.training.checkpointing import saver

Make = Callable[..., Any]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_best_is_saved_when_everything_of_its_batch_is_logged(
    problem: Make, tmp_path: Path
) -> None:
    """Or a run that goes on from it would never write what came later."""
    run = problem()
    settings = {
        "folder": tmp_path,
        "log": Logging("3ba"),
        "checkpoint": Checkpointing("100ep", keep=9, monitor="one/loss"),
        "evaluate": [Evaluation(run.data, "4ba", name=name) for name in ("one", "two")],
    }
    run.trainer(**settings).fit()
    assert names(tmp_path)[-1] == "checkpoint-000000000120", "the last is one of the best"
    lines = measured(tmp_path)
    for checkpoint in reversed(names(tmp_path)):
        trainer = problem().trainer(**settings)
        trainer.resume(tmp_path / "checkpoints" / checkpoint)
        trainer.fit()
        assert measured(tmp_path) == lines, checkpoint


def measured(folder: Path) -> list[list[str]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [[str(one["sp"]), *(key for key in one if "loss" in key)] for one in records]


class Fail(Callback):
    """Fails once, in an event of choice."""

    has_failed = False

    def __init__(self, event: str, batch: int) -> None:
        def fail(trainer: Any, *details: Any) -> Any:
            if trainer.timer.batch >= batch and not self.has_failed:
                self.has_failed = True
                raise ValueError(event)
            return details[0] if details else None

        self.has_failed = False
        self.fail = fail


def failing(event: str, batch: int) -> Callback:
    def call(self: Fail, *details: Any) -> Any:
        return self.fail(*details)

    kind = type("Failing", (Fail,), {event: call})
    failing: Callback = kind(event, batch)
    return failing


@pytest.mark.parametrize(
    "event",
    [
        "on_fit_start", "on_batch_start", "transform_batch", "on_gradient", "on_batch_end",
        "on_epoch_end", "on_evaluation_end", "on_log", "on_checkpoint", "on_fit_end",
    ],
)  # fmt: skip
def test_a_run_whose_callback_failed_goes_on_with_the_batch_it_was_at(
    problem: Make, tmp_path: Path, event: str
) -> None:
    run = problem()
    settings = {"folder": tmp_path, "log": Logging("2ba"), "checkpoint": Checkpointing("2ba")}
    callback = failing(event, 0 if event == "on_fit_start" else 3)
    trainer = run.trainer(callbacks=[callback], evaluate=Evaluation(run.data, "5ba"), **settings)
    with pytest.raises(ValueError, match=event):
        trainer.fit()
    assert trainer.unsaved is None
    trainer.fit()
    rows = (tmp_path / "ledger.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(16))


def test_a_checkpoint_that_became_whole_while_the_run_failed_is_one(
    problem: Make, tmp_path: Path
) -> None:
    class FailBesides(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            if run.timer.batch == 3:
                raise ValueError("enough")

    held = threading.Event()

    def part(*arguments: Any, **named: Any) -> None:
        assert held.wait(60)
        write_part(*arguments, **named)

    trainer = problem().trainer(
        folder=tmp_path, checkpoint=Checkpointing("2ba"), callbacks=[FailBesides()]
    )
    write_part: Any = vars(saver)["write_part"]
    closing = trainer._loop.saver.close

    def close() -> None:
        held.set()
        with pytest.raises(TrainingError, match="another"):
            lock_of(tmp_path)
        closing()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "write_part", part)
        patch.setattr(type(trainer._loop.saver), "close", lambda _: close())
        with pytest.raises(ValueError, match="enough"):
            trainer.fit()
    assert names(tmp_path) == ["checkpoint-000000000016"]
    assert trainer.unsaved is None
    assert trainer._loop.saver.saved_at == 16


def lock_of(folder: Path) -> None:
    with locked(folder):
        pass


def test_a_checkpoint_that_was_set_aside_is_of_another_past(problem: Make, tmp_path: Path) -> None:
    """The files of the run have gone on otherwise; cut to its lengths they would be a mixture."""
    settings = {"folder": tmp_path, "checkpoint": Checkpointing("4ba", keep=9)}
    problem().trainer(**settings).fit()
    back = problem().trainer(batch_size=4, **settings)
    back.resume(tmp_path / "checkpoints" / "checkpoint-000000000032")
    back.fit()
    ledger = (tmp_path / "ledger.csv").read_text()
    aside = problem().trainer(**settings)
    aside.resume(tmp_path / "checkpoints" / "checkpoint-000000000060.old1")
    with pytest.raises(TrainingError, match="already"):
        aside.fit()
    assert (tmp_path / "ledger.csv").read_text() == ledger


def test_a_trainer_that_has_trained_keeps_its_files_where_auto_finds_nothing(
    problem: Make, tmp_path: Path
) -> None:
    trainer = problem().trainer(folder=tmp_path)
    trainer.fit()
    ledger = (tmp_path / "ledger.csv").read_text()
    assert trainer.resume("auto") is None
    trainer.fit()
    assert (tmp_path / "ledger.csv").read_text() == ledger


def test_a_file_of_the_run_that_is_gone_does_not_end_it(problem: Make, tmp_path: Path) -> None:
    class Remove(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            if run.timer.batch == 3:
                (tmp_path / "metrics.jsonl").unlink()

    trainer = problem().trainer(
        folder=tmp_path, checkpoint=Checkpointing("4ba"), callbacks=[Remove()]
    )
    with pytest.warns(RuntimeWarning, match="training"):
        trainer.fit()
    assert trainer.timer.batch == 16
    assert "metrics.jsonl" in str(trainer.unsaved)


def test_in_the_folder_of_another_run_nothing_is_renamed(problem: Make, tmp_path: Path) -> None:
    """It may live, and only who holds a folder may change what is in it."""
    settings = {"checkpoint": Checkpointing("1ep")}
    problem().trainer(folder=tmp_path / "a", **settings).fit()
    with (tmp_path / "a" / "checkpoints" / "checkpoint-000000000120" / "state.json").open("a") as f:
        f.write(" ")
    before = names(tmp_path / "a")
    other = problem().trainer(folder=tmp_path / "b", **settings)
    with locked(tmp_path / "a"), pytest.warns(RuntimeWarning, match="used"):
        found = other.resume(tmp_path / "a")
    assert found is not None
    assert found.name == "checkpoint-000000000060"
    assert names(tmp_path / "a") == before
    (found / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="checkpoints"):
        other.resume(tmp_path / "a")
    assert names(tmp_path / "a") == before


def test_a_read_error_does_not_throw_the_run_away(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"folder": tmp_path, "checkpoint": Checkpointing("1ep")}
    problem().trainer(**settings).fit()
    before, ledger = names(tmp_path), (tmp_path / "ledger.csv").read_text()
    trainer, opened = problem().trainer(**settings), os.open

    def stale(path: str, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith("state.json"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", stale)
    for asked in ("auto", "latest", tmp_path, tmp_path / "checkpoints" / before[0]):
        with pytest.raises(CheckpointError, match="handle"):
            trainer.resume(asked)
    other = problem().trainer(folder=tmp_path / "b")
    with pytest.raises(CheckpointError, match="handle"):
        other.resume(tmp_path)
    monkeypatch.undo()
    assert names(tmp_path) == before
    assert (tmp_path / "ledger.csv").read_text() == ledger
    assert trainer.resume("auto") == tmp_path / "checkpoints" / before[-1]


def test_auto_does_not_begin_anew_where_all_are_damaged(problem: Make, tmp_path: Path) -> None:
    settings = {"folder": tmp_path, "checkpoint": Checkpointing("1ep")}
    problem().trainer(**settings).fit()
    for name in names(tmp_path):
        (tmp_path / "checkpoints" / name / "manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="checkpoints"):
            problem().trainer(**settings).resume("auto")


def test_a_run_that_goes_back_writes_over_nothing_that_is_called_like_a_checkpoint(
    problem: Make, tmp_path: Path
) -> None:
    settings = {"folder": tmp_path, "checkpoint": Checkpointing("1ep")}
    problem().trainer(**settings).fit()
    (tmp_path / "checkpoints" / "checkpoint-000000000120" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "checkpoints" / "checkpoint-000000000999")
    back = problem().trainer(**settings)
    back.resume(tmp_path / "checkpoints" / "checkpoint-000000000060")
    back.fit()
    assert names(tmp_path) == [
        "checkpoint-000000000060",
        "checkpoint-000000000120",
        "checkpoint-000000000120.old1",
        "checkpoint-000000000999.old1",
    ]


def test_the_folder_in_which_one_is_can_be_named(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"checkpoint": Checkpointing("1ep")}
    problem().trainer(folder=tmp_path, **settings).fit()
    monkeypatch.chdir(tmp_path / "checkpoints" / "checkpoint-000000000060")
    trainer = problem().trainer(folder=tmp_path, **settings)
    trainer.resume(".")
    assert trainer.timer.sample == 60
    trainer.fit()


@pytest.mark.parametrize("kind", [str, Path])
def test_a_url_is_no_folder(
    kind: Any, problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainingError, match="bucket"):
        problem().trainer(folder=kind("s3://bucket/run"))
    with pytest.raises(TrainingError, match="URL"):
        problem().trainer(folder=kind("file:///data/run"))
    with pytest.raises(CheckpointError, match="install"):
        problem().trainer(folder="a").resume(kind("gs://bucket/run"))
    assert not list(tmp_path.iterdir())
