"""The memory of a device that a step may use."""

from __future__ import annotations

import torch

from stretto.errors import FitError, shown
from stretto.memory.amounts import parse_bytes, show_bytes
from stretto.memory.measuring.limits import MemoryLimit, allocated_bytes, free_memory
from stretto.memory.prediction.cuda.gpu import Gpu
from stretto.memory.prediction.tensors import step_tensors
from stretto.memory.step import WholeStep
from stretto.runtime.out_of_memory import release_memory


def memory_limit(step: WholeStep, device_memory: str | int | None) -> MemoryLimit:
    """Return the memory that a step may use in total."""
    if device_memory is not None:
        stated = parse_bytes(device_memory)
        if not stated:
            raise FitError.cannot(
                f"find a batch size for device_memory={shown(device_memory)}",
                why="it is not above zero",
                instead="write for example 80GiB, or leave it out to use this machine's memory",
            )
        return MemoryLimit(stated, "as stated")
    if step.device.type == "meta":
        raise FitError.cannot(
            "find a batch size for a model on the meta device",
            why="it is on no device whose memory could be looked at",
            instead="pass device_memory, for example '80GiB'",
        )
    release_memory()
    free = free_memory(step.device)
    tensors: list[torch.Tensor] = step_tensors(step)
    tensors += [p.grad for p in step.parameters if p.grad is not None]
    return MemoryLimit(free.bytes + allocated_bytes(tensors, step.device), free.source)


def context_bytes(
    step: WholeStep,
    gpu: Gpu | None,
    context: str | int | None,
    limit: MemoryLimit,
    *,
    is_here: bool,
) -> int:
    """Return what the CUDA context takes of the memory of a device that is not here.

    Raises:
        FitError: there is no GPU to ask about, or nothing is left beside the context.
    """
    if gpu is None:
        if context is not None:
            raise FitError.cannot(
                f"leave context={shown(context)} for a context",
                why="only CUDA has one",
                instead="pass device='cuda', or leave it out",
            )
        return 0
    if is_here:
        if step.device.type != "cuda":
            raise FitError.cannot(
                f"find a batch size for {shown(gpu.name)}",
                why="the model is not on a GPU, so its memory is not known",
                instead="pass device_memory, for example '80GiB'",
            )
        return 0 if context is None else parse_bytes(context)
    taken = gpu.context_bytes if context is None else parse_bytes(context)
    if taken >= limit.bytes:
        raise FitError.cannot(
            f"find a batch size for {limit}",
            why=f"the CUDA context takes {show_bytes(taken)}",
            instead="state more memory, or what the context takes, for example context='300MiB'",
        )
    return taken
