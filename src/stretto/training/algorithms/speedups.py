"""Speed-ups: callbacks that train on fewer samples, tokens, blocks or layers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from stretto.batching.policy import PositiveInt
from stretto.batching.rows import LENGTH, as_lengths
from stretto.data import Step
from stretto.errors import TrainingError
from stretto.run import Run
from stretto.schedules import BoundSchedule, Periods, Schedule, ScheduleLike, as_schedule
from stretto.schedules.scope import Scope
from stretto.timing import Time, TimeLike
from stretto.training.algorithms.functions import (
    drop_layers,
    find_modules,
    freeze,
    num_of,
    select,
    truncate,
)
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
        return select(batch, losses, self._keep)

    def __repr__(self) -> str:
        return f"SelectiveBackprop(start='{self._start}', end='{self._end}', keep={self._keep})"


@final
@dataclass(frozen=True, slots=True, repr=False)
class _Rounded(Schedule):
    """A schedule in whole numbers, rounded up."""

    inside: Schedule
    multiple_of: PositiveInt

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the numbers over `scope`."""
        at, each = self.inside.within(scope), self.multiple_of
        return lambda timestamp: max(1, math.ceil(at(timestamp) / each)) * each


@final
class SequenceLengthWarmup(Callback):
    """Cuts sequences to a length that follows the clock, such as one that grows.

    What is cut off is not trained on; the clock counts the tokens that are left (see
    `DataSpec.count_tokens`). A plan shows the length (Li et al. 2021, arXiv 2108.06084, section 4,
    grow it linearly). To join samples to longer sequences, write `Trainer(sequence_length=...)`.

    >>> steps = SequenceLengthWarmup("0tok:512 1Mtok:1024")
    >>> from stretto.schedules import Linear
    >>> SequenceLengthWarmup(Linear(32, 128, over="1Mtok"), multiple_of=16)
    SequenceLengthWarmup(Linear(start=32.0, end=128.0, over='1Mtok'), multiple_of=16)

    Args:
        length: tokens of a sequence: a text or a mapping of times, as `PiecewiseConstant` takes
            them, a number, or any schedule, in any unit.
        multiple_of: what lengths of a schedule are rounded up to.

    Raises:
        StrettoError: `length` is none of these.
        TrainingError: cutting would change what the loss means: something in the batch is not cut
            alike, it is packed or padded on the left, or all targets of a sample are cut off. Only
            shapes are looked at after the first batch that is cut.
    """

    changes_tokens = True

    def __init__(
        self,
        length: ScheduleLike | str | Mapping[str, int],
        *,
        multiple_of: int = 8,
    ) -> None:
        if isinstance(length, (str, Mapping)):
            times, lengths = zip(*as_lengths(length).steps, strict=True)
            ends = [*(f"until {time}" for time in times[1:]), "rest"]
            length, multiple_of = Periods(list(zip(ends, lengths, strict=True))), 1
        self._length = _Rounded(as_schedule(length), multiple_of)
        self._has_warned = self._is_checked = False

    @property
    def scheduled_values(self) -> Mapping[str, Schedule]:
        """The length, for the plan."""
        return {LENGTH: self._length}

    def on_fit_start(self, run: Run) -> None:
        """Resolve the times."""
        self._at, self.length = self._length.bind(run.horizon), 0

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
        self.length = int(self._at(step.timestamp))

    def transform_batch(self, run: Run, batch: Any) -> Any:
        """Cut every sequence of the batch.

        Raises:
            TrainingError: the loss would mean something else.
        """
        count, looks = run.spec.get_num_samples_in_batch, not self._is_checked
        cut = truncate(batch, self.length, count=count, looks_at_values=looks)
        self._is_checked = self._is_checked or cut is not batch
        return cut

    def __repr__(self) -> str:
        rounded = self._length
        more = f", multiple_of={rounded.multiple_of}" if rounded.multiple_of not in (1, 8) else ""
        return f"SequenceLengthWarmup({rounded.inside!r}{more})"


