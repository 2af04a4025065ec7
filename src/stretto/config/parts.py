"""The parts of a run that a run file names."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from stretto.config.fields import Target
from stretto.config.plans import TimesAndSizes, scale_of
from stretto.config.run import RunConfig
from stretto.config.settings import Evaluate
from stretto.config.targets import accepts, bound_target, call_target, import_target
from stretto.config.yaml import Path, show_path
from stretto.data import DataSpec
from stretto.errors import ConfigError
from stretto.runtime import TrainStep
from stretto.timing import Every
from stretto.training import (
    Callback,
    Checkpointing,
    Evaluation,
    Loading,
    Logger,
    Logging,
    MLflowLogger,
    Stepping,
    TensorBoardLogger,
    WandbLogger,
)

S = TypeVar("S")
VALIDATION = "validation"
"""What `split` is for an evaluation that names no data of its own."""


def make_model(config: RunConfig) -> nn.Module:
    """Return the model.

    Raises:
        ConfigError: it cannot be made, or is no module.
    """
    assert config.model is not None, "checked before anything is built"
    return _made(config, config.model, nn.Module, "a torch.nn.Module", ("model",))


def make_loss(config: RunConfig, model: nn.Module) -> Any:
    """Return the loss function: the file's, or that of the model's class."""
    if config.loss is not None:
        return bound_target(config.loss, source=config.source, path=("loss",))
    loss = getattr(type(model), "loss", None)
    if callable(loss):
        return loss
    raise ConfigError.cannot(
        "train",
        why=f"there is no 'loss', and {type(model).__name__} has no static method of that name",
        instead="write for example 'loss: {target: my.models:loss}', "
        "a function (model, batch) -> loss",
        where=config.source.name,
    )


def make_optimizer(config: RunConfig, model: nn.Module) -> Optimizer:
    """Return the optimizer of the model's parameters, in the groups that the file names."""
    section = config.optimizer
    assert section is not None, "checked before anything is built"
    rest = {name: value for name, value in model.named_parameters() if value.requires_grad}
    groups: list[dict[str, Any]] = []
    for name, group in section.groups.items():
        taken = [key for key in rest if re.search(group.parameters, key)]
        if not taken:
            raise ConfigError.cannot(
                f"make the parameter group {name!r}",
                why=f"no parameter left has a name with {group.parameters!r} in it",
                instead=f"write a pattern of names such as {next(iter(rest), '')!r}",
                where=config.source.where(("optimizer", "groups", name, "parameters")),
            )
        options = _tuples(group.options)
        groups.append({"params": [rest.pop(key) for key in taken], "name": name, **options})
    if rest:
        # First, so that what the ledger shows without a group's name are the general values.
        groups.insert(0, {"params": list(rest.values()), "name": "rest"})
    parameters = groups if section.groups else list(rest.values())
    tupled = type(section).model_validate({"target": section.target, **_tuples(section.arguments)})
    return _made(config, tupled, Optimizer, "a torch Optimizer", ("optimizer",), parameters)


def make_step(config: RunConfig, model: nn.Module) -> TrainStep | None:
    """Return the file's own training step; None if it has none.

    Raises:
        ConfigError: it cannot be made, or is no `TrainStep`.
    """
    section = config.step
    if section is None:
        return None
    target = import_target(section.target, where=config.source.where(("step", "target")))
    given: dict[str, Any] = {"model": model}
    if config.optimizer is not None:
        given["optimizer"] = make_optimizer(config, model)
    if config.loss is not None or accepts(target, "loss"):
        given["loss"] = make_loss(config, model)
    for name in given:
        if name in section.arguments:
            raise ConfigError.cannot(
                f"give {section.target} a {name!r} of its own",
                why=f"it is called with the {name} of the run file",
                instead="leave it out",
                where=config.source.where(("step", name)),
            )
    return _made(config, section, TrainStep, "a stretto.TrainStep", ("step",), **given)  # type: ignore[type-abstract]


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples: optimizers take `betas` as one, which YAML does not have."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }


def make_settings(config: RunConfig, kind: type[S], section: Any, path: Path, /, **more: Any) -> S:
    """Return the settings that a section holds, with its targets imported, and some more."""

    def made(value: Any, here: Path) -> Any:
        if isinstance(value, Target):
            return bound_target(value, source=config.source, path=here)
        if isinstance(value, dict):
            return {name: made(item, (*here, name)) for name, item in value.items()}
        return value

    names = [name for name in type(section).model_fields if name not in more]
    values = {name: made(getattr(section, name), (*path, name)) for name in names}
    with config.source.at(*path):
        return kind(**values, **more)


