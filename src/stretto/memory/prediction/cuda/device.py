"""How operations use the memory of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from stretto.memory.prediction.cuda.gpu import Gpu
from stretto.memory.prediction.cuda.scratch import (
    argument_copies,
    kernel_scratch,
    multiplies,
    result_bytes,
)

_aten = torch.ops.aten
KEEPS_WORKSPACES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
"""Whether each thread keeps its cuBLAS workspace. Since torch 2.15, each product allocates one."""
_MAKES_NUMBERS_ON_HOST = {
    None,  # a step count that an optimizer has had before
    _aten.lift_fresh.default,  # torch.tensor(1.0)
    _aten._scaled_dot_product_efficient_attention.default,  # the state of the generator
}


@final
class Cuda:
    """The memory of operations on a GPU; see `TracedDevice`.

    Args:
        gpu: the kind of GPU.
        is_labelled_cpu: whether the traced tensors say that they are on a CPU, because this machine
            has no GPU. Then numbers that stay on the host, such as the step counts of optimizers,
            are recognized by how they are made.
    """

    def __init__(self, gpu: Gpu, *, is_labelled_cpu: bool) -> None:
        self._gpu = gpu
        self._is_labelled_cpu = is_labelled_cpu
        self._workspace = gpu.workspace_bytes()
        self._streams = {torch.cpu._default_cpu_stream: 0}

    def scratch(self, func: Any, args: Sequence[Any], result: Any) -> Sequence[Sequence[int]]:
        """Return the blocks that the kernel allocates for itself."""
        groups = kernel_scratch(func, args, result, self._gpu)
        if multiplies(func) and not KEEPS_WORKSPACES:
            groups = [*groups, [self._workspace]]
        return groups

    def copies(self, func: Any, args: Sequence[Any]) -> Sequence[int]:
        """Return the bytes of the arguments that are copied before the operation."""
        return argument_copies(func, args)

    def result_bytes(self, func: Any, args: Sequence[Any]) -> int | None:
        """Return the bytes of the result's storage; None: those of its elements."""
        return result_bytes(func, args)

    def kept(self, func: Any, phase: str) -> tuple[str, int] | None:
        """Return the cuBLAS workspace of the thread that multiplies.

        Autograd runs backward passes on a thread of its own.
        """
        if not KEEPS_WORKSPACES or not multiplies(func):
            return None
        thread = "autograd" if phase == "backward" else "main"
        return f"cuBLAS workspace of the {thread} thread", self._workspace

    def is_on_host(self, func: Any, tensor: Tensor) -> bool:
        """Return whether a number stays in the memory of the host."""
        if not self._is_labelled_cpu:
            return tensor.device.type == "cpu"
        return tensor.dim() == 0 and func in _MAKES_NUMBERS_ON_HOST

    def stream(self) -> int:
        """Return the number of the current stream; 0 is the default stream.

        Code that overlaps communication with computation uses streams on fake CPU tensors, too.
        """
        if not self._is_labelled_cpu:
            return 0
        return self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
