"""The train dataloader of micro-batches, and how Lightning learns where a step ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from stretto.integrations.meter import StepMeter
from stretto.integrations.run import ExternalRun
from stretto.integrations.weights import Units

UNKNOWN = 2**40
"""Stands for a number of batches that is not known; more than any epoch has."""


@final
class MicroBatches:
    """The train dataloader: one pass over it is one epoch of micro-batches."""

    def __init__(self, run: ExternalRun, units: Units) -> None:
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
        for step in self.run.steps():
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
                yield micro.batch

    @property
    def ends_epoch(self) -> bool:
        """Whether the present micro-batch is the last one of the epoch, as far as known."""
        step, num_samples = self.run.step, self.run.horizon.dataset_num_samples
        if step is None or num_samples is None or not self.is_last:
            return False
        return step.timestamp.sample_in_epoch + step.size >= num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the callback saves the run. Lightning asks whether this exists."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


@final
class Accumulation(int):
    """`trainer.accumulate_grad_batches`: 1, so that losses are not divided.

    Lightning asks `number % it == 0` of the number of micro-batches that have begun in the epoch
    (does the optimizer step?) and of the number before (are gradients cleared?).
    """

    batches: MicroBatches
    begun: int | None = None
    """The number of the present micro-batch, from 1; None before the first one of a fit."""
    is_open = False
    """Whether the checkpoint that is resumed was written inside a step."""

    def __rmod__(self, number: Any) -> int:
        if self.begun is None:
            return int(self.is_open)
        if number == self.begun:
            return int(not self.batches.is_last)
        return int(not self.batches.is_first)

    def __reduce__(self) -> Any:
        return int, (1,)
