"""Kinds of GPU, and the facts about them that decide how much memory a step takes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from stretto.errors import FitError, shown

_KIB, _MIB = 1 << 10, 1 << 20
_LARGE_WORKSPACE = {9, 10, 12}
"""Major compute capabilities with a workspace of 32 MiB: Hopper and Blackwell."""
_WORKSPACE_CONFIG = re.compile(r":([0-9]+):([0-9]+)")


@final
@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU.

    >>> GPUS["a100"].workspace_bytes({})
    8519680
    >>> GPUS["h100"].workspace_bytes({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}) // 2**20
    32
    """

    name: str
    capability: tuple[int, int]
    """The compute capability."""
    num_processors: int
    """Streaming multiprocessors. Reductions take scratch memory in proportion."""
    threads_per_processor: int
    """The most threads that are resident on a multiprocessor."""
    context_bytes: int
    """What the CUDA context takes: the driver, torch's kernels, cuBLAS. It differs from driver to
    driver. These are rough figures that were not measured here."""

    def workspace_bytes(self, environment: Mapping[str, str] = os.environ) -> int:
        """Return the bytes of a cuBLAS workspace.

        Each thread that multiplies matrices takes one; cuBLAS and cuBLASLt share it (since
        torch 2.8). `CUBLAS_WORKSPACE_CONFIG` changes its size.
        """
        sizes = _WORKSPACE_CONFIG.findall(environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
        if sizes:
            return sum(int(size) * int(count) * _KIB for size, count in sizes)
        is_large = self.capability[0] in _LARGE_WORKSPACE
        return (4096 * 8 if is_large else 4096 * 2 + 16 * 8) * _KIB


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4", (7, 5), 40, 1024, 350 * _MIB),
        Gpu("v100", (7, 0), 80, 2048, 450 * _MIB),
        Gpu("a100", (8, 0), 108, 2048, 500 * _MIB),
        Gpu("a10", (8, 6), 72, 1536, 400 * _MIB),
        Gpu("rtx3090", (8, 6), 82, 1536, 400 * _MIB),
        Gpu("rtx4090", (8, 9), 128, 1536, 450 * _MIB),
        Gpu("l4", (8, 9), 58, 1536, 400 * _MIB),
        Gpu("l40s", (8, 9), 142, 1536, 450 * _MIB),
        Gpu("h100", (9, 0), 132, 2048, 600 * _MIB),
        Gpu("h200", (9, 0), 132, 2048, 600 * _MIB),
        Gpu("b200", (10, 0), 148, 2048, 700 * _MIB),
        Gpu("rtx5090", (12, 0), 170, 1536, 550 * _MIB),
    )
}
"""The known kinds, by name."""
DEFAULT = GPUS["h100"]


def gpu_named(name: str | None) -> Gpu:
    """Return a kind of GPU; None: an H100.

    Raises:
        FitError: the kind is not known.
    """
    found = DEFAULT if name is None else GPUS.get(str(name).lower().replace(" ", ""))
    if found is None:
        raise FitError.cannot(
            f"predict for the GPU {shown(name)}",
            why="its kind is not known",
            instead=f"write one that is like it: {', '.join(GPUS)}",
        )
    return found
