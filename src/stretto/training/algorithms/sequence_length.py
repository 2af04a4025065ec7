"""Sequence length warm-up: short sequences first."""

from __future__ import annotations

import warnings
from typing import Any, final

from torch import Tensor

from stretto.data import Step
from stretto.data.containers import mapped
from stretto.errors import TrainingError
from stretto.run import Run
from stretto.timing import Time, TimeLike
from stretto.training.algorithms.stochastic_depth import progress
from stretto.training.callback import Callback


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
        self._progress = progress(run.horizon, self._over * 0, self._over)

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
