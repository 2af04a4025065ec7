"""What is asked of a search for a batch size."""

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
    """What is asked for."""

    step: WholeStep
    make_batch: Callable[[int], Any]
    """Makes a batch of a size on the device of the step."""
    make_fake: Callable[[int], Any]
    """Makes one that may lie anywhere: for steps on fake tensors."""
    sizes: CandidateSizes
    limit: MemoryLimit
    reserve: int
    is_here: bool
    """Whether the limit is that of the device that the step is on."""
    also: tuple[object, ...] = ()
    device: Literal["cpu", "cuda"] | None = None
    """The kind of device that a prediction is for; None: tensors are counted, wherever they are."""
    reserve_of_probes: int = 0
    """What stays free at least if no step was taken of the size that a probe answers."""
    is_checked: bool = False
    """Whether a step of the answer itself is to be taken."""

    def free_memory(self) -> MemoryLimit:
        """What is free on the device of the step now."""
        return free_memory(self.step.device)

    def static_bytes(self) -> int:
        """Bytes of the step that are there before its forward begins."""
        return allocated_bytes(step_tensors(self.step), self.step.device)
