"""The parts of a run that a run file names."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from stretto.config.plans import TimesAndSizes, scale_of
from stretto.config.run import RunConfig
from stretto.config.settings import Evaluate
from stretto.config.targets import Target, accepts, bound_target, call_target, import_target
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
"""The `split` of an evaluation without other data."""


def make_model(config: RunConfig) -> nn.Module:
    """Return the model.

    Raises:
        ConfigError: it cannot be made, or is no module.
    """
    assert config.model is not None, "checked before anything is built"
    return _made(config, config.model, nn.Module, ("model",))


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
        instead="write 'loss: {target: my.models:loss}', a function (model, batch) -> loss",
        where=config.source.name,
    )


def make_optimizer(config: RunConfig, model: nn.Module) -> Optimizer:
    """Return the optimizer of the model's parameters, in the groups that the file names."""
    section = config.optimizer
    assert section is not None, "checked before anything is built"
    rest = {name: value for name, value in model.named_parameters() if value.requires_grad}
    groups: list[dict[str, Any]] = []
    for name, group in section.groups.items():
        taken = [key for key in rest if group.parameters.search(key)]
        if not taken:
            raise ConfigError.cannot(
                f"make the parameter group {name!r}",
                why=f"no parameter left has a name with {group.parameters.pattern!r} in it",
                instead=f"write a pattern of names such as {next(iter(rest), '')!r}",
                where=config.source.where(("optimizer", "groups", name, "parameters")),
            )
        options = _tuples(group.arguments)
        groups.append({"params": [rest.pop(key) for key in taken], "name": name, **options})
    if rest:
        # First, so that the ledger shows the general values without a group's name.
        groups.insert(0, {"params": list(rest.values()), "name": "rest"})
    parameters = groups if section.groups else list(rest.values())
    tupled = Target(target=section.target, **_tuples(section.arguments))
    return _made(config, tupled, Optimizer, ("optimizer",), parameters)


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
    return _made(config, section, TrainStep, ("step",), **given)  # type: ignore[type-abstract]


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples: optimizers take `betas` as one, which YAML does not have."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }


def _with_targets(config: RunConfig, value: Any, path: Path) -> Any:
    """Return a value, or the values of a mapping, with targets as the functions they name."""
    if isinstance(value, Target):
        return bound_target(value, source=config.source, path=path)
    if isinstance(value, dict):
        return {name: _with_targets(config, item, (*path, name)) for name, item in value.items()}
    return value


def _settings(config: RunConfig, settings: S, key: str, **more: Any) -> S:
    """Return settings of the file with its targets imported, and some more."""
    names = [one.name for one in fields(settings) if one.name not in more]  # type: ignore[arg-type]
    made = {name: _with_targets(config, getattr(settings, name), (key, name)) for name in names}
    with config.source.at(key):
        return replace(settings, **made, **more)  # type: ignore[type-var]


def make_loading(config: RunConfig) -> Loading:
    """Return how samples are ordered and fetched."""
    last_batch = config.last_batch
    return _settings(config, config.loading, "loading", seed=config.seed, last_batch=last_batch)


def make_checkpointing(config: RunConfig, run: TimesAndSizes) -> Checkpointing | None:
    """Return when checkpoints are written and which are kept."""
    if config.checkpoint is None:
        return None
    return _settings(config, config.checkpoint, "checkpoint", every=run.triggers["checkpoint"])


def make_stepping(config: RunConfig, run: TimesAndSizes) -> Stepping:
    """Return how a step is computed."""
    return _settings(config, config.stepping, "stepping", rule=run.rule)


def make_evaluation(config: RunConfig, section: Evaluate, run: TimesAndSizes) -> Evaluation:
    """Return an evaluation: its data, metrics and interval."""
    path: Path = ("evaluate",)
    if isinstance(config.evaluate, list):
        path = ("evaluate", config.evaluate.index(section))
    data = _evaluation_data(config, section, path)
    names = ("metrics", "batch_size", "name", "loss", "predict")
    made = {name: _with_targets(config, getattr(section, name), (*path, name)) for name in names}
    with config.source.at(*path):
        return Evaluation(data, run.triggers[f"evaluate {section.name}"], **made)


def _evaluation_data(config: RunConfig, section: Evaluate, path: Path) -> Any:
    if section.data is not None:
        return call_target(section.data, source=config.source, path=(*path, "data"))
    target, arguments = config.data.target, config.data.arguments
    function = import_target(target, where=config.source.where(("data", "target")))
    if not accepts(function, "split") or arguments.get("split") == VALIDATION:
        raise ConfigError.cannot(
            "evaluate",
            why=f"there is no 'data' to evaluate on, and {target} takes no 'split', or the "
            "validation split is trained on",
            instead="write for example 'data: {target: my.data:make_validation}' in it",
            where=config.source.where(path),
        )
    validation = Target(target=target, **arguments | {"split": VALIDATION})
    data = call_target(validation, source=config.source, path=("data",))
    return DataSpec.of(data, sharded=config.data.sharded)


def make_logging(config: RunConfig, run: TimesAndSizes) -> Logging:
    """Return when metrics are logged, and where they go."""
    with config.source.at("log", "loggers"):
        return Logging(
            run.triggers["log"],
            Every(config.log.flush).scaled(scale_of(config)),
            make_loggers(config),
            config.log.console,
            config.model_dump(mode="json"),
        )


def make_loggers(config: RunConfig) -> list[Logger]:
    """Return where metrics go besides the run folder."""
    kinds = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MLflowLogger}
    named = config.log.loggers
    if named is None:
        named = ["tensorboard"] if find_spec("tensorboard") else []
    source = config.source
    return [
        call_target(one, source=source, path=("log", "loggers", number))
        if isinstance(one, Target)
        else kinds[one]()
        for number, one in enumerate(named)
    ]


def make_callbacks(config: RunConfig) -> list[Callback]:
    """Return the callbacks that the file names, with times for a run of its length."""
    made = []
    for number, section in enumerate(config.callbacks):
        callback = _made(config, section, Callback, ("callbacks", number))
        with config.source.at("callbacks", number):
            made.append(callback.scaled(scale_of(config)))
    return made


def _made(
    config: RunConfig, section: Target, kind: type[S], path: Path, *positional: Any, **extra: Any
) -> S:
    """Call a target and check the result.

    Raises:
        ConfigError: it cannot be called, or returns another kind of object.
    """
    found = call_target(section, *positional, source=config.source, path=path, **extra)
    if isinstance(found, kind):
        return found
    raise ConfigError.cannot(
        f"use {section.target} as {show_path(path)}",
        why=f"it makes a {type(found).__name__} and not a {kind.__name__}",
        instead=f"name a class or a function that makes a {kind.__name__}",
        where=config.source.where(path),
    )
