"""What a process takes beyond its tensors, from a few steps to all sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import final

from stretto.memory.limits import process_status
from stretto.runtime.out_of_memory import release_memory

CHANCE = 0.01
"""The part of what a step takes that it may take or not."""
SIZES_OF_A_RUN = 2
"""A run has micro-batches of one size, and what remains of a batch."""


@final
class Overhead:
    """Bytes on top of what an estimator says, as a function of the size.

    From the largest size that was measured it grows as it did between the last two, and at least in
    proportion to the size; it never shrinks. A percent of what a step takes is what the same step
    varies by: so much stays as it is, and what is beyond it grows.

    >>> overhead = Overhead()
    >>> overhead.note(10, took=1100, predicted=1000)
    >>> overhead.note(20, took=2300, predicted=2000)
    >>> overhead.at(40), overhead.at(20)
    (654, 300)
    """

    def __init__(self) -> None:
        self._noted: dict[int, int] = {}
        self._took: dict[int, int] = {}
        self.is_known = True
        """Whether every step that was taken could be measured."""

    def note(self, size: int, took: int | None, predicted: int) -> None:
        """Note what a step took, and what the estimator had said; both beyond what was there."""
        if took is None:
            self.is_known = False
        else:
            self._noted[size] = max(took - predicted, 0)
            self._took[size] = took

    def at(self, size: int) -> int:
        """Return what comes on top at a size."""
        if not self._noted:
            return 0
        *earlier, last = sorted(self._noted)
        extra = self._noted[last]
        if size <= last:
            return -(-extra * size // last)
        chance = math.ceil(CHANCE * self._took[last])
        growths = [Fraction(0), Fraction(extra - chance, last)]
        if earlier:
            growths.append(Fraction(extra - self._noted[earlier[-1]] - chance, last - earlier[-1]))
        return extra + math.ceil(max(growths) * (size - last))


@final
class RetainedMemory:
    """What steps leave behind in a process for good, and how much of that a run would, too.

    Libraries prepare themselves once for each shape (oneDNN keeps 9 MiB for each size of a batch of
    a small CNN). A search meets more sizes than a run does.

    Args:
        room: tells how many bytes there are for a step.
        is_limited: whether what counts was asked for, rather than what is resident.

    >>> retained = RetainedMemory(lambda: 1000, is_limited=False)
    >>> retained.watch(lambda: None)
    >>> retained.room_in_run(sizes=2)
    1000
    """

    def __init__(self, room: Callable[[], int], *, is_limited: bool) -> None:
        self._room = room
        self._counts = "VmData" if is_limited else "VmRSS"
        self._of_a_size = 0
        self._left: int | None = None

    def watch(self, work: Callable[[], object]) -> None:
        """Do some work of a size that was not there before."""
        release_memory()
        before = self._own()
        work()
        # The scratch of this one step is there in a run, too.
        release_memory(scratch=False)
        self._left = self._room()
        release_memory()
        self._of_a_size = max(self._own() - before, 0)

    def room_in_run(self, sizes: int) -> int | None:
        """Return the bytes that a run would have after steps of so many sizes; None: unknown."""
        if self._left is None:
            return None
        return self._left + self._of_a_size * max(0, sizes - SIZES_OF_A_RUN)

    def _own(self) -> int:
        return process_status().get(self._counts, 0)
