"""Losses as scalars, and whether one is a mean or a sum, seen from a batch and its parts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from stretto.errors import TrainingError
from stretto.runtime.modes import kept_modes
from stretto.runtime.random_state import RandomState

Reduction: TypeAlias = Literal["mean", "sum", "other"]
MEAN: Final = 1
SUM: Final = 2
"""`reduction="mean"` and `"sum"`, as functions of torch note it."""


def scalar(loss: object) -> Tensor:
    """Return the loss, if it is one.

    Raises:
        TrainingError: it is no scalar tensor.
    """
    if isinstance(loss, Tensor) and not loss.dim():
        return loss
    shape = list(loss.shape) if isinstance(loss, Tensor) else None
    what = f"learn from a loss of type {type(loss).__name__}"
    why = "it is no tensor" if shape is None else f"its shape is {shape}"
    raise TrainingError.cannot(what, why=why, instead="return a scalar, such as losses.mean()")


def detached(loss: Tensor) -> Tensor:
    """Return a loss that can be kept: without its graph, in memory of its own.

    `mse_loss`, `smooth_l1_loss` and `soft_margin_loss` return a scalar in memory as large as the
    output of the model, and losses are kept until they are logged.

    >>> loss = nn.functional.mse_loss(torch.ones(1024), torch.zeros(1024))
    >>> loss.untyped_storage().nbytes(), detached(loss).untyped_storage().nbytes()
    (4096, 4)
    """
    loss = loss.detach()
    return loss.clone() if loss.untyped_storage().nbytes() > loss.nbytes else loss


def reduction_of(
    whole: float, parts: Sequence[float], counts: Sequence[float], *, tolerance: float = 3e-6
) -> Reduction | None:
    """Return what a loss is over its units, from that of a batch and those of its parts.

    >>> reduction_of(2.0, [1.0, 3.0], [4, 4]), reduction_of(4.0, [1.0, 3.0], [4, 4])
    ('mean', 'sum')
    >>> reduction_of(2.5, [1.0, 3.0], [1, 3]), reduction_of(2.5, [1.0, 3.0], [4, 4])
    ('mean', 'other')

    Args:
        whole: the loss of the batch.
        parts: the losses of its parts, with the same random numbers.
        counts: the units of each part: samples, or what else the loss may be a mean over.
        tolerance: relative; see `tolerance_for`.

    Returns:
        `"other"`: neither, so it cannot be computed in parts. None: these values cannot tell, as
        one of them is not finite, or a part has no loss or no units.
    """
    if not all(map(math.isfinite, (whole, *parts))) or not all(counts):
        return None
    mean = sum(part * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
    if is_close(whole, mean, tolerance):
        # A mean over what only one part has is the sum of the parts, too.
        return None if is_close(whole, sum(parts), tolerance) else "mean"
    if is_close(whole, sum(parts), tolerance):
        return "sum" if all(abs(part) > 1e-12 for part in parts) else None
    return "other"


def nodes(root: Any, through: Collection[str] | None = None) -> Iterator[Any]:
    """Yield the functions that a loss was computed with, from its last one on.

    Args:
        root: its `grad_fn`.
        through: names of functions; what others were given is not followed. None: all is.
    """
    left, seen = [root], set[Any]()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if through is None or node.name() in through:
                left += [before for before, _ in node.next_functions]


def is_close(first: float, other: float, tolerance: float) -> bool:
    """Return whether two losses are equal up to rounding."""
    return math.isclose(first, other, rel_tol=tolerance, abs_tol=1e-12)


def tolerance_for(parameters: Iterable[Tensor], *, is_coarse: bool = False) -> float:
    """Return the relative rounding of a loss.

    Args:
        parameters: those of the model.
        is_coarse: whether it computes in half precision or TF32 all the same.
    """
    halves = (torch.bfloat16, torch.float16)
    return 3e-3 if is_coarse or any(parameter.dtype in halves for parameter in parameters) else 3e-6


@contextmanager
def only_looking(model: nn.Module) -> Iterator[RandomState]:
    """While open, losses are measured: no gradients, the model in eval mode, random state restored.

    The modes are set as attributes: `train` and `eval` of a module may do more.

    Yields:
        The random state, to restore before each of several losses.
    """
    random = RandomState.now()
    try:
        with kept_modes(model), torch.no_grad():
            for module in model.modules():
                module.training = False
            yield random
    finally:
        random.restore()
