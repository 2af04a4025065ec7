"""Append text to a file without losing text while the disk is full."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, final

_BLOCK_BYTES = 1 << 16
"""Read at a time, from the end, to find where the last line ends."""


@final
class Appender:
    """Appends text to a file; text that cannot be written is kept for later.

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
        """Whether the file is empty and no text is waiting."""
        return not (self.is_waiting or self._file.tell())

    @property
    def is_waiting(self) -> bool:
        """Whether text is waiting."""
        return bool(self._texts or self._rest)

    def add(self, text: str) -> None:
        """Add text, which the next flush writes."""
        self._texts.append(text)

    def flush(self) -> None:
        """Write everything to the operating system.

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
            OSError: not all could be written; the rest is lost.
        """
        try:
            self.flush()
        finally:
            self._file.close()


def check_appendable(path: Path) -> None:
    """Check that appending to `path` neither blocks nor fails.

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
    """Truncate a file to `length`, without a partial last line; return the new length.

    Args:
        path: the file. A missing file or a device counts as empty.
        length: None keeps every complete line.
    """
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        whole = _end_of_lines(file, size if length is None else min(size, length))
        if whole < size:
            file.truncate(whole)
    return whole


def cut_with_note(path: Path, length: int | None, batch: int) -> str | None:
    """Truncate a file as `cut_back` does; return what it lacks, if anything.

    Args:
        path: the file.
        length: None keeps every complete line.
        batch: the batch after which the file had that length.
    """
    size = path.stat().st_size if path.is_file() else 0
    left = cut_back(path, length)
    if length is not None and left < length:
        return (
            f"lacks {length - left:,} of the {length:,} bytes it had when the checkpoint "
            f"was written; lines from before batch {batch} are missing"
        )
    if length is None and left < size:
        return "ends in half a line, which is cut off"
    return None


def _end_of_lines(file: BinaryIO, end: int) -> int:
    """Return the end of the last complete line before `end`."""
    while end:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def synchronize_file(path: Path) -> None:
    """Flush a file to disk (fsync); devices are ignored.

    Raises:
        OSError: it fails; the error names the file.
    """
    try:
        with path.open("rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise
