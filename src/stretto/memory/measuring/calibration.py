"""Peak memory of real steps, and what a process uses beyond its tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, final

import torch

from stretto.memory.measuring.limits import process_status
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


def footprint(
    work: Callable[[], object], device: torch.device, *, counts_untouched: bool = False
) -> int | None:
    """Return the temporary bytes of some work at its peak; None if the system cannot measure it.

    It is the peak beyond the memory in use before the work, or after it if that is more.

    On CUDA and similar devices it is the memory that the caching allocator reserves. On the CPU it
    is the resident memory of the process. Both include memory outside tensors, such as scratch
    space of convolutions and fragments of freed blocks.

    Args:
        work: the function to measure.
        device: the device that it uses.
        counts_untouched: whether host memory counts that was requested but never touched. Limits
            on the data or address space of a process count it.

    >>> extent = footprint(lambda: torch.ones(2**24), torch.device("cpu"))  # 64 MiB
    >>> extent is None or 60 * 2**20 < extent < 70 * 2**20
    True
    """
    if device.type == "cpu":
        return _resident(work, counts_untouched=counts_untouched)
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "max_memory_reserved"):
        work()
        return None
    module.empty_cache()
    module.reset_peak_memory_stats(device)
    before = module.memory_reserved(device)
    work()
    module.synchronize(device)
    return int(module.max_memory_reserved(device) - before)


def _resident(work: Callable[[], object], *, counts_untouched: bool) -> int | None:
    # Writing 5 here resets the high-water mark of resident memory (Linux).
    reset = Path("/proc/self/clear_refs")
    if sys.platform != "linux":
        work()
        return None
    release_memory(scratch=False)  # freed but resident memory could be reused unnoticed
    try:
        reset.write_text("5", encoding="ascii")
    except OSError:  # not allowed in some containers
        work()
        return None
    before = process_status()
    work()
    peak = process_status()
    release_memory(scratch=False)
    after = process_status()
    if "VmRSS" not in before or "VmHWM" not in peak:
        return None
    took = max(peak["VmHWM"] - max(before["VmRSS"], after["VmRSS"]), 0)
    # VmPeak is never reset: it shows only work that requests more than ever before.
    if counts_untouched and peak["VmPeak"] > before["VmPeak"]:
        took = max(took, peak["VmPeak"] - max(before["VmSize"], after["VmSize"]))
    return took
