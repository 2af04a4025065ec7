"""Run real steps of any size in a sandbox: whether they fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

from stretto.memory.alone import alone, recover
from stretto.memory.limits import bounded
from stretto.memory.sandbox import sandbox
from stretto.memory.step import WholeStep
from stretto.runtime import TrainStep
from stretto.runtime.out_of_memory import attempt, release_memory

_WARM_UP_SIZE = 2
"""Samples of the step that creates the optimizer state; batch normalisation refuses 1."""


@contextlib.contextmanager
def trials(
    step: TrainStep | WholeStep, make_batch: Callable[[int], Any], *, reserve: int = 0
) -> Iterator[Trials]:
    """Run real steps of any size and restore everything afterwards, to the last bit.

    Args:
        step: the step.
        make_batch: makes a batch of a given size on the model's device, or an iterator over the
            batches that all have to fit.
        reserve: bytes that a step must leave free.

    >>> import torch
    >>> from stretto.runtime import SupervisedStep
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = SupervisedStep(model, optimizer, lambda model, x: model(x).mean())
    >>> with trials(step, lambda size: torch.ones(size, 2)) as tried:
    ...     tried.fits(8), tried.num_samples
    (True, 10)

    Raises:
        FitError: the model is sharded in a way that cannot be tried on one rank alone.
    """
    whole = WholeStep.of(step)
    with sandbox(whole.model, vars(whole.step)) as undo:
        try:
            yield Trials(whole, make_batch, undo=undo, reserve=reserve)
        finally:
            release_memory()


@final
class Trials:
    """Runs steps; made by `trials`."""

    def __init__(
        self,
        step: WholeStep,
        make_batch: Callable[[int], Any],
        *,
        undo: Callable[[], None],
        reserve: int = 0,
    ) -> None:
        self._step, self._make_batch, self._by_itself = step, make_batch, alone(step.model)
        self._undo, self._reserve = undo, reserve
        self._is_warm = False
        self.num_samples = 0
        """Samples processed, or tokens."""
        self.num_steps = 0
        """Steps that were started."""
        self.num_out_of_memory = 0
        """Steps that ran out of memory."""

    def fits(self, size: int) -> bool:
        """Run a step and return whether it fits into memory.

        The optimizer state exists before, as in every step of a run but the first. If memory runs
        out, everything is restored, because the optimizer may have stopped halfway.
        """
        if not self._is_warm:
            self._is_warm = self._run(min(size, _WARM_UP_SIZE))
        return self._is_warm and self._run(size)

    def _run(self, size: int) -> bool:
        release_memory(scratch=False)  # in a run, steps of other sizes leave scratch memory, too
        self.num_steps += 1
        self.num_samples += size * self._step.accumulation
        with bounded(self._step.device, self._reserve), self._by_itself:
            done = attempt(lambda: self._steps(size), in_finder=True)
        if done.out_of_memory is None:
            return True
        self.num_out_of_memory += 1
        recover(self._step.model)
        self._undo()
        self._is_warm = False
        return False

    def _steps(self, size: int) -> None:
        made = self._make_batch(size)
        for batch in made if isinstance(made, Iterator) else [made]:
            self._step.run(batch)
