"""Trainers, and the search for a batch size, from run files."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from stretto._location import public
from stretto.batching import Tokens, as_rules, with_maximum
from stretto.config.plans import (
    TimesAndSizes,
    build_run,
    imported,
    make_loading,
    make_spec,
    prepare_run,
)
from stretto.config.run import RunConfig, written
from stretto.config.targets import Target, accepts, call_target, import_target, tuples
from stretto.config.yaml import Path as Keys
from stretto.config.yaml import show_path
from stretto.data import DataSpec, StepLoader
from stretto.distributed.strategy import shard_blocks
from stretto.errors import ConfigError, StrettoError
from stretto.memory.examples import example_batches, resizable, unequal_samples
from stretto.runtime import SupervisedStep, TrainStep
from stretto.runtime.ranks import Ranks, find_device
from stretto.runtime.sharded import is_fully_sharded
from stretto.schedules.names import parse_name
from stretto.timing import TimeUnit
from stretto.training import (
    Callback,
    Evaluation,
    Logging,
    MLflowLogger,
    TensorBoardLogger,
    Trainer,
    WandbLogger,
)
from stretto.training.criterion import as_loss
from stretto.training.fitting import keeps_gradients_apart

S = TypeVar("S")
VALIDATION = "validation"
"""The `split` of an evaluation without other data."""
_AS_THEY_ARE = (
    *("max_duration", "micro_batch_size", "clip_norm", "compile", "device"),
    *("stepping", "checkpoint", "idle_ranks", "sequence_length", "scale_schedule"),
)
"""Keys of a run file that are arguments of a `Trainer` with the same name and value."""


def build_trainer(
    config: RunConfig,
    *,
    folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
    resumes: bool = False,
) -> Trainer:
    """Return the trainer of the run that a file describes; targets are imported and called.

    Args:
        config: the run file.
        folder: the run folder; by default, that of the file, if it names one.
        callbacks: more callbacks than those of the file.
        resumes: whether it may continue a run that had other batch sizes.

    Raises:
        ConfigError: something in it cannot be built; the message says where it was written.
        StrettoError: the run cannot be as described.
    """
    check_complete(config)
    _check_world_size(config)
    spec = make_spec(config)
    run = build_run(config, spec)
    prepare_run(config, with_some_maximum(run), resumes=resumes)
    seed_everything(config.seed)
    model, mesh = _made(config, config.model, nn.Module, ("model",)), None
    if config.mesh is not None and math.prod(config.mesh.values()) > 1:
        device = Ranks.from_environment(config.device).device.type
        names = tuple(config.mesh)
        mesh = init_device_mesh(device, tuple(config.mesh.values()), mesh_dim_names=names)
    if isinstance(config.parallel, Target):
        given = (model,) if mesh is None else (model, mesh)
        model = _made(config, config.parallel, nn.Module, ("parallel",), *given)
    elif config.parallel == "fsdp":
        precision: Literal["fp32", "bf16"] = "bf16" if config.precision == "bf16" else "fp32"
        model = shard_blocks(model, device=config.device, mesh=mesh, precision=precision)
    # What we have sharded casts for itself.
    casts = config.parallel == "fsdp" and is_fully_sharded(model) and config.precision == "bf16"
    step = make_step(config, model)
    named = [
        _made(config, one, Callback, ("callbacks", number))
        for number, one in enumerate(config.callbacks)
    ]
    trainer = Trainer(
        model if step is None else step,
        spec,
        optimizer=make_optimizer(config, model) if step is None else None,
        loss=make_loss(config, model) if step is None else None,
        batch_size=run.policy,
        schedules=run.schedules,
        values=run.values,
        rule=run.rules,
        precision="fp32" if casts else config.precision,
        loading=make_loading(config),
        evaluate=[make_evaluation(config, number) for number in range(len(config.evaluate))],
        log=make_logging(config),
        callbacks=[*named, *callbacks],
        mesh=mesh,
        folder=folder if folder is not None else config.folder,
        **{name: imported(config, getattr(config, name), name) for name in _AS_THEY_ARE},
    )
    # From here on random numbers differ between ranks, as their samples do.
    torch.manual_seed(config.seed + trainer.run.rank)
    return trainer


def with_some_maximum(run: TimesAndSizes) -> TimesAndSizes:
    """Replace a batch size that is still to be found, so that the run can be checked."""
    return replace(run, policy=with_maximum(run.policy, None))


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  the legacy generator is what libraries draw from
    torch.manual_seed(seed)


def resolved(config: RunConfig, trainer: Trainer) -> RunConfig:
    """Return the run file with the facts of the run.

    A plan then needs neither data nor torch, unless it needs the lengths of samples.

    That is the sizes of the data, the sizes that were `auto`, the scheduled values of the
    optimizer, and the run's folder.
    """
    horizon, optimizer, sizes = trainer.run.horizon, config.optimizer, config.batch_size
    if trainer.found_maximum is not None:
        sizes = with_maximum(sizes, trainer.found_maximum.size)  # type: ignore[arg-type]
    if optimizer is not None:
        defaults: dict[str, Any] = getattr(trainer.optimizer, "defaults", {})
        target = import_target(optimizer.target)
        moved = map(parse_name, ("lr", *config.schedules, *as_rules(config.rule)))
        keys = [key for key in dict.fromkeys(name.key for name in moved) if accepts(target, key)]
        stated = {key: defaults.get(key) for key in keys}
        numbers = {
            key: [*value] if isinstance(value, tuple) else value
            for key, value in stated.items()
            if isinstance(value, (int, float, tuple))
        }
        optimizer = replace(optimizer, arguments={**numbers, **optimizer.arguments})
    data = config.data
    if horizon.lengths is None:  # else only the data have them
        data = replace(
            data,
            num_samples=horizon.dataset_num_samples,
            num_tokens=None if horizon.tokens_per_sample else horizon.dataset_num_tokens,
            tokens_per_sample=horizon.tokens_per_sample,
        )
    return replace(
        config,
        data=data,
        optimizer=optimizer,
        folder=None if trainer.folder is None else str(trainer.folder),
        micro_batch_size=trainer.run.loader.micro_batch_size,
        batch_size=sizes,
    )


def check_complete(config: RunConfig) -> None:
    """Refuse a run file that is enough for a plan and not for training.

    Raises:
        ConfigError: there are no model or no data, or neither an optimizer nor a step.
    """
    needed = {"model": config.model, "data": config.data.target}
    needed["optimizer"] = config.optimizer or config.step
    missing = next((name for name, one in needed.items() if one is None), None)
    if missing is not None:
        why = f"there is no '{missing}' with a target"
        raise _untrainable(config, why, f"'{missing}: {{target: my.module:make}}'")


def _untrainable(config: RunConfig, why: str, example: str) -> ConfigError:
    where, instead = config.source.name, f"write for example {example}"
    return ConfigError.cannot("train", why=why, instead=instead, where=where)


def _check_world_size(config: RunConfig) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    key = "world_size" if config.mesh is None else "mesh"
    stated = config.world_size if config.mesh is None else math.prod(config.mesh.values())
    if stated not in (None, world_size):
        raise ConfigError.cannot(
            f"train on {world_size} ranks",
            why=f"{key} is {getattr(config, key)}",
            instead=f"use torchrun --nproc-per-node {stated}, or set {key}=null",
            where=config.source.where((key,)),
        )


def make_loss(config: RunConfig, model: nn.Module) -> Any:
    """Return the loss function: the file's, or that of the model's class."""
    if config.loss is not None:
        return imported(config, config.loss, "loss")
    loss = getattr(type(model), "loss", None)
    if callable(loss):
        return loss
    why = f"there is no 'loss', and {type(model).__name__} has no static method of that name"
    example = "'loss: {target: my.models:loss}', a function (model, batch) -> loss"
    raise _untrainable(config, why, example)


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
        options = tuples(group.arguments)
        groups.append({"params": [rest.pop(key) for key in taken], "name": name, **options})
    if rest:
        # First, so that the ledger shows the general values without a group's name.
        groups.insert(0, {"params": list(rest.values()), "name": "rest"})
    parameters = groups if section.groups else list(rest.values())
    tupled = Target(target=section.target, arguments=tuples(section.arguments))
    return _made(config, tupled, Optimizer, ("optimizer",), parameters)


def make_step(config: RunConfig, model: nn.Module) -> TrainStep | None:
    """Return the file's own training step; None if it has none.

    Raises:
        ConfigError: it cannot be made, or is no `TrainStep`.
    """
    section = config.step
    if section is None:
        return None
    with config.source.at("step"):
        target = import_target(section.target)
    given: dict[str, Any] = {"model": model}
    if config.optimizer is not None:
        given["optimizer"] = make_optimizer(config, model)
    if config.loss is not None or accepts(target, "loss"):
        given["loss"] = make_loss(config, model)
    return _made(config, section, TrainStep, ("step",), **given)  # type: ignore[type-abstract]


def make_evaluation(config: RunConfig, number: int) -> Evaluation:
    """Return an evaluation: its data, metrics and interval."""
    section, path = config.evaluate[number], ("evaluate", number)
    own = {one.name: getattr(section, one.name) for one in fields(section)}
    with config.source.at(*path):
        own = imported(config, own, *path)
        if section.data is None:
            own["data"] = _validation_data(config, path)
        return Evaluation(**own)


def _validation_data(config: RunConfig, path: Keys) -> Any:
    """Return the data that the data's target makes with `split="validation"`."""
    target, arguments = config.data.target, config.data.arguments
    assert target is not None, "checked before anything is built"
    function = import_target(target)
    if not accepts(function, "split") or arguments.get("split") == VALIDATION:
        raise ConfigError.cannot(
            "evaluate",
            why=f"there is no 'data' to evaluate on, and {target} takes no 'split', or the "
            "validation split is trained on",
            instead="write for example 'data: {target: my.data:make_validation}' in it",
            where=config.source.where(path),
        )
    validation = Target(target=target, arguments={**arguments, "split": VALIDATION})
    with config.source.at("data"):
        data = call_target(validation)
    return DataSpec.of(data, sharded=config.data.sharded)


