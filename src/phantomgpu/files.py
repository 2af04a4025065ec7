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
            opened.seek(max(0, found.st_size - last) if last else 0)
            data = opened.read(MOST + 1) or b""
    except OSError as error:
        raise PhantomError(f"cannot read {file}: {error.strerror}") from error
    if len(data) > MOST:
        raise PhantomError(f"cannot read {file}: it has more than {MOST >> 20} MiB")
    return data


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
        found: Any = json.loads(read(file))
    except (ValueError, RecursionError) as error:
        raise PhantomError(f"{file} is no {what}: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise PhantomError(f"{file} is no {what}: it is no JSON object")
    for name, kind in needed.items():
        if type(found.get(name)) is not kind:  # True is an int
            raise PhantomError(f"{file} is no {what}: its {name!r} is no {kind.__name__}")
    return found


def write(file: Path, text: str) -> None:
    """Write a whole file, which until then has a name of its own; a pipe or a device as it is.

    Raises:
        PhantomError: It cannot be written.
    """
    try:
        if file.exists() and not file.is_file():
            with open(file, "w", opener=_at_once) as opened:
                os.set_blocking(opened.fileno(), True)
                opened.write(text)
            return
        new = file.resolve().with_name(f".{uuid4().hex}.new")
        try:
            with new.open("x") as whole:
                whole.write(text)
            new.replace(file.resolve())
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
