"""Warns of a loss that is a sum over the samples, before it is cut into micro-batches."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stretto.data import DataSpec, MicroBatch, move_batch
from stretto.runtime import SupervisedStep
from stretto.runtime.compiled import uncompiled
from stretto.runtime.loss_measure import only_looking, reduction_of, tolerance_for

_MOST_SAMPLES = 8


def warn_of_sum(step: SupervisedStep, spec: DataSpec, micro: MicroBatch, most: int) -> None:
    """Warn if the loss of some samples is the sum of the losses of both halves.

    Args:
        step: has the loss.
        spec: cuts the batch.
        micro: a micro-batch; its first samples are measured.
        most: the most samples, the same on all ranks, as a loss may communicate.
    """
    from stretto.memory.sandbox import sandbox  # imported only if needed

    half, model = min(most, _MOST_SAMPLES) // 2, uncompiled(step.model)
    parts = slice(0, 2 * half), slice(0, half), slice(half, 2 * half)
    if not half:
        return

    def loss(part: slice) -> float:
        random.restore()
        batch = spec.take_samples(micro.batch, part, micro.num_samples)
        return float(step.loss(model, move_batch(batch, step.device)))

    try:
        with sandbox(_reached(step.loss)), only_looking(model) as random, step.autocast():
            whole, *halves = map(loss, parts)
    except Exception:  # noqa: BLE001  it may need the training mode, or more than these samples
        return
    is_coarse = torch.is_autocast_enabled(step.device.type) or step.scaler is not None
    tolerance = tolerance_for(step.parameters, is_coarse=is_coarse)
    if reduction_of(whole, halves, [half, half], tolerance=tolerance) == "sum":
        warnings.warn(
            "the loss is a sum over the samples, so the gradient depends on how a batch is cut; "
            "return the mean, or write Stepping(loss_reduction='sum')",
            UserWarning,
            stacklevel=2,
        )


def _reached(loss: Callable[..., Any]) -> list[Any]:
    """Return the containers that a loss may change: in its closure, of its module, and its own."""
    while isinstance(loss, partial):
        loss = loss.func
    code, cells = getattr(loss, "__code__", None), getattr(loss, "__closure__", None) or ()
    names, outside = getattr(code, "co_names", ()), getattr(loss, "__globals__", {})
    found = [outside.get(name) for name in names]
    found += [one.cell_contents for one in cells if one != type(one)()]
    found += [getattr(one, "__dict__", None) for one in (loss, getattr(loss, "__self__", None))]
    return [one for one in found if isinstance(one, (list, dict, set, deque))]