def make_logging(config: RunConfig) -> Logging:
    """Return when metrics are logged, and where they go."""
    log, names = config.log, config.log.loggers
    if names is None:
        names = ["tensorboard"] if find_spec("tensorboard") else []
    kinds = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MLflowLogger}
    with config.source.at("log", "loggers"):
        found = imported(config, names, "log", "loggers")
        loggers = [kinds[one]() if isinstance(one, str) else one for one in found]
        return Logging(log.every, log.flush, loggers, log.console, public(written(config)))


def _made(
    config: RunConfig,
    section: Target | None,
    kind: type[S],
    path: Keys,
    *positional: Any,
    **extra: Any,
) -> S:
    """Call a target and check the result.

    Raises:
        ConfigError: it cannot be called, or returns another kind of object.
    """
    assert section is not None, "checked before anything is built"
    with config.source.at(*path):
        found = call_target(section, *positional, **extra)
        if isinstance(found, kind):
            return found
        raise ConfigError.cannot(
            f"use {section.target} as {show_path(path)}",
            why=f"it makes a {type(found).__name__} and not a {kind.__name__}",
            instead=f"name a class or a function that makes a {kind.__name__}",
        )


class Finding(NamedTuple):
    """The facts about a run for a search for a batch size."""

    step: TrainStep
    measures_noise: bool
    batch: Any
    """A few samples, padded to the longest of them, or a function that makes other sizes."""
    most: int | None
    """Samples in the data set, or tokens; None if that is not known."""


