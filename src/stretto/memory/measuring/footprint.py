"""Measure the real peak memory of some work, including scratch memory and fragments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stretto.memory.limits import process_status
from stretto.runtime.out_of_memory import release_memory


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
