"""Run any CUDA script without a GPU and see what memory it takes.

    import phantomgpu

    report = phantomgpu.run("train.py", gpu="h100", args=["--batch-size", "16"])
    print(report)

torch's own CUDA build runs, with its dispatcher, autograd and caching allocator. The libraries
below it are stand-ins: they count memory as a driver does, and their kernels do nothing.
"""

from __future__ import annotations

from phantomgpu.errors import (
    NotSupportedError,
    PhantomError,
    RunFailedError,
    SetupNeededError,
    UnknownGPUError,
)
from phantomgpu.gpus import GPU, GPUS
from phantomgpu.report import Report
from phantomgpu.running import run
from phantomgpu.searching import Answer, search

__all__ = [
    "Answer",
    "GPU",
    "GPUS",
    "NotSupportedError",
    "PhantomError",
    "Report",
    "RunFailedError",
    "SetupNeededError",
    "UnknownGPUError",
    "run",
    "search",
]
