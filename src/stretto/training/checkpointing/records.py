"""Read records of a checkpoint; errors name the file and the key."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from stretto.errors import CheckpointError, StrettoError, TrainingError
from stretto.training.logs.loggers import check_appendable

LOCK = "run.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder; the system releases the lock when the process ends in any way.

    There is no lock on Windows, and on file systems without locks (some network ones).

    Raises:
        TrainingError: another live run has the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_appendable(folder / LOCK)
        file = (folder / LOCK).open("a+b", buffering=0)
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


_open_locks: set[IO[bytes]] = set()


def is_locked_here(folder: Path) -> bool:
    """Return whether the lock in `folder` is one that this process holds, if it holds any.

    It is not if the folder was moved, or replaced by that of another run.
    """
    try:
        there = (folder / LOCK).stat()
    except OSError:
        return not _open_locks
    held = [os.fstat(file.fileno()) for file in _open_locks]
    return not held or any(os.path.samestat(there, one) for one in held)


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
        raise TrainingError.cannot(
            f"train in {folder}",
            why=f"another run is writing there ({holder or 'unknown'})",
            instead="wait until it ends, or choose another folder",
        ) from None
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
    return TrainingError.cannot(
        f"keep a run in {folder}",
        why=why if name == folder.name else f"{name}: {why}",
        instead="choose a folder that can be written to",
    )


UNFIT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that Python raises for an invalid record."""


@contextmanager
def section(path: Path, name: str) -> Iterator[None]:
    """Add the checkpoint and the section of its records to errors raised inside.

    Raises:
        StrettoError: the error raised inside, with the place added.
        CheckpointError: the section is not from a run.
    """
    try:
        yield
    except StrettoError as error:
        raise error.recast(type(error), where=f"{name!r} in {path}") from error
    except UNFIT as error:
        raise CheckpointError.cannot(
            f"resume from {path}",
            why=f"{name!r} in its state.json is not that of a run "
            f"({type(error).__name__}: {error})",
            instead="resume from another checkpoint",
        ) from error


def unfit(path: Path, name: str, error: Exception) -> CheckpointError:
    """Return the error for an optimizer that fails in its first update after a resume."""
    return CheckpointError.cannot(
        f"update the weights with {name}",
        why=f"it cannot compute with its state from {path} ({type(error).__name__}: {error})",
        instead=f"resume with {name} built as it was then, or from another checkpoint",
    )
