"""What the noise of a step's gradient is measured from: its micro-batches, on all ranks.

Each pass leaves `c_j = a n_j g_j` in the parameters, where `g_j` is the mean gradient of a
micro-batch of `n_j` units. With `N` units in the step that the loss is divided by and W ranks, `a`
is `W / N`; where the pass itself averages over ranks (FSDP2), it is `1 / N` and `n_j` is counted
over all of them. The sums of `NoiseSums` follow, whatever N turns out to be in the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

from torch import nn

from stretto.checkpoint.sharding import is_spread
from stretto.data import DataSpec, MicroBatch, Step
from stretto.noise import MicroGradients, NoiseSums
from stretto.training.ranks import Ranks

NOTHING = NoiseSums(0.0, 0.0, 0.0, 0.0)
"""What a step gives in which nothing is measured."""


@final
class NoiseMeter:
    """Measures the gradients of micro-batches while a step accumulates them.

    A step that would be one pass, on a single rank or a fully sharded model, is cut into two.

    Args:
        model: the model as the loss function gets it (averaged over ranks).
        parameters: those that are trained.
        spec: cuts batches.
        ranks: the processes of the run.
        every: in how many steps to measure once.
        is_sharded: whether each pass of the model is one of all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        spec: DataSpec,
        ranks: Ranks,
        every: int,
        is_sharded: bool,
    ) -> None:
        self._gradients = MicroGradients(parameters)
        self._spec = spec
        self._ranks = ranks
        self._every = every
        self.averages_each = is_sharded
        """Whether gradients must be averaged in each pass of a step that is measured."""
        self._copies = _copies(parameters) if is_sharded else 1
        self._units: list[int] = []
        self._divisor = 1.0
        self._is_complete = False
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._gradients.attach(model)

    def is_due(self, step: Step) -> bool:
        """Return whether this step is measured."""
        # Each number of a batch comes exactly once, so that no multiple is ever jumped over.
        return step.timestamp.batch % self._every == 0

    def begin(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Forget the step before; return what to compute."""
        self._gradients.begin()
        self._units = []
        self._is_complete = False
        several = self._ranks.world_size > 1
        if len(micro_batches) > 1 or (several and not self.averages_each):
            return micro_batches
        return [half for micro in micro_batches for half in self._halves(micro, several=several)]

    def expect(self, *, is_averaged: bool) -> None:
        """Note that a pass comes, and whether ranks average what has been accumulated in it."""
        if is_averaged and self._ranks.world_size > 1 and not self.averages_each:
            self._gradients.expect_average()

    def take(self, units: int, *, is_last: bool, divisor: float) -> None:
        """Measure what the pass of a micro-batch of `units` left.

        Args:
            units: what its loss was weighed with.
            is_last: whether the gradient is complete.
            divisor: what the loss was divided by: the units of the step.
        """
        self._gradients.take(is_last=is_last)
        self._units.append(units)
        self._divisor, self._is_complete = divisor, is_last

    def forget(self) -> None:
        """Let go of what an unfinished step left."""
        self._gradients.begin()
        self._is_complete = False

    def sums(self, scale: float) -> NoiseSums:
        """Return this rank's part of what the terms follow from; nothing where none was measured.

        Every rank must call it, before the gradient is changed.

        Args:
            scale: what the loss was multiplied by, to keep small gradients from vanishing.
        """
        if not self._is_complete:
            return NOTHING
        self._is_complete = False
        *squares, whole = self._gradients.read()
        # Where each pass is one of all ranks, so are its units; and each holds a part of the norm.
        units = self._ranks.agree(self._units) if self.averages_each else self._units
        unit = self._divisor / scale / (1 if self.averages_each else self._ranks.world_size)
        weighted = math.fsum(
            square / count for square, count in zip(squares, units, strict=True) if count
        )
        speaks = not self.averages_each or self._ranks.is_first
        counts = self.averages_each or self._ranks.is_first
        return NoiseSums(
            weighted * unit * unit / self._copies,
            sum(count > 0 for count in units) if speaks else 0,
            sum(self._units),
            whole * (self._divisor / scale) ** 2 / self._copies if counts else 0.0,
        )

    def _halves(self, micro: MicroBatch, *, several: bool) -> list[MicroBatch]:
        count = micro.num_samples
        if count < 2 or not micro.weight:
            # All ranks run the same number of passes.
            return [micro, MicroBatch(micro.batch, 0, 0, 0.0)] if several else [micro]
        cut = (count + 1) // 2
        return [self._part(micro, slice(0, cut)), self._part(micro, slice(cut, count))]

    def _part(self, micro: MicroBatch, part: slice) -> MicroBatch:
        size = part.stop - part.start
        batch: Any = self._spec.take_samples(micro.batch, part, micro.num_samples)
        tokens = self._spec.count_tokens(batch) if micro.num_tokens else 0
        return MicroBatch(batch, size, tokens or 0, micro.weight * size / micro.num_samples)


def _copies(parameters: Sequence[nn.Parameter]) -> int:
    """On how many ranks each part of a sharded model lies."""
    shapes = [p.device_mesh.shape for p in parameters if is_spread(p)]
    return math.prod(shapes[0][:-1]) if shapes else 1