def build_finding(
    config: RunConfig, *, on_meta: bool = False, amount: type[int] | None = None
) -> Finding:
    """Return the training step of the run that a file describes, and an example of a batch.

    Args:
        config: the run file.
        on_meta: whether the model is built without memory, so that it may be larger than this
            machine; else it is built and moved to its device.
        amount: `Tokens` to ask for a budget in tokens, `int` for samples; None: as the batch sizes.

    Raises:
        ConfigError: something in it cannot be built; the message says where it was written.
        StrettoError: the run cannot be as described.
    """
    check_complete(config)
    seed_everything(config.seed)
    spec = make_spec(config)
    run = None
    # Some runs can be planned only where they train; others are refused there.
    with contextlib.suppress(StrettoError):
        run = with_some_maximum(build_run(config, spec))
    if amount is None:
        is_in_tokens = run is not None and run.policy.unit is TimeUnit.TOKEN
        amount = Tokens if is_in_tokens and spec.lengths is not None else int
    batch = _examples(config, spec, amount)
    with config.source.at("device"):
        device = torch.device("meta") if on_meta else find_device(config.device)
    with device if on_meta else contextlib.nullcontext():
        model = _made(config, config.model, nn.Module, ("model",))
    model.to(device)
    step = make_step(config, model)
    if step is None:
        reduction = config.stepping.loss_reduction
        step = SupervisedStep(
            model,
            make_optimizer(config, model),
            as_loss(make_loss(config, model), reduction),
            precision=config.precision,
            clip_norm=config.clip_norm,
            loss_reduction=reduction,
            compile=config.compile and not on_meta,
        )
    noise = _measures_noise(config, run)
    counts = spec.counts
    most = counts["dataset_num_tokens" if amount is Tokens else "dataset_num_samples"]
    return Finding(step, noise, batch, most)


def _measures_noise(config: RunConfig, run: TimesAndSizes | None) -> bool:
    """Return whether batch sizes or callbacks read the noise of gradients, which takes memory."""
    reads: frozenset[str] = frozenset()
    with contextlib.suppress(StrettoError):
        reads = reads if run is None else run.policy.bind(run.horizon).reads
    kinds = []
    for section in config.callbacks:
        with contextlib.suppress(ConfigError):
            kinds += [one for one in [import_target(section.target)] if isinstance(one, type)]
    return keeps_gradients_apart(reads, kinds)


def _examples(config: RunConfig, spec: DataSpec, amount: type[int]) -> Any:
    if amount is Tokens and spec.lengths is None:
        raise ConfigError.cannot(
            "find a budget in tokens",
            why="the lengths of the samples are not known",
            instead="have the data's target return DataSpec(dataset, lengths=...)",
            where=config.source.where(("data",)),
        )
    if spec.is_map_style:
        loading = make_loading(config)
        given: dict[str, Any] = {"loading": loading, "sequence_length": config.sequence_length}
        loader = StepLoader(spec, 1, max_duration="1ba", **given, rank=0, world_size=1)
        if amount is Tokens:
            return unequal_samples(loader, packed=loading.packed)
        return example_batches(loader)
    for batch in spec.data:
        return resizable(spec, batch)
    raise ConfigError.cannot(
        "find a batch size",
        why="the data have no batch",
        instead="write data that yield at least one",
        where=config.source.where(("data",)),
    )
