"""Where copies of finished checkpoints are kept besides the run folder: a bucket, another disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol, final

from stretto.checkpoint.manifest import MANIFEST

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
        for other, time in self._found().items():
            if time is None and position_of(other) <= position_of(name):
                self.delete(other)

    def list(self) -> list[str]:
        """Return the names of copies that have a manifest."""
        times = {name: time for name, time in self._found().items() if time is not None}
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
