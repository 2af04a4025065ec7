"""Losses as a trainer takes them: `loss(model, batch)`, or a criterion `(output, target)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, final

from torch import Tensor, nn

from stretto.errors import TrainingError, shown
from stretto.settings import Stepping
from stretto.training.distributed.agreement import as_text

_OUTPUTS = frozenset({"input", "inputs", "output", "outputs", "pred", "preds", "prediction",
                      "predictions", "logits", "y_pred", "y_hat"})  # fmt: skip
_TARGETS = frozenset({"target", "targets", "label", "labels", "y", "y_true"})
_EXAMPLE = "write loss=lambda model, batch: criterion(model(batch[0]), batch[1])"


Criterion: TypeAlias = nn.Module | Callable[[Tensor, Tensor], Tensor]
"""The mean loss of an output and its target."""


@final
class CriterionLoss:
    """`loss(model, batch)` of a criterion and batches `(inputs, targets)`.

    >>> import torch
    >>> loss = CriterionLoss(nn.MSELoss())
    >>> loss(nn.Identity(), (torch.ones(2), torch.zeros(2)))
    tensor(1.)
    """

    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """Return the criterion of the model's output and the targets.

        Raises:
            TrainingError: the batch is no pair.
        """
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)} items" if isinstance(batch, (tuple, list)) else ""
            raise TrainingError.cannot(
                f"use {self!r} as the loss",
                why=f"a batch is a {type(batch).__name__}{size}, and not (inputs, targets)",
                instead=_EXAMPLE.replace("batch[0]", "...").replace("batch[1]", "..."),
            )
        loss: Tensor = self.criterion(model(batch[0]), batch[1])
        return loss

    def __repr__(self) -> str:
        return as_text(self.criterion)


def as_loss(loss: Any, stepping: Stepping) -> Any:
    """Return `loss(model, batch)`, from one or from a criterion.

    A criterion is a module, or a function of two arguments with the names of those of torch, such
    as `(input, target)`, `(output, labels)` or `(logits, y)`. Any other is `loss(model, batch)`.

    Raises:
        TrainingError: it takes other arguments, or it is a criterion that is no mean over samples.
    """
    names = _names(loss)
    if isinstance(loss, type) or (names is not None and len(names) != 2):
        takes = "it is a class" if names is None or isinstance(loss, type) else (
            f"it takes {len(names)} arguments ({', '.join(names)})"
        )  # fmt: skip
        raise TrainingError.cannot(
            f"use {shown(as_text(loss))} as the loss",
            why=f"{takes}; a loss takes (model, batch), or (output, target)",
            instead=_EXAMPLE,
        )
    takes_model = names is not None and names[0] in ("model", "net", "network", "module")
    is_named = names is not None and names[0] in _OUTPUTS and names[1] in _TARGETS
    if takes_model or not (is_named or isinstance(loss, nn.Module)):
        return loss
    reduction = getattr(loss, "reduction", "mean")
    is_sum = reduction == "sum" and stepping.loss_reduction == "sum"
    if reduction not in ("mean", "batchmean") and not is_sum:
        raise TrainingError.cannot(
            f"use {loss!r} as the loss",
            why=f"it does not return a mean, but with reduction={reduction!r}",
            instead="leave reduction out",
        )
    if getattr(loss, "weight", None) is not None and not callable(stepping.loss_weight):
        raise TrainingError.cannot(
            f"use {loss!r} with class weights as the loss",
            why="it is a mean over the weights of the targets, and micro-batches are weighed by "
            "their samples",
            instead="pass stepping={'loss_weight': lambda batch: ...}, a function that returns the "
            "sum of these weights",
        )
    return CriterionLoss(loss)


def _names(loss: Any) -> list[str] | None:
    """Return the names of the arguments that a loss must be given; None: not known."""
    try:
        call = loss.forward if isinstance(loss, nn.Module) else loss
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.kind in kinds and one.default is one.empty]
