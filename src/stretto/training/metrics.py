"""Metric objects with `update`, `compute` and `reset`, as in torchmetrics."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Protocol,
    TypeAlias,
    TypeGuard,
    final,
    runtime_checkable,
)

import torch
from torch import Tensor, nn

from stretto.data.tokens import needs_label_shift
from stretto.errors import TrainingError

if TYPE_CHECKING:
    from stretto.runtime.ranks import Ranks

Predict: TypeAlias = Callable[[nn.Module, Any], Sequence[Any]]
"""`predict(model, batch)`: the arguments of the `update` of metrics."""

WRITE_PREDICT = "write predict, a function (model, batch) -> (outputs, targets), in the evaluation"


@runtime_checkable
class Metric(Protocol):
    """A metric that accumulates over batches, as in torchmetrics and torcheval.

    >>> isinstance({}, Metric)
    False
    """

    def update(self, *arguments: Any) -> Any:
        """Add a batch of predictions and targets."""

    def compute(self) -> Any:
        """Return the value over all batches since `reset`."""

    def reset(self) -> Any:
        """Reset the metric."""


def is_object(metric: object) -> TypeGuard[Metric]:
    """Return whether a metric is an object, and not a function `metric(model, batch)`."""
    return isinstance(metric, Metric)


def check_metric(name: str, metric: object) -> None:
    """Refuse an object that is not a metric.

    Raises:
        TrainingError: it is a class, or neither a function nor an object with all three methods.
    """
    if isinstance(metric, type) or not (callable(metric) or is_object(metric)):
        why = "it is neither a function nor an object with update, compute and reset"
        instead = "pass a function (model, batch) -> mean, or an instance such as Accuracy(...)"
        raise TrainingError.bad(f"metrics[{name!r}]", metric, why, instead)


def check_merging(metrics: Mapping[str, object]) -> None:
    """Refuse metric objects that cannot be computed over several ranks.

    Raises:
        TrainingError: a metric is not one of torchmetrics and has no `merge_state`.
    """
    for name, metric in metrics.items():
        if is_object(metric) and not (_is_torchmetrics(metric) or hasattr(metric, "merge_state")):
            what = f"measure {name!r} with {type(metric).__name__} on several ranks"
            why = "each rank has only its own samples, and it cannot be merged"
            instead = "give it a method merge_state(others), or use a metric of torchmetrics"
            raise TrainingError.cannot(what, why=why, instead=instead)


def default_predict(model: Callable[..., Any], batch: Any) -> tuple[Any, Any]:
    """Return `(model(inputs), targets)`, or logits and labels of a batch with `labels`.

    Labels equal to the inputs are shifted by one, as for causal language models.

    >>> default_predict(len, ([5, 6, 7], 1))
    (3, 1)

    Raises:
        TrainingError: the batch has another format, or the model returns no logits.
    """
    check_predictable(batch)
    if not isinstance(batch, Mapping):
        outputs, labels = model(batch[0]), batch[1]
    else:
        found, labels = model(**batch), batch["labels"]
        outputs = getattr(found, "logits", None)
        if outputs is None:
            why = f"the model returns {type(found).__name__}, which has no logits"
            raise TrainingError.cannot("update metrics", why=why, instead=WRITE_PREDICT)
    if (
        needs_label_shift(batch)
        and isinstance(outputs, Tensor)
        and outputs.dim() == labels.dim() + 1
    ):
        return outputs[..., :-1, :], labels[..., 1:]
    return outputs, labels


def check_predictable(batch: Any) -> None:
    """Refuse a batch whose inputs and targets are unknown.

    Raises:
        TrainingError: it is neither a pair nor a mapping with `labels`.
    """
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not is_pair and not (isinstance(batch, Mapping) and "labels" in batch):
        what = f"update metrics from batches of type {type(batch).__name__}"
        why = "they are neither pairs (inputs, targets) nor mappings with 'labels'"
        raise TrainingError.cannot(what, why=why, instead=WRITE_PREDICT)


@final
class MetricObjects:
    """The metric objects of one evaluation.

    Args:
        metrics: all metrics of the evaluation, by name.
        predict: returns the arguments of `update`.
        ranks: the processes of the run.
    """

    def __init__(
        self, metrics: Mapping[str, object], predict: Predict | None, ranks: Ranks
    ) -> None:
        self._metrics = {name: one for name, one in metrics.items() if is_object(one)}
        self._predict = default_predict if predict is None else predict
        self._ranks = ranks
        self._updates = 0

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def reset(self) -> None:
        """Start an evaluation."""
        self._updates = 0
        for metric in self._metrics.values():
            _move(metric, self._ranks.device)
            metric.reset()

    def arguments(self, model: nn.Module, batch: Any) -> Sequence[Any]:
        """Return the arguments of `update` for a batch.

        Raises:
            TrainingError: `predict` did not return a tuple.
        """
        arguments = self._predict(model, batch)
        if not isinstance(arguments, (tuple, list)):
            why = f"predict returned a {type(arguments).__name__}"
            instead = "return a tuple of the arguments of update, such as (outputs, targets)"
            raise TrainingError.cannot("update metrics", why=why, instead=instead)
        return arguments

    def update(self, arguments: Sequence[Any]) -> None:
        """Add the predictions of one batch."""
        self._updates += 1
        for metric in self._metrics.values():
            metric.update(*arguments)

    def values(self) -> dict[str, float]:
        """Return the metrics over the samples of all ranks; every rank must call it.

        Raises:
            TrainingError: a metric did not return a scalar or a dict of scalars.
        """
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            if self._ranks.world_size == 1:
                values |= _scalars(name, metric.compute())
                continue
            _move(metric, torch.device("cpu"))
            parts = self._ranks.gather(metric if self._updates else None, only_first=True)
            text = self._ranks.from_first(partial(_merged, name, parts))
            values |= json.loads(text)
        return values


def _merged(name: str, parts: Sequence[Any]) -> str:
    """Return the value over the metrics of all ranks as JSON; None: a rank had no samples."""
    first, *others = (part for part in parts if part is not None)
    if _is_torchmetrics(first):
        _merge_torchmetrics([first, *others])
    elif others:
        first.merge_state(others)
    return json.dumps(_scalars(name, first.compute()))


def _merge_torchmetrics(metrics: Sequence[nn.Module]) -> None:
    """Reduce the states of metrics into the first one, as their own synchronization does.

    Their `merge_state` weighs means wrongly and refuses metrics with `full_state_update`.
    """
    seen: list[object] = []
    for modules in zip(*(one.modules() for one in metrics), strict=True):
        first: Any = modules[0]
        if hasattr(first, "_to_sync"):
            first._to_sync, first._computed = False, None  # it has the states of all ranks
        reductions = getattr(first, "_reductions", {})
        if any(one is reductions for one in seen):
            continue  # a wrapper passes on the states of a metric
        seen.append(reductions)
        for name, reduce in reductions.items():
            states = [getattr(one, name) for one in modules]
            joined: Any
            if isinstance(states[0], list):
                joined = [item for state in states for item in state]
            else:
                joined = torch.stack(states)
            setattr(first, name, reduce(joined) if reduce is not None and len(joined) else joined)


def _is_torchmetrics(metric: object) -> bool:
    # If torchmetrics is not imported, the metric is not one of its classes.
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return False
    return isinstance(metric, (torchmetrics.Metric, torchmetrics.MetricCollection))


def _move(metric: object, device: torch.device) -> None:
    move = getattr(metric, "to", None)
    if callable(move):
        move(device)


def _scalars(name: str, value: object) -> dict[str, float]:
    """Return the value of a metric by name; items of a dict are named `name/key`."""
    if isinstance(value, Mapping):
        return {f"{name}/{key}": _scalar(f"{name}/{key}", part) for key, part in value.items()}
    return {name: _scalar(name, value)}


def _scalar(name: str, value: object) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) == 1:
        return float(value.item())  # type: ignore[attr-defined]
    why = f"compute() returned a {type(value).__name__} of shape {shape and list(shape)}"
    instead = "use a metric of a scalar or a dict of scalars, such as one with average='macro'"
    raise TrainingError.cannot(f"log {name!r}", why=why, instead=instead)
