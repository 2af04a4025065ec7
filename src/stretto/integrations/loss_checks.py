"""Checks that the losses of micro-batches may be weighed, for loops and losses of the user's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Self, final

from torch import Tensor, nn

from stretto.data.containers import (
    count_rows,
    join_samples,
    opened,
    take_samples,
)
from stretto.data.weights import Units
from stretto.errors import DataError
from stretto.integrations.shared import Pass, refuse
from stretto.run import BATCH_NORMS, Run
from stretto.runtime.losses import MeanCheck, Reduction, reduction_of

WEIGH = "weigh the losses of micro-batches"
"""What is refused if it is not known, or not a mean, what a loss is over."""
ASK = (
    "pass units= what it is a mean over: 'samples', 'tokens', or a function that counts it, such "
    "as units=lambda batch: batch['mask'].sum(); if it compares samples, have micro-batches as "
    "large as the batch (micro_batch_size)"
)
"""What to write if it is not known."""


def keeps(
    reduction: Reduction,
    pair: Sequence[tuple[Any, int]],
    loss_of: Callable[[Any], float],
    units: Units,
    tolerance: Callable[[], float],
    *,
    is_second: bool = False,
) -> bool:
    """Return whether the loss of a batch is the mean, or sum, of those of its parts.

    Also if that cannot be seen from this batch. `loss_of` is called three times in any case, as
    ranks may meet in it.

    Args:
        reduction: what it should be over its units.
        pair: two micro-batches and their samples, compared with both as one; of one, or of two that
            cannot be joined, the larger is compared with its halves.
        loss_of: returns the loss of a batch.
        units: what it is a mean over: samples, or what a function counts.
        tolerance: relative rounding, asked for when the losses are there.
        is_second: whether the same samples are looked at again, cut in another place; what cannot
            be seen is then no reason to change the verdict.
    """
    whole, parts, sizes = _cut(pair, is_second=is_second)
    first, *losses = [loss_of(batch) for batch in (whole, *parts)]
    if not all(sizes):
        return not is_second
    counts = [units(part) for part in parts] if callable(units) else sizes
    return reduction_of(first, losses, counts, tolerance=tolerance()) in (
        reduction,
        reduction if is_second else None,
    )


def _cut(pair: Sequence[tuple[Any, int]], *, is_second: bool) -> tuple[Any, list[Any], list[int]]:
    """Return a batch, its two parts, and their samples; 0: it could not be cut."""
    batches, sizes = [batch for batch, _ in pair], [size for _, size in pair]
    whole, count = max(pair, key=lambda each: each[1])
    part = count // 2
    if all(_has_rows(batch, size) for batch, size in pair):
        with suppress(DataError):
            if len(pair) > 1 and all(sizes):
                joined = join_samples(batches, sizes)
                if not is_second:
                    return joined, batches, sizes
                whole, count = joined, sum(sizes)
        part = max(1, count // 3) if is_second else part
        with suppress(DataError):
            if 0 < part < count:
                cuts = slice(part), slice(part, count)
                parts = [take_samples(whole, cut, count) for cut in cuts]
                return whole, parts, [part, count - part]
    return whole, [whole, whole], [0, 0]


def _has_rows(node: Any, num_samples: int) -> bool:
    """Return whether everything in a batch has a row for each sample; packed samples have not."""
    if isinstance(node, Tensor):
        return not node.ndim or len(node) == num_samples
    is_list = isinstance(node, list) and len(node) == num_samples
    container = None if is_list else opened(node)
    return container is None or all(_has_rows(item, num_samples) for item in container.items)


def warn_of_batch_norm(*models: nn.Module) -> None:
    """Warn if statistics of a batch are those of a micro-batch."""
    layers = chain.from_iterable(model.modules() for model in models)
    if any(isinstance(layer, BATCH_NORMS) and layer.training for layer in layers):
        said = "BatchNorm normalizes by the statistics of each micro-batch, not of the batch"
        warnings.warn(f"{said}; use GroupNorm instead", RuntimeWarning, stacklevel=2)


@final
class StepChecks:
    """Checks a loop of the user's: its losses, and that it accumulates gradients.

    Args:
        run: the run, bound.
        units: what the user has said that the loss is a mean over.
    """

    def __init__(self, run: Run, units: Units | None) -> None:
        self._run, self._mean = run, MeanCheck(ASK if units is None else None)
        self._passes, self._had_gradient = 0, False

    def begin(self, num_passes: int) -> Self | None:
        """Begin a step; return itself if it is checked.

        Args:
            num_passes: micro-batches of this rank.
        """
        self._passes, self._had_gradient = 0, False
        is_cut = num_passes > 1 or self._run.world_size > 1
        return self if is_cut and self._mean.begin(num_passes) else None

    def before_pass(self, loss: Tensor, present: Pass, accumulation: float) -> None:
        """Refuse a loss that is not known to be a mean, and gradients that were cleared.

        Args:
            loss: the loss of a micro-batch.
            present: the micro-batch.
            accumulation: what the framework divides the loss by.

        Raises:
            TrainingError: it is such a loss, or they were cleared between micro-batches.
        """
        doubt = self._mean.look(
            loss,
            count_rows(present.batch, present.num_samples),
            present.num_samples,
            is_last=present.is_last,
            accumulation=accumulation,
        )
        if doubt is not None:
            refuse((True, WEIGH, *doubt))
        is_cleared = self._had_gradient and not has_gradient(self._run)
        why = "zero_grad() clears that of the micro-batches before"
        instead = "call zero_grad() after optimizer.step(), not before the backward pass"
        refuse((is_cleared, "accumulate the gradient of a step", why, instead))

    def after_pass(self) -> None:
        """Note a backward pass."""
        is_first = self._mean.num_steps == 1  # it reads the gradient
        self._passes, self._had_gradient = self._passes + 1, is_first and has_gradient(self._run)

    def end(self) -> None:
        """Refuse a step of which no backward pass was seen.

        Raises:
            TrainingError: it is such a one.
        """
        instead = "write accelerator.backward(loss)"
        refuse((not self._passes, WEIGH, "the loop calls another backward", instead))


def has_gradient(run: Run) -> bool:
    """Return whether what the optimizers of a run change has a gradient that is not zero."""
    groups = chain.from_iterable(optimizer.param_groups for optimizer in run.optimizers)
    gradients = (parameter.grad for group in groups for parameter in group["params"])
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)
