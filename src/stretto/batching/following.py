"""Batch sizes that follow a loss or a metric, and the names of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, cast, final

from stretto.batching.policy import (
    BatchSizePolicy,
    Bound,
    Count,
    Decision,
    PolicyState,
    Signals,
    Size,
)
from stretto.errors import Argument, BatchSizeError, Text, TrainingError
from stretto.schedules.fields import Check, check_fields, number
from stretto.timing import Horizon, Timestamp

LOSS, NOISE = "loss", "noise"
"""What every step can measure; any other signal is a metric of an evaluation."""


Above1: TypeAlias = Annotated[
    float, number("a finite number above 1", lambda value: 1 < value < math.inf)
]
"""A field that is a factor of growth."""


def check_start(start: int, minimum: int, maximum: int) -> None:
    """Refuse a first size that is not within its bounds."""
    if not minimum <= start <= maximum:
        why = f"above maximum={maximum}" if start > maximum else f"below minimum={minimum}"
        raise BatchSizeError.bad("start", start, f"it is {why}", "write a size within its bounds")


def rounded_size(size: float, least: int, most: int) -> int:
    """Return the whole size nearest to `size` within bounds, which may be infinite.

    >>> rounded_size(46.4, 8, 256), rounded_size(math.inf, 8, 256)
    (46, 256)
    """
    return round(min(max(size, least), most))


def metrics_of(evaluations: Iterable[Any]) -> list[str]:
    """Return the names of everything that evaluations measure, such as `validation/loss`.

    Each evaluation has a `name` and `metrics` by name. A metric may be a dict of several; their
    names are its name, a slash and the key.
    """
    return [f"{one.name}/{name}" for one in evaluations for name in (LOSS, *one.metrics)]


def followed_metric(reads: frozenset[str], measured: Sequence[str]) -> str | None:
    """Return the metric that a policy reads, or None.

    >>> followed_metric(frozenset({"loss", "test/loss"}), ["test/loss", "test/accuracy"])
    'test/loss'

    Raises:
        TrainingError: no evaluation measures it, or there is more than one.
    """
    metrics = sorted(reads - {LOSS, NOISE})
    if len(metrics) > 1:
        what = f"follow {' and '.join(map(repr, metrics))} with the batch size"
        instead = f"follow {metrics[0]!r} alone"
        raise TrainingError.cannot(what, why="a policy reads one metric", instead=instead)
    for name in metrics:
        check_monitored(name, measured, f"follow {name!r} with the batch size")
    return metrics[0] if metrics else None


def measured_value(name: str | None, named: Mapping[str, float]) -> float | None:
    """Return the value of a metric if it was just measured, else None.

    >>> measured_value("test/loss", {"test/loss": 0.5}), measured_value("a/loss", {"b/loss": 0.5})
    (0.5, None)

    Raises:
        TrainingError: the metric is a dict without this key, or is no dict.
    """
    if name is None or name in named:
        return None if name is None else named[name]
    parent, _, _ = name.rpartition("/")
    keys = [one for one in named if one == parent or one.startswith(f"{parent}/")]
    if keys:
        raise _unmeasured(f"follow {name!r}", keys)
    return None


def check_monitored(name: str, measured: Sequence[str], what: str | None = None) -> None:
    """Refuse a metric that no evaluation measures.

    Args:
        name: the metric.
        measured: what the evaluations measure.
        what: what cannot be done without it; by default, to monitor it.

    Raises:
        TrainingError: it is not measured.
    """
    if name not in measured and not any(name.startswith(f"{one}/") for one in measured):
        raise _unmeasured(what or f"monitor {name!r}", measured)


def _unmeasured(what: str, measured: Sequence[str]) -> TrainingError:
    instead: Text = ("set ", Argument("evaluate", "{every: 10%}", python="evaluate=..."))
    if measured:
        instead = f"write one of {', '.join(map(repr, measured))}"
    return TrainingError.cannot(what, why="no evaluation measures it", instead=instead)


def _checked_metric(metric: object) -> str:
    evaluation, slash, name = metric.partition("/") if isinstance(metric, str) else ("", "", "")
    if not (evaluation and slash and name):
        instead = "write the name of an evaluation and what it measures, such as 'validation/loss'"
        raise BatchSizeError.bad("metric", metric, "it is not the name of a metric", instead)
    return cast(str, metric)


Metric: TypeAlias = Annotated[str, Check(lambda value, *_: _checked_metric(value))]
Threshold: TypeAlias = Annotated[
    float, number("a number from 0 to below 1", lambda value: 0 <= value < 1)
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
        maximum: the largest size.
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
    maximum: Size = field(kw_only=True)
    factor: Above1 = field(default=2.0, kw_only=True)
    patience: Count = field(default=2, kw_only=True)
    threshold: Threshold = field(default=1e-4, kw_only=True)
    mode: Literal["min", "max"] = field(default="min", kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        check_start(self.start, 1, self.maximum)

    def bind(self, horizon: Horizon) -> Bound:
        """Return the policy; it remembers the size, the best value and how long ago it was."""
        del horizon
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
        size = rounded_size(cast(int, state["size"]), self.start, self.maximum)
        value = signals.metric
        if state["of"] != self._of:  # the run was resumed with another metric
            state = {**state, "best": None, "waited": 0, "of": self._of}
        state = {**state, "size": size}
        if value is None:
            return size, state
        if self._is_better(value, cast("float | None", state["best"])):
            return size, {**state, "best": value, "waited": 0}
        waited = cast(int, state["waited"]) + 1
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
