"""Text at the end of a file, of which nothing is lost while the disk is full."""

from __future__ import annotations

from pathlib import Path
from typing import final


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
