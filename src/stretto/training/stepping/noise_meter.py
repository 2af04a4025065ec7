"""Measures the noise of a step's gradient from its micro-batches, on all ranks.

Each pass leaves `c_j = a n_j g_j` in the parameters, where `g_j` is the mean gradient of a
micro-batch of `n_j` units. With `N` units in the step that the loss is divided by and W ranks, `a`
is `W / N`; where the pass itself averages over ranks (FSDP2), it is `1 / N` and `n_j` is counted
over all of them. The sums of `NoiseSums` follow, whatever N turns out to be in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, final

from torch import nn

from stretto.checkpoint.sharding import is_dtensor
from stretto.data import DataSpec, MicroBatch, Step
from stretto.errors import DataError
from stretto.noise import MicroGradients, NoiseSums
from stretto.noise.norms import total
from stretto.training.distributed.ranks import Ranks

NOTHING = NoiseSums(0.0, 0.0, 0.0, 0.0)
"""What a step gives in which nothing is measured."""


class Pass(NamedTuple):
    """One forward and backward pass of a step."""

    micro: MicroBatch
    units: int
    """What its loss is weighed with."""
    divisor: float
    """What the loss is divided by: the units of the step."""
    is_last: bool
    """Whether the gradient is complete after it."""
    is_averaged: bool
    """Whether ranks average in it what has been accumulated."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The run whose gradients a meter looks at."""

    model: nn.Module
    """The model as the loss function gets it (averaged over ranks)."""
    parameters: Sequence[nn.Parameter]
    """Those that are trained."""
    spec: DataSpec
    """Cuts batches."""
    ranks: Ranks
    """The processes of the run."""
    every: int
    """In how many steps to measure once."""
    is_sharded: bool
    """Whether each rank has a part of each parameter, and each pass is one of all ranks."""


@final
class NoiseMeter:
    """Compares the gradients of the micro-batches of a step.

    A step that would be one pass, on a single rank or a fully sharded model, is cut into two; if
    its batch is packed, it is not measured.
    """

    def __init__(self, run: Measured) -> None:
        self.every = run.every
        self.averages_each = run.is_sharded
        """Whether gradients must be averaged in each pass of a step that is measured."""
        self.has_finite_gradient = False
        """Whether all of the step's gradient on this rank is known to be finite, by its norm."""
        self._spec = run.spec
        self._ranks = run.ranks
        self._copies = _copies_of_parts(run.parameters) if run.is_sharded else 1
        self._divisor = 1.0
        self._is_complete = False
        self._units: list[int] = []
        self._gradients = MicroGradients(run.parameters)
        if isinstance(run.model, nn.parallel.DistributedDataParallel):
            self._gradients.attach(run.model)

    def is_due(self, step: Step) -> bool:
        """Return whether this step is measured."""
        # Each number of a batch comes exactly once, so that no multiple is ever jumped over.
        return step.timestamp.batch % self.every == 0

    def begin(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Forget the step before; return what to compute."""
        self._gradients.begin()
        self._units = []
        self._is_complete = False
        several = self._ranks.world_size > 1
        if len(micro_batches) > 1 or (several and not self.averages_each):
            return micro_batches
        return [half for micro in micro_batches for half in self._halves(micro, several=several)]

    @contextmanager
    def measure(self, one: Pass) -> Iterator[None]:
        """Measure what a pass leaves in the parameters."""
        several = self._ranks.world_size > 1 and not self.averages_each
        is_averaged = one.is_averaged and several
        with self._gradients.watch(is_last=one.is_last, is_averaged=is_averaged):
            yield
        self._units.append(one.units)
        self._divisor, self._is_complete = one.divisor, one.is_last

    def forget(self) -> None:
        """Let go of what the last step left, and of what an unfinished one did."""
        self._gradients.begin()
        self._is_complete = self.has_finite_gradient = False

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
        self.has_finite_gradient = math.isfinite(whole)
        # Where each pass is one of all ranks, so are its units; and each holds a part of the norm.
        units = self._ranks.agree(self._units) if self.averages_each else self._units
        unit = self._divisor / scale / (1 if self.averages_each else self._ranks.world_size)
        weighted = total(
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
        if count > 1 and micro.weight:
            cut = (count + 1) // 2
            try:
                parts = slice(0, cut), slice(cut, count)
                return [self._spec.cut(micro, part) for part in parts]
            except DataError:
                pass  # packed: such a step says nothing, as one of a single sample
        # All ranks run the same number of passes. Of ranks with a sample each, neighbours have
        # it in different ones, or a single group would have them all.
        nothing = MicroBatch(micro.batch, 0, 0, 0.0)
        pair = [nothing, micro] if self._ranks.rank % 2 else [micro, nothing]
        return pair if several else [micro]


def _copies_of_parts(parameters: Sequence[nn.Parameter]) -> int:
    """Return on how many ranks each part of a sharded model lies; 1 where none is sharded."""
    shapes = [p.device_mesh.shape for p in parameters if is_dtensor(p)]
    return math.prod(shapes[0][:-1]) if shapes else 1
