"""The checkpoints of a run: their names, the newest intact one, and which to keep."""

from __future__ import annotations

import errno
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

from stretto._location import url_of
from stretto.checkpoint.manifest import (
    CHECKPOINT,
    MANIFEST,
    RECORDS,
    DamagedError,
    check_member,
    read_errors,
    read_manifest,
)
from stretto.checkpoint.reading import open_or_damage, with_retries
from stretto.checkpoint.writing import UNFINISHED, delete_checkpoint, remove
from stretto.errors import CheckpointError, without_credentials

NAME = re.compile(r"checkpoint-\d{12,}-[0-9a-f]{8}")
"""The name of a copy. It ends with random digits, so that nothing is ever overwritten."""
ASIDE = ".old1"
"""Ends the manifest of a copy that was set aside."""


class Store(Protocol):
    """Keeps copies of checkpoints. A method may raise any exception; the next copy tries again."""

    def write(self, name: str, folder: Path) -> None:
        """Keep the files of `folder`; `list` may return `name` only once all of them are there."""

    def list(self) -> list[str]:
        """Return the names of whole copies; of one position, the one written last is last."""
        ...

    def open(self, name: str, file: str, target: Path) -> None:
        """Write one file of a copy to `target`; raise `FileNotFoundError` if it is missing."""

    def keep(self, names: Collection[str]) -> None:
        """Delete all other copies, and what is left of unfinished ones."""


@final
class UrlStore:
    """A folder that fsspec can reach: `s3://bucket/run`, `gs://...`, or a path.

    The manifest is the last file that is written and the first that is deleted, so what has one is
    whole. Objects are only put, never overwritten. Endpoints and keys come from the configuration
    of fsspec, such as the environment variable `FSSPEC_S3`.

    >>> import tempfile
    >>> store = UrlStore(tempfile.mkdtemp())
    >>> store.list()
    []

    Args:
        url: where; the package for its protocol (such as `s3fs`) must be installed.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        if not url:
            raise ValueError("the address is empty")
        self._files, root = url_to_fs(url_of(url) or url)
        # An object store would keep the empty folder of two slashes, and list it under no name.
        self._root = re.sub("(?<=[^:/])/{2,}", "/", root)
        self.url = url
        self._listed: Sequence[str] | None = None

    def write(self, name: str, folder: Path) -> None:
        """Put the files of a checkpoint, the manifest last and the records before it."""
        last = (RECORDS, MANIFEST)
        for file in sorted(
            folder.iterdir(), key=lambda one: [one.name == name for name in last[::-1]]
        ):
            target = f"{self._root}/{name}/{file.name}"
            try:
                self._files.put_file(str(file), target)
            except FileNotFoundError:  # a file system that has folders
                self._files.makedirs(f"{self._root}/{name}", exist_ok=True)
                self._files.put_file(str(file), target)

    def list(self) -> list[str]:
        """Return the names of copies that have a manifest."""
        whole = [name for name, files in self._found().items() if MANIFEST in files]
        self._listed = whole
        positions = Counter(map(position_of, whole))

        def age(name: str) -> tuple[int, Any, str]:
            position = position_of(name)
            manifest = f"{self._root}/{name}/{MANIFEST}"
            is_only = positions[position] == 1
            return position, None if is_only else self._files.modified(manifest), name

        return sorted(whole, key=age)

    def without_manifest(self) -> Sequence[str]:
        """Return copies whose other files are all there: the manifest was lost or deleted."""
        found = self._found().items()
        return sorted(name for name, files in found if RECORDS in files and MANIFEST not in files)

    def open(self, name: str, file: str, target: Path) -> None:
        """Get one file of a copy."""
        self._files.get_file(f"{self._root}/{name}/{file}", str(target))

    def size_of(self, name: str, file: str) -> int:
        """Return the bytes of a file of a copy, before it is fetched.

        Raises:
            FileNotFoundError: there is no plain file.
        """
        found = self._files.info(f"{self._root}/{name}/{file}")
        if found["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "It is not a plain file", file)
        return int(found["size"])

    def keep(self, names: Collection[str]) -> None:
        """Delete all other copies, the manifest of each first.

        One that has become whole since the last `list` stays: its caller has not judged it.
        """
        for name, files in self._found().items():
            is_new = self._listed is not None and MANIFEST in files and name not in self._listed
            if name not in names and not is_new:
                for file in sorted(files, key=lambda file: file != MANIFEST):
                    self._files.rm_file(f"{self._root}/{name}/{file}")

    def set_aside(self, names: Iterable[str]) -> None:
        """Rename the manifests of copies: they are no copies any more, and are never deleted."""
        for name in names:
            manifest = f"{self._root}/{name}/{MANIFEST}"
            self._files.cp_file(manifest, manifest + ASIDE)
            self._files.rm_file(manifest)

    def _found(self) -> dict[str, set[str]]:
        """Return the files of each copy, whole or not, but not of those that were set aside.

        Raises:
            Exception: the folder cannot be reached. `exists` would say that it is not there.
        """
        self._files.invalidate_cache()
        try:
            walk = self._files.walk(self._root, on_error="raise")
            paths = [f"{folder}/{name}" for folder, _, names in walk for name in names]
        except FileNotFoundError:
            # An empty folder or no bucket: `find` raises for the second.
            paths = self._files.find(self._root)
        copies: dict[str, set[str]] = {}
        for path in paths:
            folder, _, file = str(path).rpartition("/")
            parent, _, name = folder.rpartition("/")
            # Not those of runs in folders below.
            if NAME.fullmatch(name) and parent.strip("/") == self._root.strip("/"):
                copies.setdefault(name, set()).add(file)
        return {name: own for name, own in copies.items() if MANIFEST + ASIDE not in own}

    def of_one(self) -> tuple[UrlStore, str]:
        """Return the store of a copy and its name, if this is the address of one; or itself.

        >>> UrlStore("/runs/a/checkpoint-000000000640-0a1b2c3d").of_one()
        (UrlStore('/runs/a'), 'checkpoint-000000000640-0a1b2c3d')
        """
        parent, _, name = self.url.rstrip("/").rpartition("/")
        return (UrlStore(parent), name) if NAME.fullmatch(name) else (self, "")

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same place, however it is written."""
        if not isinstance(other, UrlStore):
            return NotImplemented
        return bool(self._files == other._files) and self._root == other._root

    def __hash__(self) -> int:
        return hash(self._root)

    def __repr__(self) -> str:
        return f"UrlStore({without_credentials(self.url)!r})"


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


