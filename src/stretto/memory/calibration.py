"""What a process takes beyond its tensors, from a few steps to all sizes."""

from __future__ import annotations

from typing import final


@final
class Overhead:
    """Bytes on top of what an oracle says, as a function of the size.

    From the largest size that was measured it grows as it did between the last two, and at least in
    proportion to the size; it never shrinks.

    >>> overhead = Overhead()
    >>> overhead.note(10, took=1100, foretold=1000)
    >>> overhead.note(20, took=2300, foretold=2000)
    >>> overhead.at(40), overhead.at(20)
    (700, 300)
    """

    def __init__(self) -> None:
        self._noted: dict[int, int] = {}
        self.is_known = True
        """Whether every step that was taken could be measured."""

    def note(self, size: int, took: int | None, foretold: int) -> None:
        """Note what a step took, and what the oracle had said; both beyond what was there."""
        if took is None:
            self.is_known = False
        else:
            self._noted[size] = max(took - foretold, 0)

    def at(self, size: int) -> int:
        """Return what comes on top at a size."""
        if not self._noted:
            return 0
        *earlier, last = sorted(self._noted)
        extra = self._noted[last]
        proportional = -(-extra * size // last)
        if not earlier or size <= last:
            return proportional
        slope = max(extra - self._noted[earlier[-1]], 0)
        return max(proportional, extra + -(-slope * (size - last) // (last - earlier[-1])))
