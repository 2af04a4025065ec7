"""Checks of the arguments of a `Trainer`, before anything is built from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stretto.batching.metrics import check_monitored, metrics_of
from stretto.data import DataSpec
from stretto.errors import TrainingError
from stretto.runtime import TrainStep
from stretto.settings import Computing, Stepping, read_settings
from stretto.timing.grammar import exact
from stretto.timing.time import Number
from stretto.training.callback import Callback
from stretto.training.criterion import as_loss
from stretto.training.settings import Evaluation

_PARTS = {
    "model": (nn.Module, "pass a torch.nn.Module"),
    "optimizer": (Optimizer, "write torch.optim.AdamW(model.parameters(), lr=1e-3)"),
}


def check_parts(
    model: Any, optimizer: Any, loss: Any, computing: Computing, stepping: Stepping
) -> None:
    """Refuse what is not a model, an optimizer or a loss, and an optimizer of another model.

    Raises:
        TrainingError: something is of another kind.
    """
    optimizers = [optimizer]
    if isinstance(model, TrainStep):
        _check_step(model, optimizer, loss, computing, stepping)
        model, optimizers = model.model, list(model.optimizers)
    elif not callable(loss):
        raise _not_a("loss", loss, "pass a function (model, batch) -> mean loss")
    for name, given in [("model", model), *(("optimizer", one) for one in optimizers or [None])]:
        kind, instead = _PARTS[name]
        if not isinstance(given, kind):
            raise _not_a(name, given, instead)
    own = set(map(id, model.parameters()))
    for one in optimizers:
        if own.isdisjoint([id(p) for group in one.param_groups for p in group["params"]]):
            raise TrainingError.cannot(
                f"train {type(model).__name__} with this {type(one).__name__}",
                why="the optimizer has none of the model's parameters",
                instead="build the optimizer of model.parameters(), after the model",
            )


def check_listeners(
    model: Any, evaluations: Sequence[Evaluation], callbacks: Sequence[Any]
) -> None:
    """Refuse evaluations without a loss or with one name, and what is not a callback.

    Raises:
        TrainingError: there is one.
    """
    # Events of a plan have the first two names already.
    names = ["checkpoint", "log", *(one.name for one in evaluations), *metrics_of(evaluations)]
    for name, count in Counter(names).items():
        if count > 1:
            raise TrainingError.bad("name", name, "the name is not unique", "choose another name")
    for evaluation in evaluations:
        if isinstance(model, TrainStep) and model.loss is None and evaluation.loss is None:
            raise TrainingError.cannot(
                f"evaluate {evaluation.name!r} with {type(model).__qualname__}",
                why="the step has no loss(model, batch)",
                instead=f"write Evaluation(data, loss=..., name={evaluation.name!r})",
            )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise _not_a("callbacks", callback, "pass a list of Callback objects")
        if callback.monitor is not None:
            check_monitored(callback.monitor, metrics_of(evaluations))


def given_size(batch_size: Any, data: Any) -> Any:
    """Return the batch size that was given.

    Raises:
        TrainingError: none was.
    """
    if batch_size is None:
        inner = data.data if isinstance(data, DataSpec) else data
        own = getattr(inner, "batch_size", None) if isinstance(inner, DataLoader) else None
        why = "that of the DataLoader is for one rank" if own else "it is missing"
        raise TrainingError.bad("batch_size", None, why, f"write batch_size={own or 32}")
    return batch_size


def check_ratio(ratio: Number) -> Number:
    """Return the ratio of `scale_schedule`.

    Raises:
        TrainingError: it is not above 0.
        TimeError: it is not a finite number.
    """
    if exact(ratio) <= 0:
        why, instead = "the run has no length", "write a ratio above 0"
        raise TrainingError.bad("scale_schedule", ratio, why, instead)
    return ratio


def read_evaluations(given: Any) -> list[Evaluation]:
    """Return evaluations from one, several, or the data of one; each may be a mapping.

    Raises:
        StrettoError: there is something else.
    """
    several = given if isinstance(given, (list, tuple)) else [given]
    if given is None or not several:
        return []
    if not any(isinstance(one, (Evaluation, Mapping, str)) for one in several):
        several = [Evaluation(given)]
    read = [read_settings(Evaluation, one, "evaluate") for one in several]
    return [
        replace(one, loss=as_loss(one.loss, "mean")) if callable(one.loss) else one for one in read
    ]


def _check_step(
    step: TrainStep, optimizer: object, loss: object, computing: Computing, stepping: Stepping
) -> None:
    """Refuse a step without its parts, and settings that it would not read."""
    name = type(step).__qualname__
    for attribute in ("model", "optimizers"):
        if not hasattr(step, attribute):
            raise TrainingError.cannot(
                f"train with {name}",
                why=f"it has no attribute {attribute!r}",
                instead=f"set self.{attribute} in {name}.__init__",
            )
    if not isinstance(step.optimizers, Sequence):
        raise _not_a("optimizers", step.optimizers, "write self.optimizers = [optimizer]")
    plain = Computing()
    ignored = {
        "optimizer": optimizer is not None,
        "loss": loss is not None,
        "precision": computing.precision != plain.precision,
        "clip_norm": computing.clip_norm is not None,
        "compile": computing.compile,
        "loss_reduction": stepping.loss_reduction != "mean",
    }
    for setting in (one for one, is_given in ignored.items() if is_given):
        raise TrainingError.cannot(
            f"use {setting} with {name}",
            why="a step of your own decides that itself",
            instead=f"do it in {name}, and leave {setting} out",
        )


def _not_a(name: str, given: object, instead: str) -> TrainingError:
    shown = given if given is None or isinstance(given, (str, type)) else type(given)
    return TrainingError.bad(name, shown, "it is of another kind", instead)
