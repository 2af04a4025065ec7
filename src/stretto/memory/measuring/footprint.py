"""What a piece of work really takes of a device at its peak, scratch and fragments included."""

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
    """Return the bytes that a piece of work takes at its peak, and gives back.

    That is beyond what is taken before it, or after it if that is more.

    On CUDA and its like it is what the caching allocator reserves from the driver, on the CPU what
    of the process is resident: both count what no tensor accounts for, such as the scratch of
    convolutions and the fragments of freed blocks. None where the system does not tell.

    Args:
        work: what to measure.
        device: where it takes memory.
        counts_untouched: whether memory of the host counts that was asked for and never touched,
            as it does for a limit on the data or the address space of a process.

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
    # Linux sets the high-water mark of resident memory back when 5 is written here.
    reset = Path("/proc/self/clear_refs")
    if sys.platform != "linux":
        work()
        return None
    release_memory(scratch=False)  # what was freed and is still resident could be taken unseen
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
    # This mark is never set back: it tells only of work that asks for more than any before it.
    if counts_untouched and peak["VmPeak"] > before["VmPeak"]:
        took = max(took, peak["VmPeak"] - max(before["VmSize"], after["VmSize"]))
    return took
