"""Run real steps of any size in a sandbox: whether they fit, and their memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

from torch import nn

from stretto.errors import FitError
from stretto.memory.measuring.calibration import footprint
from stretto.memory.measuring.limits import bounded, free_memory
from stretto.memory.measuring.sandbox import sandbox
from stretto.memory.step import WholeStep
from stretto.runtime import TrainStep
from stretto.runtime.out_of_memory import attempt, release_memory

WARM_UP_SIZE = 2
"""Samples of the step that creates the optimizer state; batch normalisation refuses 1."""


@contextlib.contextmanager
def trials(
    step: TrainStep | WholeStep,
    make_batch: Callable[[int], Any],
    *,
    reserve: int = 0,
    smallest: int = WARM_UP_SIZE,
) -> Iterator[Trials]:
    """Run real steps of any size and restore everything afterwards, to the last bit.

    Args:
        step: the step.
        make_batch: makes a batch of a given size on the model's device.
        reserve: bytes that a step must leave free.
        smallest: samples of the step that creates the optimizer state.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = SupervisedStep(model, optimizer, lambda model, x: model(x).mean())
    >>> with trials(step, lambda size: torch.ones(size, 2)) as tried:
    ...     tried.fits(8), tried.num_samples
    (True, 10)

    Raises:
        FitError: the model communicates with other ranks in its forward pass.
    """
    whole = WholeStep.of(step)
    _check(whole.model)
    on_disk = whole.device.type == "cpu"
    with sandbox(whole.model, vars(whole.step), on_disk=on_disk) as undo:
        try:
            yield Trials(whole, make_batch, undo=undo, reserve=reserve, smallest=smallest)
        finally:
            release_memory()


@final
class Trials:
    """Runs steps; made by `trials`.

    Attributes:
        num_samples: number of samples processed.
        sizes: batch sizes of the steps.
        num_steps: number of steps that were started.
        num_out_of_memory: number of steps that ran out of memory.
        last_error: message of the last out-of-memory error.
    """

    def __init__(
        self,
        step: WholeStep,
        make_batch: Callable[[int], Any],
        *,
        undo: Callable[[], None],
        reserve: int = 0,
        smallest: int = WARM_UP_SIZE,
    ) -> None:
        self._step = step
        self._smallest = smallest
        self._make_batch = make_batch
        self._undo = undo
        self._reserve = reserve
        self._is_warm = False
        self.num_samples = 0
        self.sizes: set[int] = set()
        self.num_steps = 0
        self.num_out_of_memory = 0
        self.last_error: str | None = None

    def fits(self, size: int) -> bool:
        """Run a step and return whether it fits into memory.

        The optimizer state exists before, as in every step of a run but the first. If memory runs
        out, everything is restored, because the optimizer may have stopped halfway.
        """
        return self.warm_up(size) and self._run(size)

    def footprint(self, size: int) -> int | None:
        """Run a step and return its memory beyond static memory; None if unknown.

        If memory runs out, `num_out_of_memory` grows.
        """
        found: list[int | None] = []
        if self.warm_up(size):
            device = self._step.device
            limited = device.type == "cpu" and free_memory(device).source.startswith("RLIMIT")

            def measure(work: Callable[[], object]) -> None:
                found.append(footprint(work, device, counts_untouched=limited))

            self._run(size, measure)
        return found[0] if found else None

    def warm_up(self, size: int) -> bool:
        """Run one small step that creates the optimizer state; return whether it fits."""
        if not self._is_warm:
            self._is_warm = self._run(min(size, self._smallest))
        return self._is_warm

    def _run(
        self, size: int, around: Callable[[Callable[[], object]], object] | None = None
    ) -> bool:
        """Run a step; return whether it fits into memory."""
        release_memory(scratch=False)  # in a run, steps of other sizes leave scratch memory, too
        self.num_steps += 1
        self.num_samples += size * self._step.accumulation
        self.sizes.add(size)

        def work() -> None:
            self._step.run(self._make_batch(size))

        with bounded(self._step.device, self._reserve):
            done = attempt(work if around is None else lambda: around(work), in_finder=True)
        if done.out_of_memory is None:
            return True
        self.num_out_of_memory += 1
        self.last_error = done.out_of_memory
        self._undo()
        self._is_warm = False
        return False


def _check(model: nn.Module) -> None:
    """Refuse a model whose passes communicate with other ranks."""
    names = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if names & {"FSDPModule", "FullyShardedDataParallel"}:
        raise FitError.cannot(
            "try batch sizes with a model that is sharded over ranks",
            why="a rank that runs out of memory would leave the others waiting in the forward",
            instead="predict what fits, with method='predict' and device_memory",
        )
