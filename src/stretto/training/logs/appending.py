"""Text at the end of a file, of which nothing is lost while the disk is full."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, final

_BLOCK_BYTES = 1 << 16
"""Read at a time, from the end, to find where the last line ends."""


@final
class Appender:
    """Appends text to a file; what cannot be written yet is kept, and written later.

    >>> lines = Appender(Path("lines.txt"))
    >>> lines.add("one ")
    >>> lines.close()
    >>> Path("lines.txt").read_text()
    'one '

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._texts: list[str] = []
        self._rest = b""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in the file, and nothing on its way there."""
        return not (self.is_waiting or self._file.tell())

    @property
    def is_waiting(self) -> bool:
        """Whether something is not written yet."""
        return bool(self._texts or self._rest)

    def add(self, text: str) -> None:
        """Take text, which the next flush writes."""
        self._texts.append(text)

    def flush(self) -> None:
        """Hand everything to the operating system.

        Raises:
            OSError: not all of it could be written; the rest is kept.
        """
        self._rest += "".join(self._texts).encode()
        self._texts.clear()
        while self._rest:
            self._rest = self._rest[self._file.write(self._rest) :]

    def close(self) -> None:
        """Flush and close the file.

        Raises:
            OSError: not all could be written; what is left is lost.
        """
        try:
            self.flush()
        finally:
            self._file.close()


def check_appendable(path: Path) -> None:
    """Check that appending to `path` would not wait for a reader, nor fail.

    Raises:
        OSError: it is a folder, a pipe or a socket, or it cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        kind = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise OSError(0, f"it is {kind.get(stat.S_IFMT(mode), 'a device')}", str(path))


def cut_back(path: Path, length: int | None) -> int:
    """Cut a file of lines to `length`, and any half line off its end; return how long it is then.

    Args:
        path: the file; one that is missing, or a device, counts as empty.
        length: None leaves every whole line.
    """
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        whole = _end_of_lines(file, size if length is None else min(size, length))
        if whole < size:
            file.truncate(whole)
    return whole


def _end_of_lines(file: BinaryIO, end: int) -> int:
    """Where the last line before `end` ends."""
    while end:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def synchronize_file(path: Path) -> None:
    """Have a file on the disk; a device has nothing to keep.

    Raises:
        OSError: it cannot be done; the error names the file.
    """
    try:
        with path.open("rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise
