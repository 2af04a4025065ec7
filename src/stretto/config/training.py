"""Trainers, and the search for a batch size, from run files."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stretto.batching import awaits_maximum, with_maximum
from stretto.config.parts import (
    make_callbacks,
    make_checkpointing,
    make_evaluation,
    make_loading,
    make_logging,
    make_loss,
    make_model,
    make_optimizer,
    make_step,
    make_stepping,
)
from stretto.config.plans import TimesAndSizes, build_run, make_spec, prepare_run
from stretto.config.run import RunConfig
from stretto.config.targets import accepts, import_target
from stretto.data import DataSpec, StepLoader
from stretto.distributed.ranks import find_device
from stretto.distributed.strategy import shard_blocks
from stretto.errors import ConfigError, StrettoError
from stretto.memory.examples import example_batches, resizable
from stretto.runtime import SupervisedStep, TrainStep
from stretto.training import Callback, Trainer
from stretto.training.criterion import as_loss
from stretto.training.stepping.fitting import FoundMaximum
from stretto.training.stepping.measuring import keeps_gradients_apart

_NO_LIMIT = 2**31
"""The largest batch size while training has not found one."""


def build_trainer(
    config: RunConfig,
    *,
    folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Return the trainer of the run that a file describes; targets are imported and called.

    Args:
        config: the run file.
        folder: the run folder; by default, that of the file, if it names one.
        callbacks: more callbacks than those of the file.

    Raises:
        ConfigError: something in it cannot be built; the message says where it was written.
        StrettoError: the run cannot be as described.
    """
    check_complete(config)
    _check_world_size(config)
    spec = make_spec(config)
    run = build_run(config, spec)
    prepared = prepare_run(config, with_some_maximum(run))
    seed_everything(config.seed)
    model = make_model(config)
    if config.parallel == "fsdp":
        model = shard_blocks(model, device=config.device)
    step = make_step(config, model)
    evaluations = [make_evaluation(config, one, run) for one in config.evaluations]
    trainer = Trainer(
        model if step is None else step,
        spec,
        optimizer=make_optimizer(config, model) if step is None else None,
        loss=make_loss(config, model) if step is None else None,
        max_duration=run.horizon.max_duration,
        batch_size=run.policy,
        micro_batch_size=config.micro_batch_size,
        schedules=run.schedules,
        precision=config.precision,
        clip_norm=config.clip_norm,
        compile=config.compile,
        device=config.device,
        loading=make_loading(config),
        stepping=make_stepping(config, run),
        evaluate=evaluations,
        checkpoint=make_checkpointing(config, run),
        log=make_logging(config, run),
        callbacks=[*make_callbacks(config), *callbacks],
        folder=folder if folder is not None else config.folder,
        prepared=prepared,
    )
    # From here on random numbers differ between ranks, as their samples do.
    torch.manual_seed(config.seed + int(os.environ.get("RANK", "0")))
    return trainer


def with_some_maximum(run: TimesAndSizes) -> TimesAndSizes:
    """Replace a largest batch size that is still to be found, so that the run can be checked."""
    if not awaits_maximum(run.policy):
        return run
    return replace(run, policy=with_maximum(run.policy, _NO_LIMIT))


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  the legacy generator is what libraries draw from
    torch.manual_seed(seed)


def resolved(config: RunConfig, trainer: Trainer) -> RunConfig:
    """Return the run file with the facts of the run; a plan then needs neither data nor torch.

    That is the sizes of the data, the sizes that were `auto`, the scheduled values of the
    optimizer, and the run's folder.
    """
    horizon, optimizer = trainer.horizon, config.optimizer
    changes: dict[str, Any] = {
        "data": {
            **config.data.model_dump(),
            "num_samples": horizon.dataset_num_samples,
            "num_tokens": None if horizon.tokens_per_sample else horizon.dataset_num_tokens,
            "tokens_per_sample": horizon.tokens_per_sample,
        },
        "folder": None if trainer.folder is None else str(trainer.folder),
        "micro_batch_size": trainer.loader.micro_batch_size,
        "batch_size": _with_maximum(config.batch_size.written, trainer.found_maximum),
    }
    if optimizer is not None:
        defaults: dict[str, Any] = getattr(trainer.optimizer, "defaults", {})
        target = import_target(optimizer.target)
        scheduled = [name for name in ("lr", *config.schedules) if accepts(target, name)]
        stated = {name: defaults.get(name) for name in scheduled}
        numbers = {key: value for key, value in stated.items() if isinstance(value, (int, float))}
        changes["optimizer"] = numbers | optimizer.model_dump()
    return config.changed(**changes)


