"""What a `Trainer` is given, looked at before anything is built of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stretto.errors import TrainingError, cannot, shown
from stretto.training.callback import Callback
from stretto.training.settings import Evaluation

_TAKEN = ("checkpoint", "log")
"""Names that events of the plan have already."""


def check_parts(model: Any, optimizer: Any, loss: Any, *, evaluations: Any, callbacks: Any) -> None:
    """Refuse what is not what it should be, and an optimizer of another model.

    Raises:
        TrainingError: something is of another kind, or two evaluations have one name.
    """
    if not isinstance(model, nn.Module):
        raise _other_kind("train", model, "a torch.nn.Module", "pass the model itself")
    if not isinstance(optimizer, Optimizer):
        raise _other_kind(
            "step with",
            optimizer,
            "a torch optimizer",
            "write torch.optim.AdamW(model.parameters(), lr=1e-3)",
        )
    if not callable(loss):
        raise _other_kind(
            "learn from the loss", loss, "a function", "pass one (model, batch) -> mean loss"
        )
    _check_each("evaluate", evaluations, Evaluation, "write Evaluation(data, every='1ep')")
    _check_each("call back", callbacks, Callback, "pass a list of Callback objects")
    _check_owner(model, optimizer)
    _check_names(evaluations)


def _check_each(what: str, given: Any, kind: type, instead: str) -> None:
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for one in several:
        if not isinstance(one, kind):
            raise _other_kind(what, one, f"a stretto.{kind.__name__}", instead)
    if several is not given:
        raise _other_kind(what, given, "in a list", instead)


def _check_owner(model: nn.Module, optimizer: Optimizer) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise TrainingError(
            cannot(
                f"train {type(model).__name__} with this {type(optimizer).__name__}",
                why="the optimizer has none of the model's parameters",
                instead="build the optimizer of model.parameters(), after the model",
            )
        )


def _check_names(evaluations: Sequence[Evaluation]) -> None:
    counts = Counter((*_TAKEN, *(one.name for one in evaluations)))
    for name, count in counts.items():
        if count > 1:
            raise TrainingError(
                cannot(
                    f"evaluate under the name {name!r}",
                    why="something else of the run has it",
                    instead="give each a name of its own: Evaluation(data, name='test')",
                )
            )


def _other_kind(what: str, given: object, kind: str, instead: str) -> TrainingError:
    # A model prints over many lines, and most objects by their address.
    given = shown(given) if isinstance(given, (str, type)) else f"a {type(given).__name__}"
    return TrainingError(cannot(f"{what} {given}", why=f"it is not {kind}", instead=instead))
