"""`Plateau`: batch sizes that follow a metric."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, final

from stretto.batching.policy import (
    ABOVE_1,
    BatchSizePolicy,
    Bound,
    Decision,
    FoundSize,
    PolicyState,
    PositiveInt,
    Signals,
    Size,
    check_start,
    known_size,
    rounded_size,
)
from stretto.errors import BatchSizeError
from stretto.schedules.fields import Check, number_field
from stretto.timing import Horizon, Timestamp


def _checked_metric(metric: Any) -> Any:
    parts = metric.partition("/") if isinstance(metric, str) else ("",)
    if not all(parts):
        instead = "write the name of an evaluation and what it measures, such as 'validation/loss'"
        raise BatchSizeError.bad("metric", metric, "it is not the name of a metric", instead)
    return metric


Metric: TypeAlias = Annotated[str, Check(lambda value, *_: _checked_metric(value))]
Threshold: TypeAlias = Annotated[
    float, number_field("a number from 0 to below 1", lambda value: 0 <= value < 1)
]


@final
@dataclass(frozen=True, slots=True)
class Plateau(BatchSizePolicy):
    """Grows by a factor when a metric has not improved in some evaluations in a row.

    It is `torch.optim.lr_scheduler.ReduceLROnPlateau` for the batch instead of the learning rate
    (Smith et al. 2018, arXiv 1711.00489: increasing the batch acts like decaying the learning
    rate). A metric that is nan has not improved.

    >>> from stretto import Horizon, Timestamp
    >>> from stretto.batching import Signals
    >>> bound = Plateau("validation/loss", start=16, maximum=64, patience=2).bind(Horizon("9ep"))
    >>> state, sizes = bound.start, []
    >>> for epoch, loss in enumerate([2.0, 1.5, 1.5, 1.6, 1.4]):
    ...     size, state = bound.decide(Timestamp(epoch=epoch), state, Signals(metric=loss))
    ...     sizes.append(size)
    >>> sizes
    [16, 16, 16, 32, 32]

    Args:
        metric: the name of an evaluation and what it measures, such as `validation/loss`.
        start: the first size.
        maximum: the largest size, or `"auto"`, as in `NoiseScale`.
        factor: what the size is multiplied by, above 1.
        patience: the number of evaluations without improvement before the batch grows.
        threshold: how much better than the best value an improvement is, as a fraction of it.
        mode: whether a smaller or a larger metric is better.

    Raises:
        BatchSizeError: the metric has no such name, a size is not an integer of at least 1,
            `start` is above `maximum`, or another value is out of range.
    """

    metric: Metric
    start: Size = field(kw_only=True)
    maximum: FoundSize = field(kw_only=True)
    factor: Annotated[float, ABOVE_1] = field(default=2.0, kw_only=True)
    patience: PositiveInt = field(default=2, kw_only=True)
    threshold: Threshold = field(default=1e-4, kw_only=True)
    mode: Literal["min", "max"] = field(default="min", kw_only=True)

    def __post_init__(self) -> None:
        BatchSizePolicy.__post_init__(self)
        check_start(self.start, 1, self.maximum)

    def bind(self, horizon: Horizon) -> Bound:
        """Return the policy; it remembers the size, the best value and how long ago it was."""
        del horizon
        known_size(self.maximum)
        return Bound(
            decide=self._decide,
            start={"size": self.start, "best": None, "waited": 0, "of": self._of},
            reads=frozenset({self.metric}),
            bounds=(self.start, self.maximum),
            sizes=lambda state: (state["size"],),
        )

    def _decide(self, timestamp: Timestamp, state: PolicyState, signals: Signals) -> Decision:
        """Return the size, grown if too many evaluations brought no improvement."""
        del timestamp
        # The bounds of this run; it may have been resumed with others.
        size = rounded_size(state["size"], self.start, self.maximum)
        value = signals.metric
        if state["of"] != self._of:  # the run was resumed with another metric
            state = {**state, "best": None, "waited": 0, "of": self._of}
        state = {**state, "size": size}
        if value is None:
            return size, state
        if self._is_better(value, state["best"]):
            return size, {**state, "best": value, "waited": 0}
        waited = state["waited"] + 1
        if waited < self.patience:
            return size, {**state, "waited": waited}
        grown = math.ceil(min(size * self.factor, self.maximum))
        size = rounded_size(grown, size, self.maximum)
        return size, {**state, "size": size, "waited": 0}

    @property
    def _of(self) -> str:
        """What the best value is the best of."""
        return f"{self.mode} {self.metric}"

    def _is_better(self, value: float, best: float | None) -> bool:
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        gain = best - value if self.mode == "min" else value - best
        return gain > self.threshold * abs(best)
