"""The accelerator of this machine: a GPU, the phantom, or none.

The phantom is a build of torch for CUDA whose device counts memory and computes nothing: what is
read back from it is zero or garbage. So tests of memory, control flow, files and the clock run on
it, and tests of values do not.
"""

from __future__ import annotations

import os
from functools import cache

import torch

DEVICE = "cuda"
MIB = 1 << 20


@cache
def is_phantom() -> bool:
    """Return whether the accelerator computes nothing."""
    return torch.cuda.is_available() and "PHANTOMGPU_RUN" in os.environ


def why_not(marker: str) -> str | None:
    """Return why a test with this marker cannot run here; None if it can."""
    if not torch.cuda.is_available():
        return "needs an accelerator"
    if marker == "gpu" and is_phantom():
        return "needs values, and the phantom computes none"
    return None


def warm_up() -> None:
    """Multiply once in each thread that does, so that cuBLAS has its workspaces."""
    layer = torch.nn.Linear(8, 8, device=DEVICE)
    layer(torch.zeros(4, 8, device=DEVICE)).sum().backward()


def leave(room: int | None) -> None:
    """Leave so many bytes to this process beside what it holds; None: all that there is."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = total if room is None else torch.cuda.memory_reserved() + room
    torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0))
