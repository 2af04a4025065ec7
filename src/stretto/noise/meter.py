"""Measures the gradient noise of a step from its micro-batches on all ranks.

Each pass leaves `c_j = a n_j g_j` in the parameters, where `g_j` is the mean gradient of a
micro-batch of `n_j` units. With `N` units in the step and W ranks, `a` is `W / N`. If the pass
itself averages over ranks (FSDP2), `a` is `1 / N`, and `n_j` is counted over all ranks. The sums
of `NoiseSums` follow for any N.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self, SupportsFloat, final

from torch import nn

from stretto.batching import NO_SIGNALS, Signals
from stretto.checkpoint.sharding import is_owner
from stretto.data import DataSpec, MicroBatch, Step
from stretto.distributed.strategy import Strategy, adopted
from stretto.errors import DataError, TrainingError
from stretto.runtime.micro_gradients import MicroGradients, total
from stretto.runtime.ranks import Ranks
from stretto.runtime.sharded import is_dtensor


class NoiseSums(NamedTuple):
    """Sums from which the noise of one step follows; ranks add them up.

    The groups are micro-batches or ranks: group j has `n_j` units (samples, or tokens) and a mean
    gradient `g_j`.

    >>> sums = NoiseSums.of([8.0, 4.0], sizes=[2, 2], whole=5.0)
    >>> sums.signals().noise_numerator, sums.signals().noise_denominator
    (4.0, 4.0)
    """

    weighted: float = 0.0
    """`sum_j n_j |g_j|^2`."""
    groups: float = 0.0
    """Number of groups with any units."""
    units: float = 0.0
    """`N = sum_j n_j`."""
    whole: float = 0.0
    """`|sum_j n_j g_j|^2`, over all ranks."""

    @classmethod
    def of(cls, squares: Iterable[float], sizes: Iterable[float], whole: float) -> NoiseSums:
        """Return the sums of one rank, from squared norms of mean gradients.

        Args:
            squares: `|g_j|^2` of each group.
            sizes: `n_j` of each group.
            whole: `|G|^2`, where `G = sum_j n_j g_j / N` is the gradient of the whole step.

        Raises:
            TrainingError: the numbers of sizes and norms differ, a size is negative, or a value is
                not a number.
        """
        squares, sizes = list(map(_as_number, squares)), list(map(_as_number, sizes))
        if len(squares) != len(sizes) or any(size < 0 for size in sizes):
            why, instead = "it is not one size for each gradient", "pass numbers of samples"
            raise TrainingError.bad("sizes", sizes, why, instead)
        pairs = [(square, size) for square, size in zip(squares, sizes, strict=True) if size]
        units = total(size for _, size in pairs)
        weighted = total(size * square for square, size in pairs)
        return cls(weighted, len(pairs), units, units * units * _as_number(whole))

    def signals(self, num_samples: float | None = None) -> Signals:
        """Return what the step measured, from the sums of all ranks, as signals for a policy.

        Without noise for fewer than two groups, or if a value is not finite. The estimates are
        unbiased but noisy: average them over steps, then divide.

        `S = (sum_j n_j |g_j|^2 / N - |G|^2) * N / (k - 1)` and `G2 = |G|^2 - S / N`, from
        `E |g_j|^2 = |mu|^2 + tr(Sigma) / n_j` (McCandlish et al. 2018, arXiv 1812.06162, appendix
        A.1, for two sizes; here for k groups of any sizes). If units are not samples, a sample has
        `N / num_samples` units, whose gradients count as independent. If samples have different
        numbers of units, and the units of a sample are similar, S is too small. (The unbiased
        estimate, `k / (k - 1) * sum_j (n_j / N)^2 |g_j - G|^2`, needs `sum_j n_j^2 g_j`, which is
        as large as all parameters.)

        Args:
            num_samples: the samples of the step; by default, units are samples.
        """
        num_samples = self.units if num_samples is None else num_samples
        if not (self.groups >= 2 and self.units > 0 and num_samples > 0):
            return NO_SIGNALS
        square = self.whole / (self.units * self.units)
        variance = (self.weighted - self.units * square) / (self.groups - 1)
        numerator, denominator = variance * num_samples / self.units, square - variance / self.units
        if not (math.isfinite(numerator) and math.isfinite(denominator)):
            return NO_SIGNALS
        return Signals(
            noise_numerator=numerator, noise_denominator=denominator, num_samples=num_samples
        )


def _as_number(value: object) -> float:
    """Return a number or a tensor of one element as a float; inf if it overflows."""
    try:
        if isinstance(value, SupportsFloat) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        pass  # several elements
    raise TrainingError.bad("a norm or size", value, "it is not a number", "pass squared norms")


@final
class NoiseMeter:
    """Compares the gradients of the micro-batches of a step.

    In each step, call `begin` and compute the micro-batches that it returns, each in `watch`. Then
    call `signals`, before gradients are clipped. A step of one pass on a single rank or with a
    fully sharded model is cut into two passes. If its batch is packed, it is not measured.

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
        every: int = 1,
    ) -> None:
        self.averages_each = strategy.averaging == "each"
        """Whether gradients must be averaged in each pass of a step that is measured (FSDP2)."""
        self.has_finite_gradient = False
        """Whether the norm has shown that this rank's gradient is finite."""
        self._every, self._spec, self._strategy = every, spec, strategy
        self._is_spread = any(map(is_dtensor, parameters))
        """Whether each rank has a part of the gradient."""
        counts = strategy.ranks.is_loss_rank
        own = [p for p in parameters if (is_owner(p) if is_dtensor(p) else counts)]
        self._num_samples = 0
        self._divisor = 1.0
        self._is_complete = False
        self._units: list[int] = []
        self._gradients = MicroGradients(parameters, own if self._is_spread else parameters)
        strategy.attach(self._gradients)

    @classmethod
    def of(cls, model: nn.Module, spec: DataSpec, ranks: Ranks) -> Self:
        """Return a meter for a loop that is not stretto's.

        Args:
            model: the model that the loss is computed with, wrapped if it is (DDP, FSDP2).
            spec: cuts batches.
            ranks: the processes of the run.
        """
        parameters = [one for one in model.parameters() if one.requires_grad]
        strategy = adopted(model, ranks)
        return cls(parameters, spec=spec, strategy=strategy)

    def is_due(self, step: Step) -> bool:
        """Return whether to measure this step."""
        return step.timestamp.batch % self._every == 0

    def begin(
        self, step: Step, micro_batches: Sequence[MicroBatch] | None = None
    ) -> Sequence[MicroBatch]:
        """Forget the last step and return the micro-batches to run.

        Args:
            step: the step.
            micro_batches: its micro-batches, if it was cut again.
        """
        self.forget()
        self._num_samples, self._units = step.num_samples, []
        micro_batches = step.micro_batches if micro_batches is None else micro_batches
        several = self._strategy.ranks.dp_world_size > 1
        if len(micro_batches) > 1 or (several and not self.averages_each):
            return micro_batches
        return [half for micro in micro_batches for half in self._halves(micro, several=several)]

    @contextmanager
    def watch(
        self,
        micro: MicroBatch,
        *,
        is_last: bool,
        units: int | None = None,
        divisor: float | None = None,
    ) -> Iterator[None]:
        """Measure the gradient of the forward and backward pass inside.

        Args:
            micro: its micro-batch.
            is_last: whether the gradient is complete after it. DDP averages in this one.
            units: the weight of its loss; None: its samples.
            divisor: the units of the step over all ranks; None: its samples.
        """
        is_averaged = is_last and self._strategy.averaging == "last"
        with self._gradients.watch(is_last=is_last, is_averaged=is_averaged):
            yield
        self._units.append(micro.num_samples if units is None else units)
        self._divisor = self._num_samples if divisor is None else divisor
        self._is_complete = is_last

    def forget(self) -> None:
        """Release the gradients of the last step, finished or not."""
        self._gradients.begin()
        self._is_complete = self.has_finite_gradient = False

    def signals(self, scale: float = 1.0) -> Signals:
        """Return what the step measured on all ranks, which must all call it.

        Args:
            scale: the loss scale of fp16.
        """
        ranks = self._strategy.ranks
        return NoiseSums(*ranks.agree(self.sums(scale))).signals(self._num_samples)

    def sums(self, scale: float) -> NoiseSums:
        """Return this rank's part of the sums; zeros if the step was not measured.

        Every rank must call it, before the gradient is changed.
        """
        if not self._is_complete:
            return NoiseSums()
        self._is_complete = False
        ranks = self._strategy.ranks
        *squares, whole = self._gradients.read()
        self.has_finite_gradient = math.isfinite(whole)
        # If each pass is collective, units are of all ranks, and each rank has a part of the norm.
        units = ranks.agree(ranks.counted(self._units)) if self.averages_each else self._units
        unit = (
            self._divisor
            / scale
            / (1 if self.averages_each else self._strategy.ranks.dp_world_size)
        )
        weighted = total(
            square / count for square, count in zip(squares, units, strict=True) if count
        )
        # Of a spread gradient each rank has a part, so all count; else those that have samples.
        parts = self._is_spread or ranks.is_loss_rank
        counts_once = ranks.is_first if self._is_spread else ranks.is_loss_rank
        has_whole = parts if self._is_spread else ranks.is_first
        return NoiseSums(
            weighted * unit * unit if parts else 0.0,
            sum(count > 0 for count in units) if counts_once else 0,
            sum(self._units) if ranks.is_loss_rank else 0,
            whole * (self._divisor / scale) ** 2 if has_whole else 0.0,
        )

    def _halves(self, micro: MicroBatch, *, several: bool) -> list[MicroBatch]:
        count = micro.num_rows
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
        pair = [nothing, micro] if self._strategy.ranks.dp_rank % 2 else [micro, nothing]
        return pair if several else [micro]
