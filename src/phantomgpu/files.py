"""The only place that opens files: a name may be that of a pipe, a device, or of much more."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from phantomgpu.errors import PhantomError

MOST = 64 << 20
"""Bytes of a file that is read; the report of a long run has a few million."""


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for who is at the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def read(file: Path, *, last: int | None = None) -> bytes:
    """Return what a plain file holds; links are followed.

    Args:
        file: Its path.
        last: Only so many bytes of its end.

    Raises:
        PhantomError: It cannot be read, is a pipe, a device or a folder, or is too large.
    """
    try:
        with open(file, "rb", opener=_at_once) as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise PhantomError(f"cannot read {file}: it is no plain file")
            size = min(found.st_size, last or found.st_size)
            if size > MOST:
                raise PhantomError(f"cannot read {file}: it has more than {MOST >> 20} MiB")
            opened.seek(found.st_size - size)
            return opened.read(size) or b""  # None of what has nothing yet
    except OSError as error:
        raise PhantomError(f"cannot read {file}: {error.strerror}") from error


def read_json(file: Path, what: str, **needed: type) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Args:
        file: Its path.
        what: What it should be, for the error.
        needed: Names that it must have, and their types.

    Raises:
        PhantomError: It cannot be read, or is something else.
    """
    try:
        found: Any = json.loads(read(file), parse_int=_size)
    except (ValueError, RecursionError) as error:
        raise PhantomError(f"{file} is no {what}: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise PhantomError(f"{file} is no {what}: it is no JSON object")
    return require(found, f"{file} is no {what}", **needed)


def _size(text: str) -> int | float:
    """Read a whole number; what no number of bytes can be is none."""
    return int(text) if len(text) < 19 else float(text)


def require(found: dict[str, Any], why: str, **needed: type) -> dict[str, Any]:
    """Return an object that has these names, with values of these types.

    Raises:
        PhantomError: It has not; `why` is how the message begins.
    """
    for name, kind in needed.items():
        if type(found.get(name)) is not kind:  # True is an int
            raise PhantomError(f"{why}: its {name!r} is no {kind.__name__}")
    return found


def write(file: Path, data: str | bytes) -> None:
    """Write a whole file, which until then has a name of its own; a pipe or a device as it is.

    Raises:
        PhantomError: It cannot be written.
    """
    data = data.encode() if isinstance(data, str) else data
    try:
        if file.exists() and not file.is_file():
            with open(file, "wb", opener=_at_once) as opened:
                os.set_blocking(opened.fileno(), True)
                opened.write(data)
            return
        whole = Path(os.path.realpath(file))  # of links in a circle, `resolve` raises
        new = whole.with_name(f".{uuid4().hex}.new")
        try:
            with new.open("xb") as opened:
                opened.write(data)
            new.replace(whole)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise PhantomError(f"cannot write {file}: {error.strerror}") from error


def printable(text: object) -> str:
    """Return a text of somebody else's file without what a terminal obeys."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in str(text))


def log_file(folder: Path) -> BinaryIO:
    """Open the file for what a process prints, in a folder of ours."""
    return (folder / "output.log").open("wb")
