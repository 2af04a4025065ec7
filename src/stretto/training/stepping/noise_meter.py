"""Measures the gradient noise of a step from its micro-batches on all ranks.

Each pass leaves `c_j = a n_j g_j` in the parameters, where `g_j` is the mean gradient of a
micro-batch of `n_j` units. With `N` units in the step and W ranks, `a` is `W / N`. If the pass
itself averages over ranks (FSDP2), `a` is `1 / N`, and `n_j` is counted over all ranks. The sums
of `NoiseSums` follow for any N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

from torch import nn

from stretto.checkpoint.sharding import is_dtensor
from stretto.data import DataSpec, MicroBatch, Step
from stretto.distributed.strategy import Strategy
from stretto.errors import DataError
from stretto.noise import MicroGradients, NoiseSums
from stretto.noise.measure import total

NOTHING = NoiseSums(0.0, 0.0, 0.0, 0.0)
"""The sums of a step that is not measured."""


class Pass(NamedTuple):
    """One forward and backward pass of a step."""

    micro: MicroBatch
    units: int
    """The weight of its loss."""
    divisor: float
    """The units of the step, by which the loss is divided."""
    is_last: bool
    """Whether the gradient is complete after it."""


@final
class NoiseMeter:
    """Compares the gradients of the micro-batches of a step.

    A step of one pass on a single rank or with a fully sharded model is cut into two passes. If its
    batch is packed, it is not measured.

    Args:
        parameters: the trained parameters.
        spec: cuts batches.
        strategy: when gradients are averaged over ranks.
        every: measure one of so many steps.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        spec: DataSpec,
        strategy: Strategy,
        every: int,
    ) -> None:
        self.every = every
        self.averages_each = strategy.averaging == "each"
        """Whether gradients must be averaged in each pass of a step that is measured."""
        self.has_finite_gradient = False
        """Whether the norm has shown that this rank's gradient is finite."""
        self._spec = spec
        self._averages_last = strategy.averaging == "last"
        self._strategy, self._ranks = strategy, strategy.ranks
        self._copies = _copies_of_parts(parameters)
        self._divisor = 1.0
        self._is_complete = False
        self._units: list[int] = []
        self._gradients = MicroGradients(parameters)
        strategy.attach(self._gradients)

    def is_due(self, step: Step) -> bool:
        """Return whether to measure this step."""
        return step.timestamp.batch % self.every == 0

    def begin(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Forget the last step and return the micro-batches to run."""
        self._gradients.begin()
        self._units = []
        self._is_complete = False
        several = self._strategy.world_size > 1
        if len(micro_batches) > 1 or (several and not self.averages_each):
            return micro_batches
        return [half for micro in micro_batches for half in self._halves(micro, several=several)]

    @contextmanager
    def measure(self, one: Pass) -> Iterator[None]:
        """Measure the gradient of one pass."""
        is_averaged = one.is_last and self._averages_last
        with self._gradients.watch(is_last=one.is_last, is_averaged=is_averaged):
            yield
        self._units.append(one.units)
        self._divisor, self._is_complete = one.divisor, one.is_last

    def forget(self) -> None:
        """Release the gradients of the last step, finished or not."""
        self._gradients.begin()
        self._is_complete = self.has_finite_gradient = False

    def sums(self, scale: float) -> NoiseSums:
        """Return this rank's sums; zeros if the step was not measured.

        Every rank must call it, before the gradient is changed.

        Args:
            scale: the loss scale.
        """
        if not self._is_complete:
            return NOTHING
        self._is_complete = False
        *squares, whole = self._gradients.read()
        self.has_finite_gradient = math.isfinite(whole)
        # If each pass is collective, units are of all ranks, and each rank has a part of the norm.
        units = self._ranks.total(self._units) if self.averages_each else self._units
        unit = self._divisor / scale / (1 if self.averages_each else self._strategy.world_size)
        weighted = total(
            square / count for square, count in zip(squares, units, strict=True) if count
        )
        is_first = self._ranks.is_first
        square_of_whole = whole * (self._divisor / scale) ** 2 / self._copies
        return NoiseSums(
            weighted * unit * unit / self._copies,
            sum(count > 0 for count in units) if is_first or not self.averages_each else 0,
            sum(self._units),
            square_of_whole if is_first or self.averages_each else 0.0,
        )

    def _halves(self, micro: MicroBatch, *, several: bool) -> list[MicroBatch]:
        count = micro.num_samples
        if count > 1 and micro.weight:
            cut = (count + 1) // 2
            try:
                parts = slice(0, cut), slice(cut, count)
                return [self._spec.cut(micro, part) for part in parts]
            except DataError:
                pass  # packed: like a single sample, it cannot be measured
        # All ranks run the same number of passes. If each rank has one sample, neighbours use
        # different passes; otherwise, one pass would have all samples.
        nothing = MicroBatch(micro.batch, 0, 0, 0.0)
        pair = [nothing, micro] if self._strategy.rank % 2 else [micro, nothing]
        return pair if several else [micro]


def _copies_of_parts(parameters: Sequence[nn.Parameter]) -> int:
    """Return how many ranks hold each part of a sharded model; 1 if it is not sharded."""
    shapes = [p.device_mesh.shape for p in parameters if is_dtensor(p)]
    return math.prod(shapes[0][:-1]) if shapes else 1
