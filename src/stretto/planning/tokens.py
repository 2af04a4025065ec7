"""Refusing tokens on data that cannot count them."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.batching import BoundPolicy
from stretto.errors import PlanError, cannot
from stretto.planning.watch import counters_read, reading
from stretto.schedules import BoundSchedule
from stretto.timing import BoundTrigger, Horizon, Timestamp, TimeUnit


def check_run_tokens(horizon: Horizon, policy: BoundPolicy) -> None:
    """Refuse a run or a batch size that follows tokens, which the data do not count.

    Raises:
        PlanError: the length of the run or the batch size follows tokens.
    """
    if horizon.max_duration.unit is TimeUnit.TOKEN:
        _refuse(f"run for {horizon.max_duration}", "max_duration")
    if TimeUnit.TOKEN in policy.units:
        _refuse("follow tokens with the batch size", "batch_size")


def check_tokens(
    schedules: Mapping[str, BoundSchedule], triggers: Mapping[str, BoundTrigger]
) -> None:
    """Refuse schedules and triggers that follow tokens, which the data do not count.

    Raises:
        PlanError: a schedule or a trigger follows tokens.
    """
    for name, schedule in schedules.items():
        if "token" in counters_read(schedule, [Timestamp()]):
            _refuse("follow tokens with a schedule", name)
    for name, trigger in triggers.items():
        if "token" in counters_read(reading(trigger), [Timestamp()]):
            _refuse("wait for tokens", name)


def _refuse(what: str, where: str) -> None:
    raise PlanError(
        cannot(
            what,
            why="the data cannot count their tokens",
            instead="write it in 'sp' or 'ep', or pass get_num_tokens_in_batch with the data",
            where=where,
        )
    )
