"""`StepMeter`: measures the noise of the gradient in a loop that is not stretto's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

from torch import nn

from stretto.batching import Signals
from stretto.data import MicroBatch, Step, StepLoader
from stretto.noise import NoiseSums
from stretto.runtime.gradients import is_fully_sharded
from stretto.training.distributed.ranks import Ranks
from stretto.training.stepping.noise_meter import NoiseMeter, Pass


@final
class StepMeter:
    """Measures the noise of a step's gradient from its micro-batches and ranks.

    Each step, in this order:

    1. `micro_batches(step)` returns what to compute. A step of one micro-batch on one rank is cut
       into two, since it takes two to compare.
    2. Each backward pass runs in `watch`.
    3. `signals()` returns what `Run.finish` takes. Call it before gradients are clipped.

    Args:
        model: the model that the loss is computed with, wrapped if it is (DDP, FSDP2).
        loader: the loader of the run.
    """

    def __init__(self, model: nn.Module, loader: StepLoader) -> None:
        parameters = [one for one in model.parameters() if one.requires_grad]
        self._ranks = Ranks(parameters[0].device)
        self._meter = NoiseMeter(
            model,
            parameters,
            spec=loader.spec,
            ranks=self._ranks,
            every=1,
            is_sharded=is_fully_sharded(model),
        )
        self._is_averaged = isinstance(model, nn.parallel.DistributedDataParallel)
        self._size = 0

    @property
    def averages_each(self) -> bool:
        """Whether ranks must average gradients in each pass, not only in the last (FSDP2)."""
        return self._meter.averages_each

    def micro_batches(self, step: Step) -> Sequence[MicroBatch]:
        """Begin a step; return the micro-batches to compute."""
        self._size = step.num_samples
        return self._meter.begin(step.micro_batches)

    def watch(
        self,
        micro: MicroBatch,
        *,
        is_last: bool,
        units: int | None = None,
        divisor: float | None = None,
    ) -> AbstractContextManager[None]:
        """Measure the backward pass inside.

        Args:
            micro: its micro-batch.
            is_last: whether it is the last of the step. DDP averages in this one.
            units: what its loss is weighed by; None: its samples.
            divisor: the units of the whole step, over all ranks; None: its samples.
        """
        units = micro.num_samples if units is None else units
        divisor = float(self._size if divisor is None else divisor)
        is_averaged = is_last and self._is_averaged
        return self._meter.measure(Pass(micro, units, divisor, is_last, is_averaged))

    def signals(self, scale: float = 1.0) -> Signals:
        """Return what the step measured, from all ranks, which must all call it.

        Args:
            scale: what the loss was multiplied by (the loss scaling of fp16).
        """
        sums = NoiseSums(*self._ranks.agree(self._meter.sums(scale)))
        terms = sums.terms(self._size)
        if terms is None:
            return Signals()
        return Signals(
            noise_numerator=terms.numerator,
            noise_denominator=terms.denominator,
            num_samples=self._size,
        )
