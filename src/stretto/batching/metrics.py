"""Names of what evaluations measure, for batch sizes and checkpoints that follow it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stretto.errors import TrainingError

LOSS, NOISE, COST = "loss", "noise", "cost"
"""What every step, or a trainer before the first, can measure; any other signal is a metric of an
evaluation."""


def metrics_of(evaluations: Iterable[Any]) -> list[str]:
    """Return the names of everything that evaluations measure, such as `validation/loss`.

    Each evaluation has a `name` and `metrics` by name. A metric may be a dict of several; their
    names are its name, a slash and the key.
    """
    return [f"{one.name}/{name}" for one in evaluations for name in (LOSS, *one.metrics)]


def followed_metric(reads: frozenset[str], measured: Sequence[str]) -> str | None:
    """Return the metric that a policy or a schedule reads, or None.

    >>> followed_metric(frozenset({"loss", "test/loss"}), ["test/loss", "test/accuracy"])
    'test/loss'

    Raises:
        TrainingError: no evaluation measures it, or there is more than one.
    """
    metric = one_metric(reads)
    if metric is not None:
        check_monitored(metric, measured, f"follow {metric!r}")
    return metric


def one_metric(reads: frozenset[str]) -> str | None:
    """Return the only metric among signals; None if there is none.

    Raises:
        TrainingError: there is more than one.
    """
    metrics = sorted(reads - {LOSS, NOISE, COST})
    if len(metrics) > 1:
        what = f"follow {' and '.join(map(repr, metrics))}"
        instead = f"follow {metrics[0]!r} alone, with the batch size and with schedules"
        raise TrainingError.cannot(what, why="a run follows one metric", instead=instead)
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
    instead = "set evaluate, and every='10%' in it"
    if measured:
        instead = f"write one of {', '.join(map(repr, measured))}"
    return TrainingError.cannot(what, why="no evaluation measures it", instead=instead)
