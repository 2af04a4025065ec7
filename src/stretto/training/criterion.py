"""Losses as a trainer takes them: `loss(model, batch)`, or a criterion `(output, target)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from stretto.errors import TrainingError, shown
from stretto.runtime.agreement import as_text

_OUTPUTS = frozenset({"input", "inputs", "output", "outputs", "pred", "preds", "prediction",
                      "predictions", "logits", "y_pred", "y_hat"})  # fmt: skip
_TARGETS = frozenset({"target", "targets", "label", "labels", "y", "y_true"})
_EXAMPLE = "write loss=lambda model, batch: criterion(model(batch[0]), batch[1])"

HINT = (
    "stretto calls the loss as loss(model, batch); if it is a criterion, name its arguments "
    f"(output, target), or {_EXAMPLE}"
)
"""For errors of a function that may be meant as a criterion."""

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
        self._ignored, weight = _setting(criterion, "ignore_index"), _setting(criterion, "weight")
        self._weight = weight if self._ignored is None or weight is None else weight.cpu().clone()

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """Return the criterion of the model's output and the targets.

        Raises:
            TrainingError: the batch is no pair.
        """
        inputs, targets = self._pair(batch)
        loss: Tensor = self.criterion(model(inputs), targets)
        return loss

    @property
    def is_over_targets(self) -> bool:
        """Whether it is a mean over the targets that it does not ignore, as cross entropy is."""
        return self._ignored is not None

    def count(self, batch: Any) -> float:
        """Return the sum of the weights of the targets that are not ignored."""
        targets = self._pair(batch)[1]
        if targets.is_floating_point():  # probabilities of classes; none is ignored
            return float(targets.numel())
        kept = targets[targets != self._ignored]
        return float(kept.numel() if self._weight is None else self._weight[kept.cpu()].sum())

    def to(self, device: torch.device) -> None:
        """Move the criterion."""
        if isinstance(self.criterion, nn.Module):
            self.criterion.to(device)

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        size = f" of {len(batch)} items" if isinstance(batch, (tuple, list)) else ""
        raise TrainingError.cannot(
            f"use {self!r} as the loss",
            why=f"a batch is a {type(batch).__name__}{size}, and not (inputs, targets)",
            instead=_EXAMPLE.replace("batch[0]", "...").replace("batch[1]", "..."),
        )

    def __repr__(self) -> str:
        return as_text(self.criterion)


def as_loss(loss: Any, reduction: Literal["mean", "sum"]) -> Any:
    """Return `loss(model, batch)`, from one or from a criterion.

    A criterion is a module whose `forward` does not take a `model`, or a function of two arguments
    with names such as `(input, target)` or `(logits, labels)`.

    Raises:
        TrainingError: it takes other arguments; or it is a criterion with another reduction, or
            with parameters.
    """
    names = _names(loss)
    why, instead = None, _EXAMPLE
    if isinstance(loss, type) or (names is not None and len(names) != 2):
        why = "a loss takes (model, batch), or (output, target)"
    elif (names is not None and names[0] == "model") or (
        not isinstance(loss, nn.Module)
        and (names is None or names[0] not in _OUTPUTS or names[1] not in _TARGETS)
    ):
        return loss
    elif (own := _reduction(loss)).removeprefix("batch") != reduction:
        why = f"it has reduction={own!r}, and not {reduction!r}"
        instead = "leave reduction out, or set loss_reduction as well"
    elif isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        why = "it has parameters, which are saved and averaged over ranks with the model only"
        instead = "make it a part of the model, and " + _EXAMPLE.replace("crit", "model.crit")
    elif _setting(loss, "ignore_index") is not None and not _is_torchs(loss):
        why = "it has an ignore_index of its own: its mean may be over all targets, or some"
        instead = _EXAMPLE + ", and as loss_weight what it is a mean over"
    if why is not None:
        raise TrainingError.cannot(
            f"use {shown(as_text(loss))} as the loss", why=why, instead=instead
        )
    return CriterionLoss(loss)


def _is_torchs(loss: Any) -> bool:
    """Return whether a criterion is a mean over the targets as torch's losses of classes are."""
    if isinstance(loss, nn.Module):
        return type(loss).forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
    return (loss.func if isinstance(loss, partial) else loss) in (
        nn.functional.cross_entropy,
        nn.functional.nll_loss,
    )


def _reduction(loss: Any) -> str:
    """Return the reduction that a criterion names as torch's do; by default the mean."""
    own = _setting(loss, "reduction")
    return own if isinstance(own, str) else "mean"


def _parameters(loss: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    except (TypeError, ValueError):
        return {}


def _names(loss: Any) -> list[str] | None:
    """Return the names of the arguments that a loss must be given; None: not known."""
    found = _parameters(loss).values()
    if not found or any(one.kind is one.VAR_POSITIONAL for one in found):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in found if one.kind in kinds and one.default is one.empty]


def _setting(criterion: Any, name: str) -> Any:
    """Return a setting of a criterion: an attribute of a module, the default of an argument."""
    if isinstance(criterion, nn.Module):
        return getattr(criterion, name, None)
    found = _parameters(criterion).get(name)
    return None if found is None or found.default is found.empty else found.default