def make_loading(config: RunConfig) -> Loading:
    """Return how samples are ordered and fetched."""
    more = {"seed": config.seed, "last_batch": config.last_batch}
    return make_settings(config, Loading, config.loading, ("loading",), **more)


def make_checkpointing(config: RunConfig, run: TimesAndSizes) -> Checkpointing | None:
    """Return when checkpoints are written and which are kept."""
    if config.checkpoint is None:
        return None
    every = run.triggers["checkpoint"]
    return make_settings(config, Checkpointing, config.checkpoint, ("checkpoint",), every=every)


def make_stepping(config: RunConfig) -> Stepping:
    """Return how a step is computed."""
    return make_settings(config, Stepping, config.stepping, ("stepping",))


def make_evaluation(config: RunConfig, section: Evaluate, run: TimesAndSizes) -> Evaluation:
    """Return an evaluation: its data, metrics and interval."""
    path: Path = ("evaluate",)
    if isinstance(config.evaluate, list):
        path = ("evaluate", config.evaluate.index(section))
    data = _evaluation_data(config, section, path)
    every = run.triggers[f"evaluate {section.name}"]
    return make_settings(config, Evaluation, section, path, data=data, every=every)


def _evaluation_data(config: RunConfig, section: Evaluate, path: Path) -> Any:
    if section.data is not None:
        return call_target(section.data, source=config.source, path=(*path, "data"))
    target = import_target(config.data.target, where=config.source.where(("data", "target")))
    if not accepts(target, "split"):
        raise ConfigError.cannot(
            "evaluate",
            why=f"there is no 'data' to evaluate on, and {config.data.target} takes no 'split'",
            instead="write for example 'data: {target: my.data:make_validation}' in it",
            where=config.source.where(path),
        )
    if config.data.arguments.get("split") == VALIDATION:
        raise ConfigError.cannot(
            "evaluate",
            why="there is no 'data' to evaluate on, and the validation split is trained on",
            instead="write 'data: {target: ...}' in it",
            where=config.source.where(path),
        )
    data = call_target(config.data, source=config.source, path=("data",), split=VALIDATION)
    return DataSpec.of(data, sharded=config.data.sharded)


def make_logging(config: RunConfig, run: TimesAndSizes) -> Logging:
    """Return when metrics are logged, and where they go."""
    return make_settings(
        config,
        Logging,
        config.log,
        ("log",),
        every=run.triggers["log"],
        flush=Every(config.log.flush).scaled(scale_of(config)),
        loggers=make_loggers(config),
        config=config.model_dump(mode="json"),
    )


def make_loggers(config: RunConfig) -> list[Logger]:
    """Return where metrics go besides the run folder."""
    kinds = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MLflowLogger}
    wanted = config.log.loggers
    if wanted is None:
        wanted = ["tensorboard"] if find_spec("tensorboard") else []
    made: list[Logger] = []
    for number, one in enumerate(wanted):
        if not isinstance(one, Target):
            made.append(kinds[one]())
            continue
        kind = "a logger with the methods start, log and close"
        made.append(_made(config, one, Logger, kind, ("log", "loggers", number)))  # type: ignore[type-abstract]
    return made


def make_callbacks(config: RunConfig) -> list[Callback]:
    """Return the listeners that the file names, with times for a run of the length it has."""
    made = []
    for number, section in enumerate(config.callbacks):
        path = ("callbacks", number)
        callback = _made(config, section, Callback, "a stretto.training.Callback", path)
        with config.source.at("callbacks", number):
            made.append(callback.scaled(scale_of(config)))
    return made


def _made(
    config: RunConfig,
    section: Target,
    kind: type[S],
    called: str,
    path: Path,
    *positional: Any,
    **extra: Any,
) -> S:
    """Return what a target returns, which is of a kind that messages call `called`.

    Raises:
        ConfigError: it cannot be made, or is of another kind.
    """
    found = call_target(section, *positional, source=config.source, path=path, **extra)
    if isinstance(found, kind):
        return found
    raise ConfigError.cannot(
        f"use what {section.target} returns as {show_path(path)}",
        why=f"it is a {type(found).__name__} and not {called}",
        instead=f"name something that makes {called}",
        where=config.source.where(path),
    )
