"""The lock of a run folder, and the error if it cannot be written to."""

from __future__ import annotations

import errno
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from stretto._location import NotPlainError, open_plain
from stretto.errors import CheckpointError, TrainingError

LOCK = "run.lock"
OWN_FOLDERS = ("checkpoints", "tensorboard", "wandb")
"""Folders in a run folder that a run writes to, or deletes in."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder; the system releases the lock when the process ends in any way.

    There is no lock on Windows, and on file systems without locks (some network ones).

    Raises:
        TrainingError: another live run has the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in OWN_FOLDERS:
            if (folder / name).is_symlink():
                why = "It is a link to another folder"
                raise NotPlainError(errno.ELOOP, why, str(folder / name))
        file = open_plain(folder / LOCK, "a+b", buffering=0)
    except OSError as error:
        raise unwritable(folder, error) from error
    with file:
        if os.name == "posix":
            _watch_forks()
            _lock(file, folder)
        _open_locks.add(file)
        try:
            yield
        finally:
            _open_locks.discard(file)
            with suppress(OSError):  # an archive of the folder need not name this machine
                file.truncate(0)


_open_locks: set[IO[bytes]] = set()


def check_lock(folder: Path) -> None:
    """Check that the lock in `folder` is one that this process holds, if it holds any.

    Raises:
        CheckpointError: the folder was moved, or replaced by that of another run.
    """
    held = [os.fstat(file.fileno()) for file in _open_locks]
    with suppress(OSError):
        there = (folder / LOCK).stat()
        if not held or any(os.path.samestat(there, one) for one in held):
            return
    if held:
        why = "the folder was moved or replaced while the run was writing"
        raise CheckpointError.cannot(
            f"write a checkpoint to {folder}", why=why, instead="move it back"
        )


@cache
def _watch_forks() -> None:
    """Release locks in forked children: data workers outlive a killed run for up to 5 s."""
    os.register_at_fork(after_in_child=lambda: [file.close() for file in _open_locks])


def _lock(file: IO[bytes], folder: Path) -> None:
    import fcntl  # POSIX only

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).decode(errors="replace").strip()
        why = f"another run is writing there ({holder or 'unknown'})"
        instead = "wait until it ends, or choose another folder"
        raise TrainingError.cannot(f"train in {folder}", why=why, instead=instead) from None
    except OSError:
        return
    with suppress(OSError):  # a full disk: the content is only for the message
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def set_aside(path: Path) -> Path:
    """Rename a path that will be replaced; it ends in `.old1`, or the next free number."""
    number = 1
    while (target := path.with_name(f"{path.name}.old{number}")).exists():
        number += 1
    return path.rename(target)


def unwritable(folder: Path, error: OSError) -> TrainingError:
    """Return the error for a run folder that cannot be written to."""
    name = Path(os.fsdecode(error.filename or folder)).name
    why = (error.strerror or str(error)).lower()
    instead = "choose a folder that can be written to"
    if isinstance(error, NotPlainError):
        instead = "move it away, or choose another folder"
        if error.errno in (errno.ELOOP, errno.EMLINK):  # `cp -al` and archives make links
            instead = f"copy the run with 'cp -rL {shlex.quote(str(folder))} NEW', and use NEW"
    why = why if name == folder.name else f"{name}: {why}"
    return TrainingError.cannot(f"keep a run in {folder}", why=why, instead=instead)
