"""A run file to a `Trainer`; this is where targets are imported and torch is."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stretto.batching import awaits_maximum, with_maximum
from stretto.config.building.data import make_spec
from stretto.config.building.parts import (
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
from stretto.config.building.plans import prepare_run
from stretto.config.building.times_and_sizes import TimesAndSizes, build_run
from stretto.config.run import RunConfig
from stretto.errors import ConfigError
from stretto.training import Callback, Trainer
from stretto.training.distributed.sharding import shard_blocks
from stretto.training.stepping.fitting import FoundMaximum

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
        base = trainer.hyperparameters.base.get("lr")
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
