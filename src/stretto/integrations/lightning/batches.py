"""The train dataloader of micro-batches, and how Lightning learns where a step ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, final

from lightning.pytorch import Trainer

from stretto.errors import TrainingError
from stretto.integrations.meter import StepMeter
from stretto.integrations.stock import counted_steps
from stretto.planning.counts import UNKNOWN
from stretto.training.run import Run
from stretto.training.weights import Units


@final
class MicroBatches:
    """The train dataloader: one pass over it is one epoch of micro-batches."""

    def __init__(self, run: Run, units: Units) -> None:
        self.run = run
        """The run: its clock is `run.timer`."""
        self.weight = 1.0
        """The factor of the loss of the present micro-batch."""
        self.is_first = self.is_last = True
        """Whether a step begins with the present micro-batch, or ends with it."""
        self.units: Units = units
        self.meter: StepMeter | None = None
        self.watch: AbstractContextManager[None] = nullcontext()
        """Measures the noise of the present backward pass."""
        self._trainer: Trainer | None = None
        self._accumulation: Accumulation | None = None

    def follow(self, trainer: Trainer, *, is_open: bool) -> None:
        """Begin to set where in a step `trainer` is.

        Args:
            trainer: the trainer.
            is_open: whether the checkpoint that is resumed was written inside a step.
        """
        self._trainer = trainer
        self._set(Accumulation.of(1.0, None, is_first=not is_open, is_last=not is_open))

    def __len__(self) -> int:
        """Return the number of micro-batches in the present epoch, or a number above it.

        It is never unknown: Lightning would fetch a batch ahead to find the end.
        """
        if not self.run.is_bound:
            return UNKNOWN
        if self.run.is_done:
            return 0
        exact = self.run.micro_batches_in_epoch(self.run.timer.epoch).exact
        return UNKNOWN if exact is None else exact

    def __iter__(self) -> Iterator[Any]:
        for step in counted_steps(self.run):
            meter = self.meter
            micros = step.micro_batches if meter is None else meter.micro_batches(step)
            weights = (
                self.run.weights(step, self.units)
                if meter is None
                else [micro.weight for micro in micros]
            )
            last = len(micros) - 1
            for number, (micro, weight) in enumerate(zip(micros, weights, strict=True)):
                self.weight, self.is_first, self.is_last = weight, number == 0, number == last
                if meter is not None:
                    self.watch = meter.watch(micro, is_last=number == last)
                self._begin()
                yield micro.batch

    def _begin(self) -> None:
        """Tell the trainer the weight of the next micro-batch, and where in its step it is."""
        trainer = self._trainer
        assert trainer is not None, "set where the fit starts"
        if trainer.accumulate_grad_batches is not self._accumulation:
            raise TrainingError.cannot(
                f"set accumulate_grad_batches={trainer.accumulate_grad_batches}",
                why="micro-batches follow from the batch size",
                instead="remove the callback that sets it",
            )
        number = trainer.fit_loop.epoch_loop.batch_progress.current.ready + 1
        self._set(
            Accumulation.of(self.weight, number, is_first=self.is_first, is_last=self.is_last)
        )
        trainer.val_check_batch = UNKNOWN
        if self.is_last and self._ends_epoch:
            trainer.fit_loop.max_batches = number

    def _set(self, accumulation: Accumulation) -> None:
        assert self._trainer is not None, "set where the fit starts"
        self._accumulation = self._trainer.accumulate_grad_batches = accumulation

    @property
    def _ends_epoch(self) -> bool:
        """Whether the present step is the last one of the epoch, as far as known."""
        step, num_samples = self.run.step, self.run.horizon.dataset_num_samples
        if not self.run.is_open or step is None or num_samples is None:
            return False
        return step.timestamp.sample_in_epoch + step.num_samples >= num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the callback saves the run. Lightning asks whether this exists."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


@final
class Accumulation(float):
    """`trainer.accumulate_grad_batches`, by which Lightning divides the loss: one over its weight.

    Lightning also asks `number % it == 0` of the number of micro-batches that have begun in the
    epoch (does the optimizer step?) and of the number before (are gradients cleared?).
    """

    number: int | None
    """The number of the micro-batch, from 1; None before the first one of a fit."""
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, weight: float, number: int | None, *, is_first: bool, is_last: bool) -> Self:
        """Return that of a micro-batch."""
        found = cls(1.0 / weight if weight else math.inf)
        found.number, found.is_first, found.is_last = number, is_first, is_last
        return found

    def __rmod__(self, number: Any) -> int:
        return int(not (self.is_last if number == self.number else self.is_first))

    def __reduce__(self) -> Any:
        return int, (1,)