def _with_maximum(written: Any, found: FoundMaximum | None) -> Any:
    """Replace each `max_batch_size: auto` by the size that was found."""
    if found is None or not isinstance(written, dict):
        return written
    changed = dict(written)
    if "periods" in written:
        changed["periods"] = [_with_maximum(period, found) for period in written["periods"]]
    if written.get("max_batch_size") == "auto":
        changed["max_batch_size"] = found.size
    return changed


def check_complete(config: RunConfig) -> None:
    """Refuse a run file that is enough for a plan and not for training.

    Raises:
        ConfigError: there is no model, or neither an optimizer nor a step.
    """
    missing = "model" if config.model is None else "optimizer"
    if config.model is None or (config.optimizer is None and config.step is None):
        raise ConfigError.cannot(
            "train",
            why=f"there is no '{missing}'",
            instead=f"write for example '{missing}: {{target: my.module:make}}'",
            where=config.source.name,
        )


def _check_world_size(config: RunConfig) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if config.world_size not in (None, world_size):
        raise ConfigError.cannot(
            f"train on {world_size} ranks",
            why=f"world_size is {config.world_size}",
            instead=f"use torchrun --nproc-per-node {config.world_size}, or set world_size=null",
            where=config.source.where(("world_size",)),
        )


MICRO_BATCHES = 2
"""Of a step with several, the second needs the most memory: the gradients exist."""


class Finding(NamedTuple):
    """The facts about a run for a search for a batch size."""

    step: TrainStep
    accumulation: int
    measures_noise: bool
    batch: Any
    """A few samples, padded to the longest of them, or a function that makes other sizes."""
    num_samples: int | None
    """Samples in the data set; None if that is not known."""


def build_finding(config: RunConfig, *, on_meta: bool = False) -> Finding:
    """Return the training step of the run that a file describes, and an example of a batch.

    Args:
        config: the run file.
        on_meta: whether the model is built without memory, so that it may be larger than this
            machine; else it is built and moved to its device.

    Raises:
        ConfigError: something in it cannot be built; the message says where it was written.
        StrettoError: the run cannot be as described.
    """
    check_complete(config)
    seed_everything(config.seed)
    spec = make_spec(config)
    batch = _examples(config, spec)
    with config.source.at("device"):
        device = torch.device("meta") if on_meta else find_device(config.device)
    with device if on_meta else contextlib.nullcontext():
        model = make_model(config)
    model.to(device)
    reduction = config.stepping.loss_reduction
    step = make_step(config, model) or SupervisedStep(
        model,
        make_optimizer(config, model),
        as_loss(make_loss(config, model), reduction),
        precision=config.precision,
        clip_norm=config.clip_norm,
        loss_reduction=reduction,
        compile=config.compile and not on_meta,
    )
    noise = _measures_noise(config, spec)
    return Finding(step, MICRO_BATCHES, noise, batch, spec.known_num_samples)


def _measures_noise(config: RunConfig, spec: DataSpec) -> bool:
    """Return whether batch sizes or callbacks read the noise of gradients, which takes memory."""
    reads: frozenset[str] = frozenset()
    # Some runs can be planned only where they train; others are refused there.
    with contextlib.suppress(StrettoError):
        run = with_some_maximum(build_run(config, spec))
        reads = run.policy.bind(run.horizon).reads
    callbacks = []
    for section in config.callbacks:
        with contextlib.suppress(ConfigError):
            callbacks.append(import_target(section.target))
    kinds = [one for one in callbacks if isinstance(one, type)]
    return keeps_gradients_apart(reads, kinds)


def _examples(config: RunConfig, spec: DataSpec) -> Any:
    if spec.is_map_style:
        collate = make_loading(config).collate_fn
        loader = StepLoader(spec, 1, max_duration="1ba", collate_fn=collate, rank=0, world_size=1)
        return example_batches(loader)
    for batch in spec.data:
        return resizable(spec, batch)
    raise ConfigError.cannot(
        "find a batch size",
        why="the data have no batch",
        instead="write data that yield at least one",
        where=config.source.where(("data",)),
    )
