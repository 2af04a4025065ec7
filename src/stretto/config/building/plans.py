"""A run file to a plan, without torch where the file states the sizes of its data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.batching import Fixed
from stretto.batching.adaptive.following import check_monitored, followed_metric, metrics_of
from stretto.config.building.hyperparameters import base_values, check_optimizer, effective
from stretto.config.building.times_and_sizes import (
    TimesAndSizes,
    build_run,
    planned_micro_batch_size,
)
from stretto.config.reading.source import as_key
from stretto.config.run import RunConfig
from stretto.errors import PlanError
from stretto.planning import Plan, Prepared, bind_run
from stretto.planning.plan import plan_prepared

MAX_STAGES = 100_000
"""Most stages of the run of a file; a ramp from 32 to 4,096 in steps of one has 4,065."""


def build_plan(config: RunConfig, *, world_size: int | None = None) -> Plan:
    """Return the plan of the run that a file describes.

    >>> config = RunConfig.parse({
    ...     "max_duration": "2ep",
    ...     "data": {"target": "my.data:make", "num_samples": 1000},
    ...     "batch_size": {"ramp": "double", "start": 8, "end": 32, "over": "50%"},
    ... })
    >>> [(stage.size, stage.batches) for stage in build_plan(config).stages]
    [(8, 63), (16, 31), (32, 32)]

    Args:
        config: the run file.
        world_size: how many ranks; left out, those that the file states, or one.

    Raises:
        ConfigError: what it says cannot be built, or not on this run.
        PlanError: only the run itself can tell its batch sizes.
    """
    world_size = world_size or config.world_size or 1
    run = build_run(config, world_size=world_size)
    prepared = prepare_run(config, run)
    return plan_of(config, prepared, world_size=world_size)


def plan_of(config: RunConfig, run: Prepared, *, world_size: int = 1) -> Plan:
    """Return the plan of a run that was prepared from `config`.

    Raises:
        PlanError: only the run itself can tell its batch sizes, or the ranks cannot share them.
    """
    try:
        return plan_prepared(
            run,
            world_size=world_size,
            micro_batch_size=planned_micro_batch_size(config),
            base=base_values(config),
        )
    except PlanError as error:
        raise error.recast(
            PlanError, where=config.source.where(("batch_size",)), word=as_key
        ) from error


def ends_of(
    config: RunConfig,
    run: TimesAndSizes,
    bounds: tuple[int, int],
    *,
    world_size: int = 1,
) -> tuple[Plan, Plan]:
    """Return the plans of a run with the smallest and with the largest size that it may decide.

    Raises:
        ConfigError: a piece does not fit the run.
        PlanError: the ranks cannot share the smallest size.
    """
    smallest, largest = (
        plan_of(
            config,
            prepare_run(config, replace(run, policy=Fixed(size))),
            world_size=world_size,
        )
        for size in bounds
    )
    return smallest, largest


def prepare_run(config: RunConfig, run: TimesAndSizes) -> Prepared:
    """Bind a run, and refuse what cannot be, as far as that is known before anything is built.

    Raises:
        ConfigError: a piece does not fit the run, or the file contradicts itself.
    """

    def at(kind: str, name: str = "") -> Any:
        if kind == "triggers":
            return config.source.at(*run.places[name])
        return config.source.at(kind, name) if name else config.source.at(kind)

    prepared = bind_run(
        run.horizon,
        run.policy,
        schedules=effective(run.schedules, config),
        triggers=run.triggers,
        rule=run.rule,
        most_stages=MAX_STAGES,
        at=at,
    )
    check_optimizer(config)
    measured = metrics_of(config.evaluations)
    with config.source.at("batch_size"):
        followed_metric(prepared.bound_policy.reads, measured)
    if config.checkpoint is not None and config.checkpoint.monitor is not None:
        with config.source.at("checkpoint", "monitor"):
            check_monitored(config.checkpoint.monitor, measured)
    return prepared
