"""The lock of a run folder, and errors of its files and checkpoints."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from stretto._location import NotPlainError, open_plain
from stretto.errors import CheckpointError, StrettoError, TrainingError

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


def run_of(records: Mapping[str, Any]) -> str | None:
    """Return of which run a checkpoint is; None: an older version of stretto wrote it.

    >>> run_of({"setup": {"run": "0a1b2c3d"}}), run_of({})
    ('0a1b2c3d', None)
    """
    setup = records.get("setup")
    return setup.get("run") if isinstance(setup, Mapping) else None


UNFIT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Exceptions that a state from another run, model or version causes."""


@contextmanager
def section(where: object, name: str) -> Iterator[None]:
    """Add the checkpoint and the part of it to errors raised inside.

    Raises:
        StrettoError: the error raised inside, with the place added.
        CheckpointError: the part does not fit.
    """
    try:
        yield
    except StrettoError as error:
        raise error.recast(type(error), where=f"{name!r} in {where}") from error
    except (*UNFIT, RuntimeError) as error:
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        why = f"its {name!r} does not fit this run ({why})"
        instead = "build the run as it was then, or start from another checkpoint"
        raise CheckpointError.cannot(f"resume from {where}", why=why, instead=instead) from error


def unfit(path: Path, name: str, error: Exception) -> CheckpointError:
    """Return the error for an optimizer that fails in its first update after a resume."""
    return CheckpointError.cannot(
        f"update the weights with {name}",
        why=f"it cannot compute with its state from {path} ({type(error).__name__}: {error})",
        instead=f"resume with {name} built as it was then, or from another checkpoint",
    )
