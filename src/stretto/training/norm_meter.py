"""The noise of a step's gradient from single samples: of its normalisation layers alone.

A sample i of `u_i` units leaves `c_i = a u_i g_i` in the gradient of its rank, where `g_i` is its
own mean gradient; with `N` units in the step that the loss is divided by and W ranks, `a` is
`W / N`. So each sample is a group of `NoiseSums`, whatever micro-batches and ranks it came in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from stretto.data import MicroBatch
from stretto.errors import TrainingError, cannot
from stretto.noise import NoiseSums, NormLayerGradients
from stretto.noise.norms import total
from stretto.training.noise_meter import NOTHING, Measured, NoiseMeter, Pass

_TOLERANCE = 0.05
"""How far what samples gave may be from the gradient; bf16 weights round to 0.4 percent."""


@final
class NormLayerMeter(NoiseMeter):
    """Compares the gradients of the samples of a step, in the passes that are made anyway.

    Args:
        run: what to measure.
        count: counts the units of a batch; None: they are samples.
        changes_batches: whether a batch may have other samples than the loader counted.

    Raises:
        TrainingError: the model has no such layer, or is compiled.
    """

    def __init__(
        self,
        run: Measured,
        *,
        count: Callable[[Any], int] | None,
        changes_batches: bool,
    ) -> None:
        super().__init__(run, averages_each=False)
        self._gradients = NormLayerGradients(run.model, run.parameters)
        self._is_sharded = run.is_sharded
        self._count = count
        self._changes_batches = changes_batches
        # What samples gave is never in one place where the gradient is not either.
        self._is_verified = run.is_sharded
        self._units: list[float] = []

    def begin(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Forget the step before; what is computed stays as it is."""
        self.forget()
        return micro_batches

    @contextmanager
    def measure(self, one: Pass) -> Iterator[None]:
        """Measure what each sample of a pass leaves in the layers."""
        if one.units:
            num_samples = one.micro.num_samples
            if self._changes_batches:
                num_samples = self._spec.count_samples(one.micro.batch)
            self._units += self._units_of(one, num_samples)
            with self._gradients.watch(num_samples):
                yield
        else:
            yield
        self._divisor, self._is_complete = one.divisor, one.is_last

    def forget(self) -> None:
        """Let go of what an unfinished step left."""
        self._gradients.begin()
        self._units = []
        self._is_complete = False

    def sums(self, scale: float) -> NoiseSums:
        """Return this rank's part of what the terms follow from."""
        if not self._is_complete:
            return NOTHING
        self._is_complete = False
        *squares, whole = self._gradients.read()
        self._verify(whole)
        if not self._gradients.has_any:
            return NOTHING
        unit = self._divisor / scale / self._ranks.world_size
        weighted = total(
            square / units for square, units in zip(squares, self._units, strict=True) if units
        )
        counts = self._is_sharded or self._ranks.is_first
        return NoiseSums(
            weighted * unit * unit,
            sum(units > 0 for units in self._units),
            math.fsum(self._units),
            whole * (self._divisor / scale) ** 2 / self._copies if counts else 0.0,
        )

    def _units_of(self, one: Pass, num_samples: int) -> list[float]:
        """How many units each sample has."""
        if self._count is None:
            return [one.units / num_samples] * num_samples
        parts = [slice(index, index + 1) for index in range(num_samples)]
        batch = one.micro.batch
        units = [self._count(self._spec.take_samples(batch, part, num_samples)) for part in parts]
        if sum(units) != one.units:
            raise TrainingError(
                cannot(
                    "tell how much each sample weighs",
                    why=f"those of a micro-batch have {sum(units):,} units one by one, and "
                    f"{one.units:,} together",
                    instead="let loss_weight count what adds up, or write "
                    "noise_from='micro_batches'",
                )
            )
        return [float(count) for count in units]

    def _verify(self, whole: float) -> None:
        """Make sure, with the first gradient that is not zero, that it is what the samples gave."""
        if self._is_verified:
            return
        # On W ranks each has the average and knows what its own samples gave: both sums are W
        # times the square.
        overlap, square = self._ranks.agree((self._gradients.overlap(), whole))
        if not (math.isfinite(overlap) and math.isfinite(square) and square > 0):
            return
        if abs(overlap - square) > _TOLERANCE * square:
            raise TrainingError(
                cannot(
                    "measure the noise of the gradient in normalisation layers",
                    why="more flows into the gradients of their weights than passes through the "
                    "layers, or less",
                    instead="write noise_from='micro_batches'",
                )
            )
        self._is_verified = True
