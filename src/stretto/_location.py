"""Folders that a run is kept in or read from, which are no URLs."""

from __future__ import annotations

import re
from pathlib import Path

from stretto.errors import StrettoError, cannot, shown

# `pathlib` makes one slash of two; a drive of Windows has one letter.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>.*)", re.DOTALL)


def url_of(path: str | Path) -> str | None:
    """Return a path as a URL, if it is one.

    >>> url_of("s3://bucket/run"), url_of("runs/a")
    ('s3://bucket/run', None)
    """
    found = _URL.match(str(path))
    if found is None or "://" in str(path):
        return found and str(path)
    slashes = "///" if found["scheme"].lower() == "file" else "//"  # `pathlib` made them one
    return f"{found['scheme']}:{slashes}{found['rest']}"


def local_path(path: str | Path, what: str, error: type[StrettoError]) -> Path:
    """Return a path; a URL, of which `pathlib` would make a folder in the working one, is refused.

    Args:
        path: as it was given.
        what: what it is for, such as "keep a run in".
        error: the type to raise.

    >>> local_path("runs/a", "keep a run in", StrettoError).as_posix()
    'runs/a'

    Raises:
        StrettoError: it is a URL, empty, or has a NUL character.
    """
    url = _URL.match(str(path))
    if not str(path) or "\0" in str(path):
        why = "it has a NUL character" if str(path) else "it names no folder"
        instead = "write a path such as 'runs/name'"
        raise error(cannot(f"{what} {shown(str(path))}", why=why, instead=instead))
    if url is None:
        return Path(path)
    instead = "write the path of a local folder such as 'runs/name', and copy or mount the storage"
    if url["scheme"].lower() == "file":
        instead = f"write {shown('/' + url['rest'])}"
    raise error(
        cannot(
            f"{what} {shown(url['scheme'] + '://' + url['rest'])}",
            why="it is a URL, and only paths of the file system are read and written",
            instead=instead,
        )
    )
