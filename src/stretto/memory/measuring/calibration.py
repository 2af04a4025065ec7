"""Memory that a process uses beyond its tensors, measured in a few steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import final

from stretto.memory.limits import process_status
from stretto.runtime.out_of_memory import release_memory

CHANCE = 0.01
"""Run-to-run variation of peak memory, as a fraction."""
SIZES_OF_A_RUN = 2
"""A run has two micro-batch sizes: the full one and the remainder of a batch."""


@final
class Overhead:
    """Bytes that a step uses beyond an estimate, as a function of the size.

    Beyond the largest measured size it grows at least as fast as between the last two, and at least
    in proportion to the size. It never shrinks. One percent of a step's memory counts as run-to-run
    variation: this part stays constant, and only the rest grows.

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
        """Whether every step could be measured."""

    def note(self, size: int, took: int | None, predicted: int) -> None:
        """Record the measured and the predicted bytes of a step, both beyond static memory."""
        if took is None:
            self.is_known = False
        else:
            self._noted[size] = max(took - predicted, 0)
            self._took[size] = took

    def at(self, size: int) -> int:
        """Return the overhead at a size."""
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
    """Memory that a process retains after steps, and how much of it a run would retain.

    Libraries cache data for each shape: oneDNN keeps 9 MiB for each batch size of a small CNN. A
    search runs more sizes than a training run.

    Args:
        room: returns how many bytes are available for a step.
        is_limited: whether requested memory counts, instead of resident memory.

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
        """Run work with a new size, and record what the process retains."""
        release_memory()
        before = self._own()
        work()
        # A run has the scratch memory of one step, too.
        release_memory(scratch=False)
        self._left = self._room()
        release_memory()
        self._of_a_size = max(self._own() - before, 0)

    def room_in_run(self, sizes: int) -> int | None:
        """Return the bytes available to a run, after steps of this many sizes; None: unknown."""
        if self._left is None:
            return None
        return self._left + self._of_a_size * max(0, sizes - SIZES_OF_A_RUN)

    def _own(self) -> int:
        return process_status().get(self._counts, 0)
