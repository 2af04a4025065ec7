"""The tensors of a step, and those inside of others."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stretto.data.containers import nodes
from stretto.memory.step import WholeStep

WRAPPERS = {"DTensor", "AsyncCollectiveTensor"}
"""Tensors that hold another one."""


def state_tensors(step: WholeStep) -> list[Tensor]:
    """Return the tensors of the optimizers' state."""
    return tensors_in([list(one.state.values()) for one in step.optimizers])


def step_tensors(step: WholeStep) -> list[Tensor]:
    """Return the static tensors of a step: parameters, buffers and optimizer state."""
    return [*step.model.parameters(), *step.model.buffers(), *state_tensors(step)]


def inner(tensor: Tensor) -> Tensor:
    """Return the tensor with the memory of this rank."""
    if type(tensor).__name__ not in WRAPPERS:
        return tensor
    held: Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor.elem  # type: ignore[attr-defined]
    return inner(held)


def tensors_in(batch: Any) -> list[Tensor]:
    """Return all tensors in nested containers."""
    return [node for node in nodes(batch) if isinstance(node, Tensor)]
