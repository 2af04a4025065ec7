"""What a `Trainer` is given, looked at before anything is built of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stretto.batching.following import check_monitored, metrics_of
from stretto.data import DataSpec
from stretto.errors import TrainingError, shown
from stretto.runtime import TrainStep
from stretto.settings import Computing, Stepping, read_settings
from stretto.training.callback import Callback
from stretto.training.criterion import as_loss
from stretto.training.settings import Evaluation

_TAKEN = ("checkpoint", "log")
"""Names that events of the plan have already."""
OF_SUPERVISED_STEP = ("precision", "clip_norm", "compile")
"""The settings that only the step of one model and one loss reads, besides `loss_reduction`."""


def check_parts(
    model: Any,
    optimizer: Any,
    loss: Any,
    *,
    computing: Computing,
    stepping: Stepping,
    evaluations: Any,
    callbacks: Any,
) -> None:
    """Refuse what is not what it should be, and an optimizer of another model.

    Raises:
        TrainingError: something is of another kind, or two evaluations have one name.
    """
    if isinstance(model, TrainStep):
        _check_step(model, optimizer, loss, computing, stepping)
    else:
        _check_model(model)
        _check_optimizer(optimizer)
        if not callable(loss):
            raise _other_kind(
                "learn from the loss", loss, "a function", "pass one (model, batch) -> mean loss"
            )
    _check_each("evaluate", evaluations, Evaluation, "write Evaluation(data, every='1ep')")
    _check_each("call back", callbacks, Callback, "pass a list of Callback objects")
    if isinstance(model, TrainStep):
        _check_owner(model.model, model.optimizers)
        _check_losses(model, evaluations)
    else:
        _check_owner(model, [optimizer])
    _check_names(evaluations)
    for one in callbacks:
        if one.monitor is not None:
            check_monitored(one.monitor, metrics_of(evaluations))


def given_size(batch_size: Any, data: Any) -> Any:
    """Return the batch size that was given.

    Raises:
        TrainingError: none was.
    """
    if batch_size is None:
        inner = data.data if isinstance(data, DataSpec) else data
        own = getattr(inner, "batch_size", None) if isinstance(inner, DataLoader) else None
        raise TrainingError.cannot(
            "train without a batch size",
            why="batch_size is missing"
            + (", and that of the DataLoader does not count for all ranks" if own else ""),
            instead=f"write batch_size={own or 32}",
        )
    return batch_size


def read_evaluations(given: Any) -> list[Any]:
    """Return evaluations from one, several, or the data of one; each may be a mapping."""
    if given is None:
        return []
    several = given if isinstance(given, (list, tuple)) else [given]
    if not any(map(_is_evaluation, several)):
        is_data = hasattr(given, "__getitem__") or hasattr(given, "__iter__")
        is_data = is_data and bool(given) and not isinstance(given, (str, Mapping))
        several = [Evaluation(given)] if is_data else several
    return [_with_loss(one) if _is_evaluation(one) else one for one in several]


def _is_evaluation(one: object) -> bool:
    return isinstance(one, Evaluation) or (isinstance(one, Mapping) and "data" in one)


def _with_loss(given: Any) -> Evaluation:
    one = read_settings(Evaluation, given, "evaluate")
    return replace(one, loss=as_loss(one.loss, "mean")) if callable(one.loss) else one


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise _other_kind("train", model, "a torch.nn.Module", "pass the model itself")


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise _other_kind(
            "step with",
            optimizer,
            "a torch optimizer",
            "write torch.optim.AdamW(model.parameters(), lr=1e-3)",
        )


def _check_step(
    step: TrainStep, optimizer: object, loss: object, computing: Computing, stepping: Stepping
) -> None:
    """Refuse a step that is not whole, and settings that only the step of a model reads."""
    name = type(step).__qualname__
    for attribute in ("model", "optimizers"):
        if not hasattr(step, attribute):
            raise TrainingError.cannot(
                f"train with {name}",
                why=f"it has no attribute {attribute!r}",
                instead=f"set self.{attribute} in {name}.__init__",
            )
    _check_model(step.model)
    if not isinstance(step.optimizers, Sequence):
        raise TrainingError.cannot(
            f"train with {name}",
            why=f"its optimizers are a {type(step.optimizers).__name__}, and not a list",
            instead=f"write self.optimizers = [optimizer] in {name}.__init__",
        )
    for one in step.optimizers or (None,):
        _check_optimizer(one)
    parts = {"optimizer": optimizer, "loss": loss}
    given: dict[str, object] = {one: None for one, part in parts.items() if part is not None}
    for setting in OF_SUPERVISED_STEP:
        if getattr(computing, setting) != getattr(Computing(), setting):
            given[setting] = getattr(computing, setting)
    if stepping.loss_reduction != "mean":
        given["loss_reduction"] = stepping.loss_reduction
    for setting, value in given.items():
        raise TrainingError.cannot(
            f"use {setting if value is None else f'{setting}={shown(value)}'} with {name}",
            why="a step of your own decides that itself",
            instead=f"do it in {name}, and leave {setting} out",
        )


def _check_losses(step: TrainStep, evaluations: Sequence[Evaluation]) -> None:
    for one in evaluations:
        if step.loss is None and one.loss is None:
            raise TrainingError.cannot(
                f"evaluate {one.name!r} with {type(step).__qualname__}",
                why="the step has no loss(model, batch)",
                instead=f"write Evaluation(data, loss=..., name={one.name!r})",
            )


def _check_each(what: str, given: Any, kind: type, instead: str) -> None:
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for one in several:
        if not isinstance(one, kind):
            raise _other_kind(what, one, f"a stretto.{kind.__name__}", instead)
    if several is not given:
        raise _other_kind(what, given, "in a list", instead)


def _check_owner(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            continue
        raise TrainingError.cannot(
            f"train {type(model).__name__} with this {type(optimizer).__name__}",
            why="the optimizer has none of the model's parameters",
            instead="build the optimizer of model.parameters(), after the model",
        )


def _check_names(evaluations: Sequence[Evaluation]) -> None:
    counts = Counter((*_TAKEN, *(one.name for one in evaluations)))
    for name, count in counts.items():
        if count > 1:
            raise TrainingError.cannot(
                f"evaluate under the name {name!r}",
                why="something else of the run has it",
                instead="give each a name of its own: Evaluation(data, name='test')",
            )


def _other_kind(what: str, given: object, kind: str, instead: str) -> TrainingError:
    # A model prints over many lines, and most objects by their address.
    is_short = given is None or isinstance(given, (str, type))
    given = shown(given) if is_short else f"a {type(given).__name__}"
    return TrainingError.cannot(f"{what} {given}", why=f"it is not {kind}", instead=instead)