@final
class StochasticDepth(Callback):
    """Leaves out whole residual blocks, the deeper the more often.

    Block l of L is left out of a training pass with probability `rate * l / L`, and its residual
    branch is divided by the probability that it is there, so evaluation needs no change (Huang et
    al. 2016, arXiv 1603.09382, section 3, with the division moved to training). The rate grows
    from 0 over `warmup`.

    >>> StochasticDepth(["blocks.0", "blocks.1"], rate=0.2, warmup="5%")
    StochasticDepth(['blocks.0', 'blocks.1'], rate=0.2, warmup='0.05dur')

    Args:
        blocks: names of modules whose output has the shape of their input, first block first.
        rate: how often the deepest one is left out.
        warmup: how long the rate grows; None: it is there from the start.

    Raises:
        TrainingError: no blocks, or a rate that is not in (0, 1).
    """

    def __init__(
        self, blocks: Sequence[str], *, rate: float = 0.2, warmup: TimeLike | None = None
    ) -> None:
        if not blocks or not 0 < rate < 1:
            raise TrainingError.cannot(
                f"leave out the blocks {list(blocks)} at a rate of {rate}",
                why="there are no blocks, or the rate is not in (0, 1)",
                instead="write StochasticDepth(['blocks.0'], rate=0.2)",
            )
        self._blocks = tuple(blocks)
        self._rate = rate
        self._warmup = None if warmup is None else Time(warmup)
        self._now = rate
        self._restore: Callable[[], None] = lambda: None

    def on_fit_start(self, run: Run) -> None:
        """Put chance in front of each block."""
        self._grown = (
            passed_between(run.horizon, self._warmup * 0, self._warmup) if self._warmup else None
        )
        self._restore = drop_layers(run.model, self._blocks, lambda: self._now)

    def on_batch_start(self, run: Run, step: Step) -> None:
        """Set the rate of this batch."""
        del run
        self._now = self._rate * (self._grown(step.timestamp) if self._grown else 1.0)

    def on_fit_end(self, run: Run) -> None:
        """Give every block its own forward pass back."""
        del run
        self._restore()

    def __repr__(self) -> str:
        shown = f", warmup='{self._warmup}'" if self._warmup else ""
        return f"StochasticDepth({list(self._blocks)}, rate={self._rate}{shown})"


@final
class LayerFreezing(Callback):
    """Freezes layers from the first to the last, evenly over a part of the run.

    At progress x through `start` to `end`, the first `floor(x * level * L)` of L layers are frozen
    (FreezeOut, Brock et al. 2017, arXiv 1706.04983, section 3, with a linear schedule). It is a
    function of the time alone, so nothing needs saving. The gradient of a frozen layer is dropped
    before the optimizer sees it, which is right on several ranks too, where all of a model's
    gradients must take part in the averaging; on one rank it is not even computed, unless all
    that the optimizer has is frozen.

    >>> LayerFreezing(["embed", "blocks.0"], start="50%")
    LayerFreezing(['embed', 'blocks.0'], start='0.5dur', end='1dur', level=1.0)

    Args:
        layers: names of modules as in `model.named_modules()`, first to freeze first.
        start: when the first layer may freeze.
        end: when `level` is reached.
        level: the part of the layers that is frozen in the end.

    Raises:
        TrainingError: no layers, or a level that is not in (0, 1].
    """

    def __init__(
        self,
        layers: Sequence[str],
        *,
        start: TimeLike = "50%",
        end: TimeLike = "100%",
        level: float = 1.0,
    ) -> None:
        if not layers or not 0 < level <= 1:
            raise TrainingError.cannot(
                f"freeze {level} of the layers {list(layers)}",
                why="there must be layers, and a part of them in (0, 1]",
                instead="write LayerFreezing(['embed', 'blocks.0'], level=1.0)",
            )
        self._layers = tuple(layers)
        self._start, self._end, self._level = Time(start), Time(end), level
        self.num_frozen = 0
        self._stopped: list[nn.Parameter] = []

    def on_fit_start(self, run: Run) -> None:
        """Find the layers and resolve the times."""
        self._modules = find_modules(run.model, self._layers, "freeze")
        self._progress = passed_between(run.horizon, self._start, self._end)
        self._alone = run.world_size == 1

    def on_batch_start(self, run: Run, step: Step) -> None:
        """Freeze the layers that are due."""
        part = self._progress(step.timestamp) * self._level
        due = num_of(part, self._layers)
        if due > self.num_frozen and self._alone:
            self._stopped += freeze(run.model, self._layers, part)
        self.num_frozen = max(due, self.num_frozen)

    def on_gradient(self, run: Run, step: Step) -> None:
        """Drop the gradients of frozen layers."""
        del run, step
        for module in self._modules[: self.num_frozen]:
            for parameter in module.parameters():
                parameter.grad = None

    def on_fit_end(self, run: Run) -> None:
        """Unfreeze all layers frozen here."""
        del run
        for parameter in self._stopped:
            parameter.requires_grad = True
        self._stopped.clear()
        self.num_frozen = 0

    def __repr__(self) -> str:
        return (
            f"LayerFreezing({list(self._layers)}, start='{self._start}', end='{self._end}', "
            f"level={self._level})"
        )
