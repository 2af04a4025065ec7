"""A folder that another live run writes to."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import TrainingError
from stretto.run_folder import LOCK, locked
from stretto.training import Callback, Checkpointing

Make = Callable[..., Any]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "run"),
        pytest.raises(TrainingError, match=str(os.getpid())),
        locked(tmp_path / "run"),
    ):
        pass
    with locked(tmp_path / "run"):
        pass


def test_a_run_holds_its_folder_and_lets_go(problem: Make, tmp_path: Path) -> None:
    class Intrude(Callback):
        def on_batch_end(self, trainer: Any, step: Any) -> None:
            other = problem().trainer(folder=tmp_path, checkpoint=Checkpointing())
            with pytest.raises(TrainingError, match="another"):
                other.resume("auto")
            with pytest.raises(TrainingError, match="another"):
                other.fit()

    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing()}
    problem().trainer(callbacks=[Intrude()], max_duration="2ba", **settings).fit()
    again = problem().trainer(max_duration="3ba", **settings)
    again.resume()
    again.fit()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_whose_folder_is_moved_writes_to_no_other(
    is_replaced: bool, problem: Make, tmp_path: Path
) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"

    class Move(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            if run.timer.batch == 4:
                folder.rename(tmp_path / "moved")
                if is_replaced:
                    other.rename(folder)

    settings: dict[str, Any] = {"checkpoint": Checkpointing("3ba"), "max_duration": "6ba"}
    problem().trainer(folder=other, **settings | {"max_duration": "2ba"}).fit()
    kept = {path.name for path in (other / "checkpoints").iterdir()}
    trainer = problem().trainer(folder=folder, callbacks=[Move()], **settings)
    with pytest.warns(RuntimeWarning, match="write"):
        trainer.fit()
    assert "cannot write a checkpoint" in (trainer.unsaved or "")
    found = folder / "checkpoints"
    assert found.exists() == is_replaced
    if is_replaced:
        assert {path.name for path in found.iterdir()} == kept


@pytest.mark.parametrize("has_worker", [False, True])
def test_a_killed_run_lets_go_also_while_a_worker_of_it_lives(
    has_worker: bool, tmp_path: Path
) -> None:
    is_over, worker_waits = os.pipe()
    run = os.fork()
    if run == 0:
        with locked(tmp_path):
            if has_worker and os.fork() == 0:
                os.close(worker_waits)
                os.read(is_over, 1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / LOCK).read_text()
    with locked(tmp_path):
        pass
    os.close(worker_waits)
    os.close(is_over)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(TrainingError, match="permission"), locked(tmp_path):
        pass


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with (
        pytest.raises(TrainingError, match="written"),
        locked(tmp_path / "run"),
    ):
        pass


def test_a_full_disk_keeps_nobody_from_holding_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("socket.gethostname", full)  # what is written to the lock
    with locked(tmp_path), pytest.raises(TrainingError, match="another"), locked(tmp_path):
        pass


def test_a_lock_names_this_machine_only_while_it_is_held(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    assert (tmp_path / LOCK).read_text() == ""


@pytest.mark.parametrize("kind", ["hard links", "a link", "a pipe"])
def test_a_copy_without_links_can_be_used_as_the_error_says(kind: str, tmp_path: Path) -> None:
    folder, new = tmp_path / "a run", tmp_path / "new"
    folder.mkdir()
    if kind == "hard links":  # as `cp -al` makes them
        (tmp_path / "other").touch()
        (folder / LOCK).hardlink_to(tmp_path / "other")
    elif kind == "a link":
        (tmp_path / "other").mkdir()
        (folder / "checkpoints").symlink_to(tmp_path / "other")
    else:
        os.mkfifo(folder / LOCK)
    with pytest.raises(TrainingError) as caught, locked(folder):
        pass
    instead = str(caught.value.message.instead)
    if kind == "a pipe":
        assert instead.startswith("move it away")
        return
    command = instead.split("'", 1)[1].rpartition("', and")[0]
    subprocess.run([*shlex.split(command)[:-1], str(new)], check=True)
    with locked(new):
        pass
