"""The checkpoints of a run: their names, the newest intact one, and which to keep."""

from __future__ import annotations

import re
import stat
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

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

NAME = re.compile(r"checkpoint-(\d{12,})-[0-9a-f]{8}")
"""The name of a copy. Its end is another one each time, so that nothing is ever overwritten."""


class Store(Protocol):
    """Keeps copies of checkpoints. A method may raise any exception; it is tried again later."""

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
        for other, written in self._found().items():
            if written is None and position_of(other) <= position_of(name):
                self.delete(other)

    def list(self) -> list[str]:
        """Return the names of copies that have a manifest."""
        times = {name: at for name, at in self._found().items() if at is not None}
        return sorted(times, key=lambda name: (position_of(name), times[name]))

    def _found(self) -> dict[str, str | None]:
        """Return the time of the manifest of each copy; None: it has none."""
        self._files.invalidate_cache()
        times: dict[str, str | None] = {}
        # `find` raises where the folder cannot be reached; `exists` would say that it is not there.
        for path, entry in self._files.find(self._root, detail=True).items():
            folder, _, file = str(path).rpartition("/")
            name = folder.rpartition("/")[2]
            if NAME.fullmatch(name):
                times.setdefault(name, None)
                if file == MANIFEST:
                    times[name] = str(entry.get("LastModified", entry.get("mtime", "")))
        return times

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
    """Return the position in the name of a copy.

    >>> position_of("checkpoint-000000004096-0a1b2c3d")
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
