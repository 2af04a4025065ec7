"""Selective backprop, and the warm-up of the sequence length: what of a batch is trained on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from stretto.data import Step
from stretto.data.containers import mapped
from stretto.errors import TrainingError
from stretto.run import Run
from stretto.timing import Time, TimeLike
from stretto.training.callback import Callback, passed_between


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
        self._progress = passed_between(run.horizon, self._start, self._end)
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


@final
class SequenceLengthWarmup(Callback):
    """Cuts sequences to a length that grows from `start` to `end` over a part of the run.

    At progress x the length is `start + x * (end - start)`, rounded down to a multiple of
    `multiple_of` but never below `start` (Li et al. 2021, arXiv 2108.06084, section 4, with its
    linear pacing). What is cut off is not trained on; the clock counts the tokens that are left
    (see `DataSpec.count_tokens`).

    >>> SequenceLengthWarmup(start=32, end=128, over="1Mtok")
    SequenceLengthWarmup(start=32, end=128, over='1000000tok', multiple_of=8)

    Args:
        start: tokens of a sequence in the beginning.
        end: tokens of a sequence in the end.
        over: how long the length grows, in any unit, tokens too.
        multiple_of: lengths are multiples of it.

    Raises:
        TrainingError: the lengths are not positive or do not grow.
    """

    changes_tokens = True

    def __init__(self, start: int, end: int, *, over: TimeLike, multiple_of: int = 8) -> None:
        if not 1 <= start <= end or multiple_of < 1:
            raise TrainingError.cannot(
                f"grow sequences from {start} to {end} by multiples of {multiple_of}",
                why="lengths are at least 1 and grow",
                instead="write SequenceLengthWarmup(start=32, end=128, over='30%')",
            )
        self._start, self._stop, self._multiple = start, end, multiple_of
        self._over = Time(over)
        self.length = start
        self._has_warned = False

    def on_fit_start(self, run: Run) -> None:
        """Resolve the time."""
        self._progress = passed_between(run.horizon, self._over * 0, self._over)

    def on_batch_end(self, run: Run, step: Step) -> None:
        """Warn after the first batch if its tokens cannot be counted."""
        del step
        if not self._has_warned and not run.timer.token:
            warnings.warn(
                "SequenceLengthWarmup cuts batches whose tokens are not counted: no 'input_ids' "
                "name them; pass DataSpec(data, get_num_tokens_in_batch=...) to count them",
                UserWarning,
                stacklevel=2,
            )
        self._has_warned = True

    def on_batch_start(self, run: Run, step: Step) -> None:
        """Set the length of this batch."""
        del run
        grown = self._start + self._progress(step.timestamp) * (self._stop - self._start)
        self.length = max(self._start, int(grown) // self._multiple * self._multiple)
        if grown >= self._stop:
            self.length = self._stop

    def transform_batch(self, run: Run, batch: Any) -> Any:
        """Cut every sequence of the batch."""
        del run
        return mapped(self._cut, batch)

    def _cut(self, tensor: Tensor) -> Tensor:
        """Cut a tensor of shape [samples, tokens, ...]; one without a second dimension stays."""
        return tensor[:, : self.length] if tensor.dim() > 1 else tensor

    def __repr__(self) -> str:
        return (
            f"SequenceLengthWarmup(start={self._start}, end={self._stop}, over='{self._over}', "
            f"multiple_of={self._multiple})"
        )
