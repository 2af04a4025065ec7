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
from stretto.config.targets import import_target
from stretto.data import DataSpec, StepLoader
from stretto.distributed.strategy import shard_blocks
from stretto.errors import ConfigError, StrettoError
from stretto.memory.examples import example_batches, resizable
from stretto.runtime import SupervisedStep, TrainStep
from stretto.training import Callback, Trainer
from stretto.training.criterion import as_loss
from stretto.training.stepping.fitting import FoundMaximum, keeps_gradients_apart

_NO_LIMIT = 2**31
"""Stands for a largest batch size that only training finds."""


def build_trainer(
    config: RunConfig,
    *,
    folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Return the trainer of the run that a file describes; targets are imported and called.

    Args:
        config: the run file.
        folder: the run folder; left out, that of the file, if it names one.
        callbacks: listeners besides those of the file.

    Raises:
        ConfigError: something in it cannot be built; the message says where it stands.
        StrettoError: the run cannot be as described.
    """
    check_complete(config)
    world_size = _world_size(config)
    spec = make_spec(config)
    run = build_run(config, spec, world_size=world_size)
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
        rule=run.rule,
        precision=config.precision,
        clip_norm=config.clip_norm,
        compile=config.compile,
        device=config.device,
        loading=make_loading(config),
        stepping=make_stepping(config),
        evaluate=evaluations,
        checkpoint=make_checkpointing(config, run),
        log=make_logging(config, run),
        callbacks=[*make_callbacks(config), *callbacks],
        folder=folder if folder is not None else config.folder,
        prepared=prepared,
    )
    # From here on chance differs between ranks, as their samples do.
    torch.manual_seed(config.seed + int(os.environ.get("RANK", "0")))
    return trainer


def with_some_maximum(run: TimesAndSizes) -> TimesAndSizes:
    """The run with a largest batch size that is still to be found, so that it can be checked."""
    if not awaits_maximum(run.policy):
        return run
    return replace(run, policy=with_maximum(run.policy, _NO_LIMIT))


def seed_everything(seed: int) -> None:
    """Seed all chance that is used while a model is built: Python, NumPy and torch."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  the legacy generator is what libraries draw from
    torch.manual_seed(seed)


def resolved(config: RunConfig, trainer: Trainer) -> RunConfig:
    """Return the run file with what the run has found.

    That is the sizes of the data, the sizes that were `auto`, and its folder.

    With it, `stretto plan` needs neither the data nor torch, and `stretto train` can go on.
    """
    horizon = trainer.horizon
    sizes = {
        "num_samples": horizon.dataset_num_samples,
        "num_tokens": None if horizon.tokens_per_sample else horizon.dataset_num_tokens,
        "tokens_per_sample": horizon.tokens_per_sample,
    }
    optimizer = config.optimizer
    if optimizer is not None and "lr" not in optimizer.arguments:
        base = trainer.run.hyperparameters.base.get("lr")
        if base is not None:
            optimizer = type(optimizer).model_validate({**optimizer.model_dump(), "lr": base})
    folder = None if trainer.folder is None else str(trainer.folder)
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=sizes),
            "optimizer": optimizer,
            "folder": folder,
            "micro_batch_size": trainer.loader.micro_batch_size,
            "batch_size": _with_maximum(config.batch_size, trainer.found_maximum),
        }
    )


def _with_maximum(written: Any, found: FoundMaximum | None) -> Any:
    """Return batch sizes with what was found in the place of each `max_batch_size: auto`."""
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
        ConfigError: there is no model, or no optimizer and no step of its own.
    """
    examples = {
        "model": "model: {target: my.models:Model}",
        "optimizer": "optimizer: {target: torch.optim:AdamW, lr: 3.0e-4}",
    }
    for name, example in examples.items():
        is_made_by_step = name == "optimizer" and config.step is not None
        if getattr(config, name) is None and not is_made_by_step:
            raise ConfigError.cannot(
                "train",
                why=f"there is no '{name}'",
                instead=f"write for example '{example}'",
                where=config.source.name,
            )


def _world_size(config: RunConfig) -> int:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if config.world_size not in (None, world_size):
        raise ConfigError.cannot(
            f"train on {world_size} rank{'s' if world_size > 1 else ''}",
            why=f"the run is said to have {config.world_size}",
            instead=f"start it with torchrun --nproc-per-node {config.world_size}, "
            "or set world_size=null",
            where=config.source.where(("world_size",)),
        )
    return world_size


MICRO_BATCHES = 2
"""Of a step with several, the second is the one that needs the most: the gradients are there."""


class Finding(NamedTuple):
    """What a search for a batch size needs to know of a run."""

    step: TrainStep
    accumulation: int
    measures_noise: bool
    batch: Any
    """A few samples, padded to the longest of them, or a function that makes other sizes."""
    num_samples: int | None
    """Samples in the data set; None where that is not known."""


def build_finding(config: RunConfig, *, on_meta: bool = False) -> Finding:
    """Return the training step of the run that a file describes, and an example of a batch.

    Args:
        config: the run file.
        on_meta: whether the model is built without memory, so that it may be larger than this
            machine; else it is built and moved to where it trains.

    Raises:
        ConfigError: something in it cannot be built; the message says where it stands.
        StrettoError: the run cannot be as described.
    """
    check_complete(config)
    seed_everything(config.seed)
    spec = make_spec(config)
    batch = _examples(config, spec)
    device = torch.device("meta") if on_meta else _device(config)
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
    """Whether steps keep gradients apart, for batch sizes or callbacks that follow their noise."""
    reads: frozenset[str] = frozenset()
    # What cannot be planned for the data here can where it trains, or is refused there.
    with contextlib.suppress(StrettoError):
        run = with_some_maximum(build_run(config, spec))
        reads = run.policy.bind(run.horizon).reads
    callbacks = []
    for section in config.callbacks:
        # What cannot be imported here can where it trains, or is refused there.
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
        why="the data have no batch to look at",
        instead="write data that yield at least one",
        where=config.source.where(("data",)),
    )


def _device(config: RunConfig) -> torch.device:
    name = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError.cannot(
            f"use the device {name!r}",
            why=str(error).splitlines()[0].lower().rstrip("."),
            instead="write one that this machine has, or ask with --device-memory",
            where=config.source.where(("device",)),
        ) from None
    return device
