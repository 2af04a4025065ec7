"""Run any CUDA script without a GPU and see what memory it takes.

    import phantomgpu

    report = phantomgpu.run("train.py", gpu="h100", args=["--batch-size", "16"])
    print(report)

torch's own CUDA build runs, with its dispatcher, autograd and caching allocator. The libraries
below it are stand-ins: they count memory as a driver does, and their kernels do nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "Answer": "searching",
    "GPU": "gpus",
    "GPUS": "gpus",
    "NotSupportedError": "errors",
    "PhantomError": "errors",
    "Report": "report",
    "RunFailedError": "errors",
    "SetupNeededError": "errors",
    "UnknownGPUError": "errors",
    "run": "running",
    "search": "searching",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phantomgpu' has no attribute {name!r}")
    return getattr(importlib.import_module(f"phantomgpu.{_HOMES[name]}"), name)
