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
    cast,
    final,
    runtime_checkable,
)

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.data.tokens import needs_label_shift
from stretto.errors import TrainingError
from stretto.runtime.out_of_memory import attempt

if TYPE_CHECKING:
    from stretto.distributed.ranks import Ranks

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
    if isinstance(metric, type):
        raise TrainingError.cannot(
            f"measure {name!r} with the class {metric.__name__}",
            why="it is not an instance",
            instead=f"call it: {metric.__name__}(...)",
        )
    if not callable(metric) and not is_object(metric):
        raise TrainingError.cannot(
            f"measure {name!r} with an object of type {type(metric).__name__}",
            why="it is not a function, and does not have update, compute and reset",
            instead="pass a function (model, batch) -> mean over the batch, or a metric such "
            "as torchmetrics has",
        )


def check_merging(metrics: Mapping[str, object]) -> None:
    """Refuse metric objects that cannot be computed over several ranks.

    Raises:
        TrainingError: a metric has no `merge_state` and does not synchronize by itself.
    """
    for name, metric in metrics.items():
        if not is_object(metric) or _can_merge(metric):
            continue
        given = type(metric).__name__
        is_switched_off = _is_torchmetrics(metric)
        raise TrainingError.cannot(
            f"measure {name!r} with {given} on several ranks",
            why="it was built with sync_on_compute=False"
            if is_switched_off
            else "each rank has only its own samples, and it cannot be merged",
            instead="leave sync_on_compute out"
            if is_switched_off
            else "give it a method merge_state(others), or use a metric of torchmetrics",
        )


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
            raise TrainingError.cannot(
                "update metrics from batches with labels",
                why=f"the model returns {type(found).__name__}, which has no logits",
                instead=WRITE_PREDICT,
            )
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
        raise TrainingError.cannot(
            f"update metrics from batches of type {type(batch).__name__}",
            why="they are neither pairs (inputs, targets) nor mappings with 'labels'",
            instead=WRITE_PREDICT,
        )


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
            raise TrainingError.cannot(
                "update metrics with what predict returned",
                why=f"it is of type {type(arguments).__name__}",
                instead="return a tuple of the arguments of update, such as (outputs, targets)",
            )
        return arguments

    def update(self, arguments: Sequence[Any]) -> None:
        """Add the predictions of one batch.

        Raises:
            TrainingError: memory ran out. The metric may contain part of the batch, so the batch
                cannot be repeated in smaller chunks.
        """
        self._updates += 1
        for name, metric in self._metrics.items():
            done = attempt(partial(metric.update, *arguments))
            if done.out_of_memory is not None:
                raise TrainingError.cannot(
                    f"update {name!r}",
                    why=f"memory runs out ({done.out_of_memory})",
                    instead="write a smaller batch_size in the Evaluation",
                )

    def values(self) -> dict[str, float]:
        """Return the metrics over the samples of all ranks; every rank must call it.

        Raises:
            TrainingError: a metric did not return a scalar or a dict of scalars.
        """
        if not self._metrics:
            return {}
        updates = [int(text) for text in self._ranks.gather(str(self._updates))]
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            values |= self._value(name, metric, updates)
        return values

    def _value(self, name: str, metric: Metric, updates: Sequence[int]) -> dict[str, float]:
        if self._ranks.world_size == 1:
            return _scalars(name, metric.compute())
        if _is_torchmetrics(metric):
            _check_gathering(name, metric, updates)
            having = [rank for rank, number in enumerate(updates) if number]
            with torch.no_grad():
                text = self._gathered(name, metric, having)
            return cast(dict[str, float], json.loads(self._ranks.gather(text)[having[0]]))
        _move(metric, torch.device("cpu"))
        parts = self._ranks.collect(metric if self._updates else None)

        def merged() -> str:
            first, *others = (part for part in parts if part is not None)
            if others:
                first.merge_state(others)
            return json.dumps(_scalars(name, first.compute()))

        return cast(dict[str, float], json.loads(self._ranks.from_first(merged)))

    def _gathered(self, name: str, metric: Any, having: Sequence[int]) -> str:
        """Compute a metric of torchmetrics, which gathers its state from all ranks.

        Ranks without samples are left out, because their empty lists cannot be gathered.
        """
        if len(having) == self._ranks.world_size:
            return json.dumps(_scalars(name, metric.compute()))
        group = dist.new_group(list(having))
        if self._ranks.rank not in having:
            return ""
        parts = [one for one in metric.modules() if hasattr(one, "process_group")]
        before = [one.process_group for one in parts]
        for one in parts:
            one.process_group = group
        try:
            return json.dumps(_scalars(name, metric.compute()))
        finally:
            for one, own in zip(parts, before, strict=True):
                one.process_group = own


def _is_torchmetrics(metric: object) -> bool:
    # If torchmetrics is not imported, the metric is not one of its classes.
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return False
    return isinstance(metric, (torchmetrics.Metric, torchmetrics.MetricCollection))


def _can_merge(metric: Any) -> bool:
    if not _is_torchmetrics(metric):
        return hasattr(metric, "merge_state")
    return all(getattr(one, "sync_on_compute", True) for one in metric.modules())


def _check_gathering(name: str, metric: Any, updates: Sequence[int]) -> None:
    """Refuse list states of different lengths; gathering them would deadlock."""
    counts = {number for number in updates if number}
    if len(counts) > 1 and any(map(_gathers_lists, metric.modules())):
        raise TrainingError.cannot(
            f"compute {name!r} over {len(updates)} ranks",
            why=f"it gathers a tensor for each batch, and ranks have {min(counts)} to "
            f"{max(counts)} batches",
            instead="choose a batch_size in the Evaluation with which all ranks have as many",
        )


def _gathers_lists(module: Any) -> bool:
    base = sys.modules["torchmetrics"].Metric
    if getattr(type(module), "_sync_dist", None) is not base._sync_dist:
        return False  # it has its own synchronization
    states = getattr(module, "_reductions", {}).items()
    return any(
        reduction is None and isinstance(getattr(module, name, None), list)
        for name, reduction in states
    )


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
    raise TrainingError.cannot(
        f"log {name!r}",
        why=f"compute() returned a {type(value).__name__}"
        + ("" if shape is None else f" of shape {list(shape)}"),
        instead="use a metric that computes a scalar or a dict of scalars, for example one "
        "with average='macro'",
    )
