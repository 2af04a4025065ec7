"""`Plateau`: the batch grows when a metric has stopped improving."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, cast, final

from stretto.batching.adaptive.following import (
    FollowingPolicy,
    checked_bounds,
    checked_number,
    rounded_size,
)
from stretto.batching.policy import BatchSizePolicy, PolicyState, checked_size
from stretto.batching.signals import Signals
from stretto.batching.written import WAYS, written
from stretto.errors import BatchSizeError, shown
from stretto.schedules.fields import fill, one_of
from stretto.timing import Horizon, Timestamp


@written(WAYS, "plateau", "metric")
@final
@dataclass(frozen=True, slots=True)
class Plateau(BatchSizePolicy):
    """Grows by a factor when a metric has not improved in some evaluations in a row.

    What `torch.optim.lr_scheduler.ReduceLROnPlateau` does to the learning rate, done to the batch
    instead (Smith et al. 2018, arXiv 1711.00489: to increase the batch is to decay the learning
    rate). A metric that is nan has not improved.

    >>> from stretto import Horizon, Timestamp
    >>> from stretto.batching import Signals
    >>> bound = Plateau("validation/loss", start=16, maximum=64, patience=2).bind(Horizon("9ep"))
    >>> state, sizes = bound.start(), []
    >>> for epoch, loss in enumerate([2.0, 1.5, 1.5, 1.6, 1.4]):
    ...     size, state = bound.decide(Timestamp(epoch=epoch), state, Signals(metric=loss))
    ...     sizes.append(size)
    >>> sizes
    [16, 16, 16, 32, 32]

    Args:
        metric: which one, as `validation/loss`: the name of an evaluation and what it measures.
        start: the first size.
        maximum: the size is never above it.
        factor: by how much it grows at once, above 1.
        patience: after how many evaluations without improvement.
        threshold: by which part of the best value another must be better to be an improvement.
        mode: whether less or more of the metric is better.

    Raises:
        BatchSizeError: the metric has no such name, a size is not an integer of at least 1,
            `start` is above `maximum`, or another value cannot be.
    """

    metric: str
    start: int = field(kw_only=True)
    maximum: int = field(kw_only=True)
    factor: float = field(default=2.0, kw_only=True)
    patience: int = field(default=2, kw_only=True)
    threshold: float = field(default=1e-4, kw_only=True)
    mode: Literal["min", "max"] = field(default="min", kw_only=True)

    def __post_init__(self) -> None:
        _check_metric(self.metric)
        _, first, most = checked_bounds(self.start, self.maximum)
        after = "write after how many evaluations the batch grows, such as 2"
        patience = checked_size(self.patience, "the patience of a batch size", instead=after)
        factor = checked_number(self.factor, "the factor that a batch grows by", above=1.0)
        threshold = checked_number(
            self.threshold, "the threshold of an improvement", below=1.0, or_zero=True
        )
        fill(self, start=first, maximum=most, factor=factor, patience=patience, threshold=threshold)
        one_of(self.mode, "mode", ("min", "max"), BatchSizeError)

    def bind(self, horizon: Horizon) -> BoundPlateau:
        """Return the policy on one run."""
        del horizon
        return BoundPlateau(self)


@final
@dataclass(frozen=True, slots=True)
class BoundPlateau(FollowingPolicy):
    """A plateau on one run; remembers the size, the best value and how long ago it was."""

    policy: Plateau

    @property
    def reads(self) -> frozenset[str]:
        """The metric."""
        return frozenset({self.policy.metric})

    @property
    def bounds(self) -> tuple[int, int]:
        """The first size and the maximum."""
        return self.policy.start, self.policy.maximum

    def start(self) -> PolicyState:
        """Return the first size, before any evaluation."""
        return {"size": self.policy.start, "best": None, "waited": 0, "of": self._of}

    def decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Return the size, grown where an evaluation was one too many without improvement."""
        del timestamp
        # The bounds of this run; it may have been resumed with others.
        size, value = rounded_size(cast(int, state["size"]), *self.bounds), signals.metric
        if state["of"] != self._of:  # the run was resumed with another: nothing is best of it yet
            state = {**state, "best": None, "waited": 0, "of": self._of}
        state = {**state, "size": size}
        if value is None:
            return size, state
        if self._is_better(value, cast("float | None", state["best"])):
            return size, {**state, "best": value, "waited": 0}
        waited = cast(int, state["waited"]) + 1
        if waited < self.policy.patience:
            return size, {**state, "waited": waited}
        grown = math.ceil(min(size * self.policy.factor, self.policy.maximum))
        size = rounded_size(grown, size, self.policy.maximum)
        return size, {**state, "size": size, "waited": 0}

    @property
    def _of(self) -> str:
        """What the best value is the best of."""
        return f"{self.policy.mode} {self.policy.metric}"

    def _is_better(self, value: float, best: float | None) -> bool:
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        gain = best - value if self.policy.mode == "min" else value - best
        return gain > self.policy.threshold * abs(best)


def _check_metric(metric: object) -> None:
    evaluation, slash, name = metric.partition("/") if isinstance(metric, str) else ("", "", "")
    if not (evaluation and slash and name):
        raise BatchSizeError.cannot(
            f"follow {shown(metric)} with the batch size",
            why="it is not the name of an evaluation and what that measures",
            instead="write for example 'validation/loss'",
        )
