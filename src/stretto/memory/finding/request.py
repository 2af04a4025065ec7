"""The input of a search for a batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

from stretto.memory.finding.candidates import CandidateSizes
from stretto.memory.limits import MemoryLimit, allocated_bytes, free_memory
from stretto.memory.prediction.trace import step_tensors
from stretto.memory.step import WholeStep


@final
@dataclass(frozen=True, slots=True)
class Request:
    """The step, the candidate sizes and the memory limit of a search."""

    step: WholeStep
    make_batch: Callable[[int], Any]
    """Makes a batch of a given size on the device of the step."""
    make_fake: Callable[[int], Any]
    """The same on any device, for steps on fake tensors."""
    sizes: CandidateSizes
    limit: MemoryLimit
    reserve: int
    is_here: bool
    """Whether the limit is the memory of the step's own device."""
    also: tuple[object, ...] = ()
    device: Literal["cpu", "cuda"] | None = None
    """The device type to predict for; None: only the bytes of tensors are counted."""
    reserve_of_probes: int = 0
    """The minimum reserve if the size found by a probe was not verified by a step."""
    is_checked: bool = False
    """Whether to verify the answer with a real step."""

    def free_memory(self) -> MemoryLimit:
        """Return the free memory of the step's device."""
        return free_memory(self.step.device)

    def static_bytes(self) -> int:
        """Return the bytes of parameters, buffers and optimizer state on the device."""
        return allocated_bytes(step_tensors(self.step), self.step.device)
