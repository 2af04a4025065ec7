"""The input of a search for a batch size, and the ranks that look for one answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

from stretto.errors import FitError
from stretto.memory.measuring.limits import MemoryLimit, allocated_bytes, free_memory
from stretto.memory.prediction.trace import step_tensors
from stretto.memory.search import CandidateSizes
from stretto.memory.step import WholeStep

_FAILED = -1


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


@final
class Agreement:
    """Lets ranks agree on the least of their numbers.

    Args:
        agree_minimum: returns the least of a number over all ranks; None: there is one rank.

    >>> Agreement(lambda number: min(number, 3)).minimum(lambda: 8)
    3
    """

    def __init__(self, agree_minimum: Callable[[int], int] | None = None) -> None:
        self._agree = agree_minimum

    def minimum(self, work: Callable[[], int]) -> int:
        """Do some work on every rank, and return the least number that came of it on any.

        An error on one rank ends the search on all: the others get a `FitError`, and none waits.

        Raises:
            FitError: another rank has failed.
        """
        if self._agree is None:
            return work()
        try:
            number = work()
        except BaseException:
            self._agree(_FAILED)
            raise
        least = self._agree(number)
        if least == _FAILED:
            raise FitError.cannot(
                "find a batch size on this rank alone",
                why="another rank has failed",
                instead="look for the error that it shows",
            )
        return least

    def all(self, work: Callable[[], bool]) -> bool:
        """Do some work on every rank, and return whether it succeeded on all."""
        return self.minimum(lambda: int(work())) == 1
