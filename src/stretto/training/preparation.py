"""A run before its first step: its loader and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stretto.batching import check_pairs
from stretto.data import DataSpec, StepLoader
from stretto.optim import Hyperparameters
from stretto.planning import Plan, plan
from stretto.planning.clock import unplannable
from stretto.runtime import SupervisedStep, TrainStep
from stretto.timing import TimeLike, Timestamp
from stretto.training.distributed.ranks import Ranks
from stretto.training.settings import (
    Checkpointing,
    Evaluation,
    Loading,
    Logging,
    LossFunction,
    Stepping,
)


def make_step(
    model: nn.Module | TrainStep,
    optimizer: Optimizer | None,
    loss: LossFunction | None,
    *,
    stepping: Stepping,
    ranks: Ranks,
) -> TrainStep:
    """Return the step of a run, its model on the device of this rank."""
    if isinstance(model, TrainStep):
        model.model = ranks.place(model.model)
        model.transforms = ()  # those of another run
        return model
    assert optimizer is not None, "checked"
    assert loss is not None, "checked"
    return SupervisedStep(
        ranks.place(model),
        optimizer,
        loss,
        precision=stepping.precision,
        clip_norm=stepping.clip_norm,
        loss_reduction=stepping.loss_reduction,
        compile=stepping.compile,
        device=ranks.device.type,
    )


def make_loader(
    spec: DataSpec,
    batch_size: Any,
    max_duration: TimeLike,
    micro_batch_size: int | None,
    *,
    loading: Loading,
    ranks: Ranks,
) -> StepLoader:
    """Return the loader of this rank's share of every batch."""
    settings = {field.name: getattr(loading, field.name) for field in fields(loading)}
    return StepLoader(
        spec,
        batch_size,
        max_duration=max_duration,
        micro_batch_size=micro_batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        **settings,
    )


def make_plan(
    loader: StepLoader,
    hyperparameters: Hyperparameters,
    evaluations: Sequence[Evaluation],
    checkpoint: Checkpointing | None,
    log: Logging,
    *,
    resume_at: Timestamp | None = None,
) -> Plan | None:
    """The run as it will be, which also finds every stage that could not be; None if unknown.

    Stages that are over at `resume_at` are not checked.
    """
    if unplannable(loader.horizon, loader.policy.bind(loader.horizon)) is not None:
        # As `plan` does; hyperparameters have looked at the rule.
        check_pairs(hyperparameters.schedules, policy=loader.policy)
        return None
    triggers = {one.name: one.trigger for one in evaluations} | {"log": log.trigger}
    if checkpoint is not None:
        triggers["checkpoint"] = checkpoint.trigger
    return plan(
        loader.horizon,
        loader.policy,
        world_size=loader.world_size,
        micro_batch_size=loader.micro_batch_size,
        schedules=hyperparameters.schedules,
        base=hyperparameters.base,
        rule=hyperparameters.rule,
        triggers=triggers,
        tracks_tokens=loader.tracks_tokens,
        resume_at=resume_at,
    )
