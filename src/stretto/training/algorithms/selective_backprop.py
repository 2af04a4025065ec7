"""Selective backprop: learn from the samples of a batch that have most to teach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from stretto.data import Step
from stretto.data.containers import mapped
from stretto.errors import TrainingError
from stretto.run import Run
from stretto.timing import Time, TimeLike
from stretto.training.algorithms.stochastic_depth import progress
from stretto.training.callback import Callback


@final
class SelectiveBackprop(Callback):
    """Drops samples of small loss from each micro-batch before the real forward and backward pass.

    A forward pass without gradients ranks the n samples by loss; `keep * n` of them are drawn
    without replacement, each with a chance proportional to its rank's percentile to the power
    `1 / keep` (Jiang et al. 2019, arXiv 1910.00762, section 3). The clock counts all samples.

    >>> SelectiveBackprop(lambda model, batch: model(batch).mean(1), keep=0.5)
    SelectiveBackprop(start='0.5dur', end='0.9dur', keep=0.5)

    Args:
        sample_losses: `f(model, batch)`: the loss of each sample, shape [n].
        start: when dropping begins.
        end: when it ends.
        keep: the part of the samples that is kept.

    Raises:
        TrainingError: `keep` is not in (0, 1).
    """

    def __init__(
        self,
        sample_losses: Callable[[nn.Module, Any], Tensor],
        *,
        start: TimeLike = "50%",
        end: TimeLike = "90%",
        keep: float = 0.5,
    ) -> None:
        if not 0 < keep < 1:
            raise TrainingError.bad("keep", keep, "it is not in (0, 1)", "write a part such as 0.5")
        self._losses = sample_losses
        self._start, self._end, self._keep = Time(start), Time(end), keep

    def on_fit_start(self, run: Run) -> None:
        """Resolve the times."""
        self._progress = progress(run.horizon, self._start, self._end)
        self._is_on = False

    def on_batch_start(self, run: Run, step: Step) -> None:
        """Decide whether this batch is thinned out."""
        del run
        self._is_on = 0 < self._progress(step.timestamp) < 1

    def transform_batch(self, run: Run, batch: Any) -> Any:
        """Keep part of the samples."""
        if not self._is_on:
            return batch
        with torch.no_grad():
            losses = self._losses(run.model, batch)
        count = len(losses)
        percentile = (losses.argsort().argsort() + 1) / count
        kept = max(1, round(self._keep * count))
        chosen = torch.multinomial(percentile ** (1 / self._keep), kept).sort().values

        def selected(tensor: Tensor) -> Tensor:
            return tensor[chosen] if tensor.dim() and len(tensor) == count else tensor

        return mapped(selected, batch)

    def __repr__(self) -> str:
        return f"SelectiveBackprop(start='{self._start}', end='{self._end}', keep={self._keep})"
