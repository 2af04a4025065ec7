"""The checkpoints of a run: their names, which one is the newest good one, which ones stay."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from stretto.checkpoint.manifest import (
    MANIFEST,
    Damage,
    check_member,
    read_manifest,
    reading,
)
from stretto.checkpoint.reading import find, open_or_damage
from stretto.checkpoint.writing import ASIDE, UNFINISHED, delete_checkpoint, remove
from stretto.errors import CheckpointError

_NAME = re.compile(r"checkpoint-\d{12,}")


def checkpoint_path(folder: Path, sample: int) -> Path:
    """Return where the checkpoint at position `sample` belongs; names sort by position.

    >>> checkpoint_path(Path("runs/a"), 4096).name
    'checkpoint-000000004096'
    """
    return folder / f"checkpoint-{sample:012d}"


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder` that were finished, oldest first; nothing is verified.

    >>> checkpoints(Path("runs/none"))
    []
    """
    if not folder.is_dir():
        return []
    names = {path.name.removesuffix(ASIDE) for path in folder.iterdir() if not path.is_symlink()}
    found = (folder / name for name in names if _NAME.fullmatch(name))
    whole = (path for path in found if (find(path) / MANIFEST).is_file())
    return sorted(whole, key=lambda path: _position(path.name))


def latest_good(folder: Path) -> Path | None:
    """Return the newest checkpoint in `folder` whose every byte is as it was written.

    Each newer one is renamed to end in `.bad`, with a `RuntimeWarning` that says what is wrong with
    it. Only who holds the folder may call this.

    >>> latest_good(Path("runs/none"))

    Returns:
        Its path, or None if there is none.

    Raises:
        CheckpointError: a newer one is of a newer format, or must not be read.
    """
    bad: list[tuple[Path, str]] = []
    good = None
    for path in reversed(checkpoints(folder)):
        why = _damage(path)
        if why is None:
            good = path
            break
        bad.append((path, why))
    for path, why in bad:
        used = f"{good.name} is used instead" if good is not None else "there is no good one"
        warnings.warn(f"{_set_aside(path)}: {why}; {used}", RuntimeWarning, stacklevel=2)
    if good is not None and (aside := find(good)) != good:
        aside.rename(good)
    return good


def keep(folder: Path, newest: int = 3, also: Iterable[Path] = ()) -> None:
    """Delete older checkpoints, and what unfinished ones have left behind.

    Nothing is deleted unless the newest one is there as its manifest says.

    Args:
        folder: where they lie.
        newest: how many of the newest stay.
        also: others that stay.

    >>> keep(Path("runs/none"))
    """
    found = checkpoints(folder)
    if not found or not _is_there(found[-1]):
        return
    for path in folder.glob("checkpoint-*"):
        if _is_left_over(path, found[-1]):
            _try(remove, path)
    stay = {path.name for path in (*found[-newest:], *also)}
    for path in found:
        if path.name not in stay:
            _try(delete_checkpoint, path)


def _damage(path: Path) -> str | None:
    """Why a checkpoint cannot be used; None if it can."""
    with reading(path):
        try:
            open_or_damage(path)
        except PermissionError:
            raise
        except OSError as error:
            return error.strerror or str(error)
        except Damage as damage:
            return str(damage)
    return None


def _set_aside(path: Path) -> str:
    """Rename a bad checkpoint, and return what was done."""
    target = path.with_name(f"{path.name}.bad")
    number = 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.bad{number}")
    try:
        find(path).rename(target)
    except OSError as error:
        return f"{path} is damaged and cannot be renamed ({error.strerror})"
    return f"{path} is damaged and was renamed to {target.name}"


def _is_there(path: Path) -> bool:
    """Whether a checkpoint that was just written has all its files."""
    try:
        with reading(path):
            for name, entry in read_manifest(find(path)).files.items():
                check_member(find(path), name, entry, content=False)
    except CheckpointError:
        return False
    return True


def _is_left_over(path: Path, newest: Path) -> bool:
    """Whether a killed process was writing, replacing or deleting this one."""
    name, ending = path.stem, path.suffix
    if ending not in (UNFINISHED, ASIDE) or not _NAME.fullmatch(name):
        return False
    # What is being written now is newer than the newest.
    return _position(name) <= _position(newest.name) and (
        ending == UNFINISHED or (path.parent / name).exists()
    )


def _position(name: str) -> int:
    return int(name.partition("-")[2])


def _try(act: Callable[[Path], None], path: Path) -> None:
    """Remove what can be removed; what cannot is in nobody's way."""
    with suppress(OSError):
        act(path)
