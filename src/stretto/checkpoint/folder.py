"""The checkpoints of a run: their names, the newest intact one, and which to keep."""

from __future__ import annotations

import stat
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from stretto.checkpoint.manifest import (
    CHECKPOINT,
    MANIFEST,
    DamagedError,
    check_member,
    read_errors,
    read_manifest,
)
from stretto.checkpoint.reading import find, open_or_damage, with_retries
from stretto.checkpoint.writing import (
    BAD,
    REPLACED,
    UNFINISHED,
    delete_checkpoint,
    remove,
    rename_bad,
)
from stretto.errors import CheckpointError


def checkpoint_path(folder: Path, sample: int) -> Path:
    """Return the path of the checkpoint at position `sample`; names sort by position.

    >>> checkpoint_path(Path("runs/a"), 4096).name
    'checkpoint-000000004096'
    """
    return folder / f"checkpoint-{sample:012d}"


def checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints in `folder`, oldest first, without verification.

    >>> checkpoints(Path("runs/none"))
    []
    """
    with read_errors(folder):
        return [path for path in candidates(folder) if _is_finished(find(path))]


def candidates(folder: Path) -> list[Path]:
    """Return all paths in `folder` that are named like a checkpoint, oldest first.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        names = {path.name.removesuffix(REPLACED) for path in folder.iterdir()}
    except FileNotFoundError:
        return []
    return sorted((folder / name for name in names if CHECKPOINT.fullmatch(name)), key=position)


def position(path: Path) -> int:
    """Return the position in the name of a checkpoint.

    >>> position(Path("runs/a/checkpoints/checkpoint-000000004096"))
    4096
    """
    return int(path.name.partition("-")[2])


class Newest(NamedTuple):
    """The newest intact checkpoint of a folder, and damaged ones."""

    good: Path | None
    """The newest intact checkpoint."""
    bad: list[tuple[Path, str]]
    """Newer checkpoints that are damaged, newest first, with the reasons."""


def find_newest(folder: Path, *, sleep: Callable[[float], None] = time.sleep) -> Newest:
    """Return the newest intact checkpoint in `folder`; nothing is changed there.

    Raises:
        CheckpointError: all are damaged; or one has a newer format or cannot be read.
    """
    bad: list[tuple[Path, str]] = []
    with read_errors(folder):
        found = with_retries(lambda: candidates(folder), sleep)
    for path in reversed(found):
        why = _damage(path, sleep)
        if why is None:
            return Newest(path, bad)
        bad.append((path, why))
    damaged = [f"{path.name}: {why}" for path, why in bad]
    with read_errors(folder):
        damaged += [path.name for path in sorted(folder.glob(f"checkpoint-*{BAD}*"))]
    if damaged:
        raise CheckpointError.cannot(
            f"resume from a checkpoint in {folder}",
            why=f"all checkpoints there are damaged ({'; '.join(damaged)})",
            instead="restore one from a copy or name another checkpoint; delete them to start over",
        )
    return Newest(None, [])


def latest_good(folder: Path, *, sleep: Callable[[float], None] = time.sleep) -> Path | None:
    """Return the newest intact checkpoint in `folder`; rename newer ones that are damaged.

    The name of a damaged checkpoint gets the ending `.bad`, with a `RuntimeWarning` that gives the
    reason. A checkpoint that the system cannot read now does not count as damaged; after retries it
    is an error. Call this only while holding the lock of the folder.

    >>> latest_good(Path("runs/none"))

    Args:
        folder: the folder of checkpoints.
        sleep: waits some seconds before a retry.

    Returns:
        Its path, or None if the folder has no checkpoint.

    Raises:
        CheckpointError: all are damaged; or one has a newer format or cannot be read.
    """
    good, bad = find_newest(folder, sleep=sleep)
    if good is None:
        return None
    for path, why in bad:
        warnings.warn(
            f"{_rename_damaged(path)}: {why}; {good.name} is used instead",
            RuntimeWarning,
            stacklevel=2,
        )
    if (aside := find(good)) != good:
        aside.rename(good)
    return good


def keep(folder: Path, newest: int = 3, also: Iterable[Path] = ()) -> None:
    """Delete older checkpoints and remains of unfinished ones.

    Nothing is deleted unless the newest checkpoint matches its manifest.

    Args:
        folder: the folder of checkpoints.
        newest: how many of the newest to keep.
        also: others to keep.

    >>> keep(Path("runs/none"))
    """
    try:
        found = checkpoints(folder)
    except CheckpointError:
        return  # try again next time
    if not found or not _is_there(found[-1]):
        return
    for path in folder.glob("checkpoint-*"):
        if _is_left_over(path, found[-1]):
            _try(remove, path)
    stay = {path.name for path in (*found[-newest:], *also)}
    for path in found:
        if path.name not in stay:
            _try(delete_checkpoint, path)


def _is_finished(place: Path) -> bool:
    """Whether a folder has a manifest, which is written last."""
    try:
        files = [place.lstat(), (place / MANIFEST).lstat()]
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISDIR(files[0].st_mode) and stat.S_ISREG(files[1].st_mode)


def _damage(path: Path, sleep: Callable[[float], None]) -> str | None:
    """What is wrong with a checkpoint that could be read; None if it is intact."""

    def verify() -> None:
        if find(path).is_symlink():
            raise DamagedError("it is a link, and links are not followed")
        open_or_damage(path)

    with read_errors(path):
        try:
            with_retries(verify, sleep)
        except DamagedError as damage:
            return str(damage)
    return None


def _rename_damaged(path: Path) -> str:
    """Rename a damaged checkpoint; return a sentence about it."""
    try:
        target = rename_bad(find(path))
    except OSError as error:
        return f"{path} is damaged and cannot be renamed ({error.strerror})"
    return f"{path} is damaged and was renamed to {target.name}"


def _is_there(path: Path) -> bool:
    """Whether a checkpoint that was just written has all its files."""
    try:
        with read_errors(path):
            for name, entry in read_manifest(find(path)).files.items():
                check_member(find(path), name, entry, content=False)
    except CheckpointError:
        return False
    return True


def _is_left_over(path: Path, newest: Path) -> bool:
    """Whether a killed process was writing, replacing or deleting this one."""
    finished, ending = path.with_suffix(""), path.suffix
    if ending not in (UNFINISHED, REPLACED) or not CHECKPOINT.fullmatch(finished.name):
        return False
    # A checkpoint that is being written now is newer than the newest.
    return position(finished) <= position(newest) and (ending == UNFINISHED or finished.exists())


def _try(act: Callable[[Path], None], path: Path) -> None:
    """Remove a path if possible; what remains does no harm."""
    with suppress(OSError):
        act(path)