def unfinished(folder: Path) -> list[Path]:
    """Return what a kill has left of checkpoints that were being written or deleted."""
    found = folder.glob(f"*{UNFINISHED}")
    return [path for path in found if CHECKPOINT.fullmatch(path.stem)]


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
        CheckpointError: all are damaged; or one has another format or cannot be read.
    """
    bad: list[str] = []
    return chosen(newest_whole(folder, bad, sleep=sleep), folder, bad)


def newest_whole(
    folder: Path, bad: list[str], *, sleep: Callable[[float], None] = time.sleep
) -> Path | None:
    """Return the newest intact checkpoint in `folder`; add what is wrong with newer ones to `bad`.

    Raises:
        CheckpointError: one has another format or cannot be read.
    """
    with read_errors(folder):
        found = with_retries(lambda: candidates(folder), sleep)
    for path in reversed(found):
        with read_errors(path):
            try:
                with_retries(partial(open_or_damage, path), sleep)
            except DamagedError as damage:
                bad.append(f"{path.name} is damaged: {damage}")
                continue
        return path
    return None


def chosen(path: Path | None, place: object, bad: Sequence[str]) -> Path | None:
    """Return the checkpoint to resume from, with a warning for each newer one that is damaged.

    Raises:
        CheckpointError: all are damaged.
    """
    if path is None and bad:
        raise CheckpointError.cannot(
            f"resume from a checkpoint in {place}",
            why="; ".join(bad),
            instead="restore one from a copy or name another checkpoint; delete them to start over",
        )
    for why in bad:
        message = f"in {place}, {why}; {path and path.name} is used instead"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return path


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
            left = unfinished(folder) if found else []
    except CheckpointError:
        return  # try again next time
    stay = {path.name for path in (*found[-newest:], *also)}
    for act, paths in ((remove, left), (delete_checkpoint, found)):
        for path in paths:
            if path.name not in stay:
                with suppress(OSError):  # what remains does no harm
                    act(path)
