"""Sees whether a loss is a sum over the samples: from how it was computed, or by measuring it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stretto.data import DataSpec, MicroBatch, move_batch
from stretto.runtime import SupervisedStep
from stretto.runtime.compiled import uncompiled
from stretto.runtime.losses import SUM, nodes, only_looking, reduction_of, tolerance_for

_PASSED = ("AddBackward0", "SubBackward0", "NegBackward0", "MulBackward0", "DivBackward0")
_MOST_SAMPLES = 8


def is_sum(loss: Tensor, num_samples: int) -> bool:
    """Return whether a loss is a sum over the samples. It reads no values and calls nothing again.

    What was divided later may be a mean, so it is none; `has_sum` is true of it.

    >>> x = torch.ones(4, 3, requires_grad=True)
    >>> is_sum(x.square().sum(), 4), is_sum(x.square().mean(), 4), is_sum(x.sum() / 12, 4)
    (True, False, False)
    """
    root = loss.grad_fn
    if root is None:
        return False
    if root.name().startswith("SumBackward"):
        sizes, inner = root._saved_self_sym_sizes, root.next_functions[0][0]  # type: ignore[attr-defined]
        is_list = inner is not None and inner.name() in ("StackBackward0", "CatBackward0")
        return bool(sizes) and sizes[0] % num_samples == 0 and not is_list
    return any(
        getattr(node, "_saved_reduction", None) == SUM for node in nodes(root, ("AddBackward0",))
    )


def has_sum(loss: Tensor) -> bool:
    """Return whether a loss is computed from a sum by plain arithmetic, so it may be a sum.

    >>> x = torch.ones(4, 3, requires_grad=True)
    >>> has_sum(x.sum() / 12), has_sum(x.mean() / 12)
    (True, False)
    """
    return loss.grad_fn is not None and any(
        node.name().startswith("SumBackward") or getattr(node, "_saved_reduction", None) == SUM
        for node in nodes(loss.grad_fn, _PASSED)
    )


def adds_up(step: SupervisedStep, spec: DataSpec, micro: MicroBatch) -> bool:
    """Return whether the loss of some samples is the sum of the losses of both halves.

    It calls the loss three times, in evaluation mode. What the loss may note of its calls is put
    back, so call this only if its graph leaves the question open.
    """
    from stretto.memory.sandbox import sandbox  # imported only if needed

    half, model = min(micro.num_rows, _MOST_SAMPLES) // 2, uncompiled(step.model)
    parts = slice(0, 2 * half), slice(0, half), slice(half, 2 * half)

    def loss(part: slice) -> float:
        random.restore()
        batch = spec.take_samples(micro.batch, part, micro.num_rows)
        return float(step.loss(model, move_batch(batch, step.device)))

    if not half:
        return False
    try:
        with sandbox(_reached(step.loss)), only_looking(model) as random, step.autocast():
            whole, *halves = map(loss, parts)
    except Exception:  # noqa: BLE001  it may need the training mode, or more than these samples
        return False
    is_coarse = torch.is_autocast_enabled(step.device.type) or step.scaler is not None
    tolerance = tolerance_for(step.parameters, is_coarse=is_coarse)
    return reduction_of(whole, halves, [half, half], tolerance=tolerance) == "sum"


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
