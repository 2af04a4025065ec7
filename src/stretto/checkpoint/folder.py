"""The checkpoints of a run: their names, the newest intact one, and which to keep."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

from stretto.checkpoint.manifest import (
    CHECKPOINT,
    MANIFEST,
    DamagedError,
    check_member,
    read_errors,
    read_manifest,
)
from stretto.checkpoint.reading import open_or_damage, with_retries
from stretto.checkpoint.writing import UNFINISHED, delete_checkpoint, remove
from stretto.errors import CheckpointError

NAME = re.compile(r"checkpoint-\d{12,}-[0-9a-f]{16}")
"""The name of a copy. It ends with the time, so that nothing is ever overwritten."""


class Store(Protocol):
    """Keeps copies of checkpoints. A method may raise any exception; the next copy tries again."""

    def write(self, name: str, folder: Path) -> None:
        """Keep the files of `folder`; `list` may return `name` only once all of them are there."""

    def list(self) -> list[str]:
        """Return the names of whole copies; of one position, the one written last is last."""
        ...

    def open(self, name: str, folder: Path) -> None:
        """Put the files of a copy into `folder`, which exists and is empty."""

    def delete(self, name: str) -> None:
        """Remove a copy, or what is left of one."""


@final
class UrlStore:
    """A folder that fsspec can reach: `s3://bucket/run`, `gs://...`, or a path.

    The manifest is the last file that is written and the first that is deleted, so what has one is
    whole. Objects are only put, never renamed.

    >>> import tempfile
    >>> store = UrlStore(tempfile.mkdtemp())
    >>> store.list()
    []

    Args:
        url: where; the package for its protocol (such as `s3fs`) must be installed.
        **options: passed on to the file system, such as `endpoint_url`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        from fsspec.core import url_to_fs

        self._files, self._root = url_to_fs(url, **options)
        self._url = url

    def write(self, name: str, folder: Path) -> None:
        """Put the files of a checkpoint, the manifest last; remove what was left half-way."""
        self._files.makedirs(f"{self._root}/{name}", exist_ok=True)
        for file in sorted(folder.iterdir(), key=lambda file: file.name == MANIFEST):
            self._files.put_file(str(file), f"{self._root}/{name}/{file.name}")
        for other, is_whole in self._found().items():
            if not is_whole and position_of(other) <= position_of(name):
                self.delete(other)

    def list(self) -> list[str]:
        """Return the names of copies that have a manifest."""
        whole = [name for name, is_whole in self._found().items() if is_whole]
        return sorted(whole, key=lambda name: (position_of(name), name))

    def _found(self) -> dict[str, bool]:
        """Return for each copy whether it has a manifest."""
        self._files.invalidate_cache()
        copies: dict[str, bool] = {}
        # `find` raises if the folder cannot be reached; `exists` would say that it is not there.
        for path in self._files.find(self._root):
            folder, _, file = str(path).rpartition("/")
            name = folder.rpartition("/")[2]
            if NAME.fullmatch(name):
                copies[name] = copies.get(name, False) or file == MANIFEST
        return copies

    def open(self, name: str, folder: Path) -> None:
        """Get the files of a copy."""
        for path in self._files.find(f"{self._root}/{name}"):
            self._files.get_file(path, str(folder / path.rpartition("/")[2]))

    def delete(self, name: str) -> None:
        """Remove a copy, its manifest first."""
        paths = self._files.find(f"{self._root}/{name}")
        for path in sorted(paths, key=lambda path: not path.endswith(f"/{MANIFEST}")):
            self._files.rm_file(path)

    def __repr__(self) -> str:
        return f"UrlStore({self._url!r})"


def position_of(name: str) -> int:
    """Return the position in the name of a checkpoint or a copy of one.

    >>> position_of("checkpoint-000000004096")
    4096
    """
    return int(name.split("-")[1])


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
        return [path for path in candidates(folder) if (path / MANIFEST).is_file()]


def candidates(folder: Path) -> list[Path]:
    """Return all paths in `folder` that are named like a checkpoint, oldest first.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        found = [path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: position_of(path.name))


def latest_good(folder: Path, *, sleep: Callable[[float], None] = time.sleep) -> Path | None:
    """Return the newest intact checkpoint in `folder`; warn about newer ones that are damaged.

    A checkpoint that the system cannot read now does not count as damaged; after retries it is an
    error.

    >>> latest_good(Path("runs/none"))

    Args:
        folder: the folder of checkpoints.
        sleep: waits some seconds before a retry.

    Returns:
        Its path, or None if the folder has no checkpoint.

    Raises:
        CheckpointError: all are damaged; or one has a newer format or cannot be read.
    """
    bad: list[str] = []
    with read_errors(folder):
        found = with_retries(lambda: candidates(folder), sleep)
    for path in reversed(found):
        with read_errors(path):
            try:
                with_retries(partial(open_or_damage, path), sleep)
            except DamagedError as damage:
                bad.append(f"{path.name} is damaged: {damage}")
                continue
        for why in bad:
            message = f"in {folder}, {why}; {path.name} is used instead"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return path
    if bad:
        raise CheckpointError.cannot(
            f"resume from a checkpoint in {folder}",
            why="; ".join(bad),
            instead="restore one from a copy or name another checkpoint; delete them to start over",
        )
    return None


def keep(folder: Path, newest: int = 3, also: Iterable[Path] = ()) -> None:
    """Delete older checkpoints and remains of unfinished ones.

    Nothing is deleted unless the newest checkpoint has all its files.

    Args:
        folder: the folder of checkpoints.
        newest: how many of the newest to keep.
        also: others to keep.

    >>> keep(Path("runs/none"))
    """
    try:
        found = checkpoints(folder)
        with read_errors(folder):
            for name, entry in read_manifest(found[-1]).items() if found else ():
                check_member(found[-1], name, entry, content=False)
    except CheckpointError:
        return  # try again next time
    stay = {path.name for path in (*found[-newest:], *also)}
    left = [path for path in folder.glob(f"checkpoint-*{UNFINISHED}") if found]
    for act, paths in ((remove, left), (delete_checkpoint, found)):
        for path in paths:
            if path.name not in stay:
                with suppress(OSError):  # what remains does no harm
                    act(path)
