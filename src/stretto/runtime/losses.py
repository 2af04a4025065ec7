"""Losses as scalars, and what a loss is a mean over.

It is known in two ways. If the loss can be called again, that of a batch is compared with those of
its parts (`reduction_of`). If only the loss itself is there, its graph is read (`MeanCheck`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from stretto.errors import TrainingError
from stretto.runtime.loss_graph import Reading, read
from stretto.runtime.modes import kept_modes
from stretto.runtime.random_state import RandomState

SUM: Final = "it is a sum over the samples"
Reduction: TypeAlias = Literal["mean", "sum", "other"]


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


class Doubt(NamedTuple):
    """Why losses of micro-batches may not be weighed, and what to write instead."""

    why: str
    instead: str


@final
class MeanCheck:
    """Checks, from graphs, that losses of micro-batches are means over their samples.

    It looks at steps 1, 2, 4, 8, ... that are computed in parts: at the first two micro-batches
    of each, and at the last.

    >>> check = MeanCheck("pass units=")
    >>> check.begin(2)
    True
    >>> x, weight = torch.ones(4, 3), nn.Parameter(torch.ones(3))
    >>> for mask in (torch.ones(4), torch.arange(4.0)):
    ...     loss = ((x @ weight).square() * mask).sum() / mask.sum()
    ...     print(check.look(loss, 4, 4, is_last=True))
    None
    Doubt(why='it is a sum, divided by another number than ...

    Args:
        ask: what to write about a loss that is not known to be a mean over samples; None: it is
            known what it is over, so only sums and divided losses are doubted.
    """

    def __init__(self, ask: str | None) -> None:
        self._ask, self._ratios = ask, list[float]()
        self.num_steps, self._num_parts, self._num_seen = 0, 0, 0

    def begin(self, num_parts: int) -> bool:
        """Begin a step that is computed in parts; return whether it is looked at.

        Args:
            num_parts: micro-batches of this rank.
        """
        self.num_steps, self._num_parts, self._num_seen = self.num_steps + 1, num_parts, 0
        return self.num_steps.bit_count() == 1

    def look(
        self,
        loss: Tensor,
        num_rows: int,
        num_samples: int,
        *,
        is_last: bool,
        accumulation: float = 1.0,
    ) -> Doubt | None:
        """Return a doubt that a loss is a mean over samples, if there is one.

        Args:
            loss: the loss of a micro-batch, before its backward pass.
            num_rows: the first dimension of its batch.
            num_samples: its samples; 0 for a dummy.
            is_last: whether it is the last of the step.
            accumulation: what a framework divides the loss by.
        """
        if not num_samples or (self._num_seen > 1 and not is_last):
            return None
        try:
            found = read(loss, num_rows)
        except Exception as error:  # noqa: BLE001  of a function that is new to it
            found = Reading(f"its graph cannot be read: {error!r}")
        self._num_seen += 1
        ratios = [num_rows / num_samples, *found.ratios]
        before, self._ratios = self._ratios if self._num_seen > 1 else ratios, ratios
        # Layers that are left out at random change how many ratios there are.
        pairs = zip(before, ratios, strict=False) if len(before) == len(ratios) else ()
        why = found.why
        if why is None and any(abs(one - other) > 1e-5 * abs(one) for one, other in pairs):
            why = "it depends on numbers that differ between micro-batches, such as sums of masks"
        if found.is_sum:
            return Doubt(SUM, "return a mean: divide it by what it is over, such as len(batch)")
        if why is not None and self._ask is not None:
            return Doubt(why, self._ask)
        steps = (accumulation, float(self._num_parts))
        for one in found.divisors if self.num_steps == 1 else ():  # later, it may be chance
            if one != 1 and any(math.isclose(one, other, rel_tol=1e-5) for other in steps):
                why = f"it is divided by {one:.6g}, as for an accumulation, which is done already"
                part = f"or, if it is part of the loss, multiply it: loss * (1 / {one:.6g})"
                return Doubt(why, f"remove that; {part}")
        return None


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


def is_close(first: float, other: float, tolerance: float) -> bool:
    """Return whether two losses are equal up to rounding."""
    return math.isclose(first, other, rel_tol=tolerance, abs_tol=1e-12)


def tolerance_for(
    parameters: Iterable[Tensor], *, is_coarse: bool = False, loss: Tensor | None = None
) -> float:
    """Return the relative rounding of a loss.

    Args:
        parameters: those of the model.
        is_coarse: whether it computes in half precision or TF32 all the same.
        loss: the loss; one in half precision is rounded by itself, and three are compared.
    """
    halves = (torch.bfloat16, torch.float16)
    is_half = is_coarse or any(parameter.dtype in halves for parameter in parameters)
    # Both sides are off by half a unit in the last place; the rest is for what was added up.
    own = 1.5 * torch.finfo(loss.dtype).eps if loss is not None and loss.dtype in halves else 0.0
    return max(3e-3 if is_half else 3e-6, own)


@contextmanager
def only_looking(model: nn.Module, *, is_training: bool = False) -> Iterator[RandomState]:
    """While open, losses are measured: no gradients, no dropout, random state restored.

    The modes are set as attributes: `train` and `eval` of a module may do more.

    Args:
        model: the model.
        is_training: whether its layers stay in the mode that they have, as a loss may ask for it.
            Those that normalize by statistics of the batch are in eval mode in any case.

    Yields:
        The random state, to restore before each of several losses.
    """
    random = RandomState.now()
    try:
        with kept_modes(model), torch.no_grad(), _WithoutDropout():
            for module in model.modules():
                is_kept = is_training and not isinstance(module, _BatchNorm)
                module.training = module.training and is_kept
            yield random
    finally:
        random.restore()


class _WithoutDropout(TorchFunctionMode):
    """While open, dropout does nothing: it leaves out other places of a batch than of its parts."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, but not dropout."""
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name.endswith(("dropout", "dropout1d", "dropout2d", "dropout3d")):
            return args[0] if args else options["input"]
        if func is nn.functional.scaled_dot_product_attention:
            args, options["dropout_p"] = (*args[:4], *args[5:]), 0.0
            if len(args) > 4:
                options["is_causal"], args = args[4], args[:4]
        return func(*args, **options)
