"""Faults that need a process of their own: killed between file operations, and a real full disk.

`python faults.py kill FOLDER` does the same work again and again, each time in a fork that is
killed before its n-th file operation, for every n there is. After each kill it looks at what is
left and goes on from there. `python faults.py full FOLDER` saves more than the process may write.
What is wrong is printed; the exit status is 0 if nothing is.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stretto.checkpoint import (
    checkpoint_path,
    checkpoints,
    keep,
    latest_good,
    read_checkpoint,
    write_checkpoint,
)
from stretto.errors import CheckpointError

AUDITED = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}
KILLED = 9


def tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"weight": torch.full((3, 2), value)}, "optimizer": {}}


class Killer:
    """Ends this process before its n-th file operation, losing what was not yet synchronized."""

    def __init__(self, folder: Path, die_at: int) -> None:
        self._folder = str(folder)
        self._die_at = die_at
        self._written: set[str] = set()
        self._fsync = os.fsync
        sys.addaudithook(self._hear)
        os.fsync = self._synchronize  # type: ignore[assignment]

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in AUDITED:
            return
        # A folder is emptied by names relative to it.
        is_relative = event in ("os.remove", "os.rmdir") and arguments[1] != -1
        if not is_relative and not str(arguments[0]).startswith(self._folder):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        self._before()
        if event == "open":
            self._written.add(str(arguments[0]))

    def _synchronize(self, file: int) -> None:
        self._before()
        self._fsync(file)
        self._written.discard(str(Path(f"/proc/self/fd/{file}").readlink()))

    def _before(self) -> None:
        self._die_at -= 1
        if self._die_at == 0:
            for file in map(Path, self._written):
                if file.exists():
                    os.truncate(file, file.stat().st_size // 2)
            os._exit(KILLED)


def kill_everywhere(folder: Path, prepare: Callable[[], None], act: Callable[[], None]) -> int:
    """Kill `act` before each of its file operations; return how many there are."""
    for die_at in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        prepare()
        child = os.fork()
        if child == 0:
            Killer(folder, die_at)
            act()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            return die_at - 1
        assert os.waitstatus_to_exitcode(status) == KILLED
        check(folder)
    raise AssertionError("it never ends")


def check(folder: Path) -> None:
    """What is left must be whole, the newest before the kill or after; and work must go on."""
    for path in checkpoints(folder):
        found = read_checkpoint(path)
        assert found.records["value"] == found.tensors["model"]["weight"][0, 0]
    newest = latest_good(folder)
    assert newest is not None
    assert newest.name == checkpoints(folder)[-1].name
    assert int(newest.name[-12:]) >= 2
    write_checkpoint(checkpoint_path(folder, 4), tensors(7.0), {"value": 7.0})
    write_checkpoint(checkpoint_path(folder, 5), tensors(8.0), {"value": 8.0})
    keep(folder, 1)
    left = [path.name for path in folder.iterdir()]
    assert left == [checkpoint_path(folder, 5).name], left


def kill(folder: Path) -> None:
    def two() -> None:
        for value in (1, 2):
            write_checkpoint(checkpoint_path(folder, value), tensors(value), {"value": value})

    def third() -> None:
        write_checkpoint(checkpoint_path(folder, 3), tensors(3), {"value": 3})
        keep(folder, 2)

    print("operations:", kill_everywhere(folder, two, third))


def full(folder: Path) -> None:
    folder.mkdir()
    path = checkpoint_path(folder, 1)
    write_checkpoint(path, tensors(1.0), {"value": 1.0})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    large = {"model": {"weight": torch.ones(1 << 16)}}
    try:
        write_checkpoint(checkpoint_path(folder, 2), large, {"value": 2.0})
    except CheckpointError as error:
        print(error)
    else:
        raise AssertionError("it was written")
    assert [one.name for one in folder.iterdir()] == [path.name]
    assert read_checkpoint(path).records == {"value": 1.0}
    # The length of the file: what is on the disk is whole, so it can be deleted.
    write_checkpoint(checkpoint_path(folder, 2), tensors(2.0), {"value": 2.0})
    keep(folder, 1)
    assert latest_good(folder) == checkpoint_path(folder, 2)


if __name__ == "__main__":
    warnings.simplefilter("error")
    {"kill": kill, "full": full}[sys.argv[1]](Path(sys.argv[2]))
