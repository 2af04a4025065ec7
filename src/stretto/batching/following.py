"""Batch sizes that follow a loss or a metric, and the names of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, final

from stretto.batching.policy import (
    BatchSizePolicy,
    Bound,
    PolicyState,
    Signals,
    checked_size,
)
from stretto.errors import Argument, BatchSizeError, TrainingError, shown
from stretto.schedules.fields import fill, one_of
from stretto.timing import Horizon, Timestamp

LOSS, NOISE = "loss", "noise"
"""What every step can measure; any other signal is a metric of an evaluation."""


def checked_bounds(
    start: object, maximum: object, minimum: object = None, *, follows_noise: bool = False
) -> tuple[int, int, int]:
    """Return the least size, the first and the largest, if they can be that.

    >>> checked_bounds(8, 64)
    (8, 8, 64)

    Args:
        start: the first size.
        maximum: the largest.
        minimum: the least; None: the first.
        follows_noise: whether the size goes by the noise of the gradient. A single sample has
            none to measure, and a batch of one would stay that for ever.

    Raises:
        BatchSizeError: one is no size, or they are out of order.
    """
    first = checked_size(start, "the first batch size")
    most = checked_size(maximum, "the largest batch size")
    least = first if minimum is None else checked_size(minimum, "the least batch size")
    if not least <= first <= most:
        name, bound = ("maximum", most) if first > most else ("minimum", least)
        raise BatchSizeError.cannot(
            f"start with a batch size of {first}",
            why=f"it is {'above' if first > most else 'below'} {name}={bound}",
            instead=f"write a {name} of {'at least' if first > most else 'at most'} {first}",
        )
    if follows_noise and least < 2:
        raise BatchSizeError.cannot(
            f"follow the noise of the gradient from a batch size of {least}",
            why="noise is what samples of a batch differ by, and there is one",
            instead=(
                "write ",
                Argument("start" if minimum is None else "minimum", 2),
                " or more",
            ),
        )
    return least, first, most


def checked_number(
    value: object,
    what: str,
    *,
    above: float = 0.0,
    below: float = math.inf,
    at_most: float = math.inf,
    or_zero: bool = False,
) -> float:
    """Return a finite number between two others, both excluded; or 0, if that may be, too.

    `at_most` is a bound that may be reached.

    Raises:
        BatchSizeError: it is none.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        number = float(cast(float, value)) if is_number else math.nan
    except OverflowError:
        number = math.inf if cast(int, value) > 0 else -math.inf
    if not ((above < number < below and number <= at_most) or (or_zero and number == 0)):
        ends = f"above {above:g}"
        ends += "" if math.isinf(below) else f" and below {below:g}"
        ends += "" if math.isinf(at_most) else f" and at most {at_most:g}"
        why = f"it is not a number {ends}{', or 0' if or_zero else ''}"
        raise BatchSizeError.cannot(
            f"use {shown(value)} as {what}",
            why="it is too large" if number == below == math.inf else why,
            instead=f"write a number such as {min(above + 0.5, below)}",
        )
    return number


def rounded_size(size: float, least: int, most: int) -> int:
    """Return the whole size nearest to `size` within bounds, which may be infinite.

    >>> rounded_size(46.4, 8, 256), rounded_size(math.inf, 8, 256)
    (46, 256)
    """
    return round(min(max(size, least), most))


class Measures(Protocol):
    """An evaluation, as far as the names of what it measures go."""

    @property
    def name(self) -> str:
        """What its metrics' names begin with."""
        ...

    @property
    def metrics(self) -> Mapping[str, Any]:
        """What it measures beside the loss, by name."""
        ...


def metrics_of(evaluations: Iterable[Measures]) -> list[str]:
    """Return the names of all that evaluations measure, such as `validation/loss`.

    A metric may be a dict of several; each of these has the name, a slash and its key.
    """
    return [f"{one.name}/{name}" for one in evaluations for name in (LOSS, *one.metrics)]


def followed_metric(reads: frozenset[str], measured: Sequence[str]) -> str | None:
    """Return the metric among what a policy reads; None if there is none.

    >>> followed_metric(frozenset({"loss", "test/loss"}), ["test/loss", "test/accuracy"])
    'test/loss'

    Raises:
        TrainingError: no evaluation measures it, or there is more than one.
    """
    metrics = sorted(reads - {LOSS, NOISE})
    if len(metrics) > 1:
        raise TrainingError.cannot(
            f"follow {' and '.join(map(repr, metrics))} with the batch size",
            why="a policy reads one metric",
            instead=f"follow {metrics[0]!r} alone",
        )
    for name in metrics:
        _check_measured(f"follow {name!r} with the batch size", name, measured)
    return metrics[0] if metrics else None


def measured_value(name: str | None, named: Mapping[str, float]) -> float | None:
    """Return the value of a metric among those just measured; None if it is not among them.

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


def check_monitored(monitor: str, measured: Sequence[str]) -> None:
    """Refuse a metric to keep the best checkpoint by that no evaluation measures.

    Raises:
        TrainingError: it is not measured.
    """
    _check_measured(f"monitor {monitor!r}", monitor, measured)


def _check_measured(what: str, name: str, measured: Sequence[str]) -> None:
    if name not in measured and not any(name.startswith(f"{one}/") for one in measured):
        raise _unmeasured(what, measured)


def _unmeasured(what: str, measured: Sequence[str]) -> TrainingError:
    evaluate = ("set ", Argument("evaluate", "{every: 10%}", python="evaluate=..."))
    return TrainingError.cannot(
        what,
        why="no evaluation measures it",
        instead=f"write one of {', '.join(map(repr, measured))}" if measured else evaluate,
    )


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
    >>> state, sizes = bound.start, []
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

    def _decide(
        self, timestamp: Timestamp, state: PolicyState, signals: Signals
    ) -> tuple[int, PolicyState]:
        """Return the size, grown where an evaluation was one too many without improvement."""
        del timestamp
        # The bounds of this run; it may have been resumed with others.
        size = rounded_size(cast(int, state["size"]), self.start, self.maximum)
        value = signals.metric
        if state["of"] != self._of:  # the run was resumed with another: nothing is best of it yet
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


def _check_metric(metric: object) -> None:
    evaluation, slash, name = metric.partition("/") if isinstance(metric, str) else ("", "", "")
    if not (evaluation and slash and name):
        raise BatchSizeError.cannot(
            f"follow {shown(metric)} with the batch size",
            why="it is not the name of an evaluation and what that measures",
            instead="write for example 'validation/loss'",
        )
